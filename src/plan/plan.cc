#include "plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <variant>

#include "halftone/error.h"
#include "plan/listed.h"
#include "plan/validate.h"

namespace halftone {
namespace planning {
namespace {

/// A 64-bit mix of everything that a plan depends on (FNV-1a over 64-bit words, then a finaliser).
class Fingerprint {
 public:
  Fingerprint& add(std::uint64_t word) {
    hash_ = (hash_ ^ word) * 0x100000001b3;
    hash_ ^= hash_ >> 29;
    return *this;
  }
  Fingerprint& add(float x) { return add(std::uint64_t{std::bit_cast<std::uint32_t>(x)}); }
  Fingerprint& add(const KvFormat& f) {
    return add(static_cast<std::uint64_t>(f.dtype) << 24 | static_cast<std::uint64_t>(f.granularity) << 16 |
               static_cast<std::uint64_t>(f.scale_dtype) << 8 | (f.asymmetric ? 1U : 0U))
        .add(static_cast<std::uint64_t>(f.group_size));
  }
  std::uint64_t value() const { return hash_ | 1; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325;
};

/// What heads and dims leave open.
void add_place(Fingerprint& f, const KvCacheSpec& spec) {
  f.add(static_cast<std::uint64_t>(spec.rope_dim));
  f.add(static_cast<std::uint64_t>(spec.page_size) << 4 | (spec.scale_k ? 8U : 0U) |
        (spec.offset_k ? 4U : 0U) | (spec.rotate_k ? 2U : 0U) | (spec.rotate_v ? 1U : 0U))
      .add(spec.k_format)
      .add(spec.v_format);
}
void add_place(Fingerprint& f, const KvTensors& tensors) { f.add(static_cast<std::uint64_t>(tensors.dtype)); }

std::uint64_t fingerprint(const AttentionProblem& p, int workers) {
  Fingerprint f;
  for (const int x : {static_cast<int>(p.device.type),
                      p.device.index,
                      p.batch,
                      p.q_heads,
                      p.kv_heads(),
                      p.head_dim(),
                      p.v_dim(),
                      p.max_q_len,
                      p.min_q_len,
                      p.max_kv_len,
                      static_cast<int>(p.q_dtype),
                      static_cast<int>(p.out_dtype),
                      int{p.mask.causal},
                      p.mask.window_left,
                      p.mask.window_right,
                      int{p.alibi},
                      int{p.sinks},
                      int{p.lse},
                      int{p.appends},
                      static_cast<int>(p.policy),
                      static_cast<int>(p.arithmetic),
                      workers}) {
    f.add(static_cast<std::uint64_t>(static_cast<std::int64_t>(x)));
  }
  f.add(static_cast<std::uint64_t>(p.max_total_kv)).add(static_cast<std::uint64_t>(p.max_prompt_kv));
  f.add(std::uint64_t{p.kv.index()});
  std::visit([&f](const auto& place) { add_place(f, place); }, p.kv);
  f.add(static_cast<std::uint64_t>(p.listed.top_k)).add(static_cast<std::uint64_t>(p.listed.extra_top_k));
  if (p.listed.extra_top_k != 0) add_place(f, p.listed.extra);
  return f.add(p.scale).add(p.softcap).value();
}

/// What beginning a unit costs, in steps of the time that reading one step's keys takes.
std::int32_t unit_cost(const AttentionProblem& p, const Kernel& kernel) {
  const auto* const spec = std::get_if<KvCacheSpec>(&p.kv);
  if (kernel.unit_bytes == 0 || spec == nullptr) return 0;
  const std::int64_t step_bytes =
      std::max<std::int64_t>(1, page_layout(*spec).tile_bytes * (kernel.kv_tile / kTileTokens));
  return static_cast<std::int32_t>((kernel.unit_bytes + step_bytes / 2) / step_bytes);
}

/// Keys of a head that fill what a queue's heads may have at a time.
std::int32_t queue_tokens(const AttentionProblem& p, const Kernel& kernel) {
  if (kernel.queue_bytes == 0) return 0;
  std::int64_t key_bytes = 0;
  if (const auto* const tensors = std::get_if<KvTensors>(&p.kv)) {
    key_bytes = std::int64_t{p.head_dim() + p.v_dim()} * dtype_bits(tensors->dtype) / 8;
  } else {
    key_bytes = page_layout(std::get<KvCacheSpec>(p.kv)).tile_bytes / kTileTokens;
  }
  return static_cast<std::int32_t>(std::max<std::int64_t>(1, kernel.queue_bytes / key_bytes));
}

ScheduleParams schedule_params(const AttentionProblem& p, const Kernel& kernel, const Choice& choice,
                               int workers) {
  const bool absolute = p.policy == SplitPolicy::kBatchInvariant;
  const auto step = static_cast<std::uint32_t>(absolute ? kernel.split_tokens : kernel.kv_tile);
  const auto window = [](int tokens) { return std::min(tokens, kMaxTokens - 1); };
  const ScheduledBounds bounds = scheduled_bounds(p);
  ScheduleParams s{};
  s.batch = static_cast<std::int32_t>(bounds.batch);
  s.kv_heads = p.kv_heads();
  s.group = p.q_heads / p.kv_heads();
  s.row_block = kernel.row_block;
  s.step_log2 = std::countr_zero(step);
  s.workers = std::max(1, workers / kernel.together);
  s.max_q_len = bounds.max_q_len;
  s.max_kv_len = bounds.max_kv_len;
  s.window_left = window(p.mask.window_left);
  s.window_right = p.mask.causal ? 0 : window(p.mask.window_right);
  s.absolute = absolute;
  s.unit_cost = absolute ? 0 : unit_cost(p, kernel);
  s.even_parts = kernel.latent;  // whose items take as long to begin and to end as several steps
  s.queue_tokens = queue_tokens(p, kernel);
  s.queue_heads = least_queue_heads(s);
  s.min_rows = choice.min_rows;
  s.max_rows = choice.max_rows;
  s.max_steps = max_unit_steps(s);
  return s;
}

/// What the staged keys and values of a round may take.
constexpr std::int64_t kStagedBytes = std::int64_t{1} << 29;

/// Keys of the requests that a pass of at least `min_rows` packed rows serves, at the bounds.
std::int64_t max_staged_keys(const AttentionProblem& problem, std::int32_t min_rows) {
  const bool prompts_alone = min_rows > problem.q_heads / problem.kv_heads();
  if (prompts_alone && problem.max_prompt_kv != 0) return problem.max_prompt_kv;
  return std::max<std::int64_t>(1, most_keys(problem));
}

/// As many heads at a time as fit into that and divide all, so that the rounds have one schedule; at least
/// one.
Staged stage_keys(const AttentionProblem& problem, const Kernel& kernel, std::int32_t min_rows,
                  const StagedKey& key) {
  Staged staged;
  const int all = problem.kv_heads();
  staged.keys = max_staged_keys(problem, min_rows);
  if (key.tokens > 1) {
    staged.keys += (key.tokens - 1) * std::min<std::int64_t>(problem.batch, staged.keys);
    staged.keys = (staged.keys + key.tokens - 1) / key.tokens * key.tokens;
  }
  if (staged.keys > INT32_MAX) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("max_total_kv is {} and max_prompt_kv {} with batch * max_kv_len = {}, but {} reads at "
                    "most {} staged keys: give the largest sum of a batch's lengths, or of its prompts', "
                    "up to that.",
                    problem.max_total_kv, problem.max_prompt_kv,
                    std::int64_t{problem.batch} * problem.max_kv_len, kernel.name, INT32_MAX));
  }
  const std::int64_t head_bytes =
      staged.keys * key.bytes + (std::int64_t{problem.batch} + 1) * key.request_bytes;
  staged.heads = all;
  while (staged.heads > 1 && (all % staged.heads != 0 || staged.heads * head_bytes > kStagedBytes)) {
    --staged.heads;
  }
  staged.rounds = all / staged.heads;
  staged.bytes = staged.heads * head_bytes;
  return staged;
}

Pass make_pass(const AttentionProblem& problem, const Backend& backend, const Choice& choice, int workers) {
  const Kernel& kernel = backend.kernels[choice.index];
  Pass pass;
  pass.kernel_index = choice.index;
  pass.variant = choice.variant;
  pass.schedule = schedule_params(problem, kernel, choice, workers);
  const StagedKey key = backend.staged_key == nullptr ? StagedKey{} : backend.staged_key(problem, kernel);
  if (key.bytes != 0 && problem.is_listed()) {
    pass.staged.bytes = scheduled_bounds(problem).batch * problem.listed.top_k * key.bytes;
  } else if (key.bytes != 0) {
    pass.staged = stage_keys(problem, kernel, choice.min_rows, key);
    pass.schedule.kv_heads = pass.staged.heads;
    pass.schedule.staged_tokens = key.tokens;
    pass.schedule.queue_tokens =
        static_cast<std::int32_t>(std::max<std::int64_t>(1, kernel.queue_bytes / key.read_bytes));
  }
  pass.partials = max_partials(pass.schedule);
  pass.backend_bytes = backend.extra_bytes(pass.schedule.workers, pass.partials);
  if (backend.scratch_bytes != nullptr)
    pass.scratch_bytes = pass.schedule.workers * backend.scratch_bytes(kernel, pass.variant);
  return pass;
}

PassInfo pass_info(const Pass& pass, const Kernel& kernel, std::string reason, bool fuses_append) {
  const ScheduleParams& s = pass.schedule;
  PassInfo info;
  info.config = kernel.name;
  info.reason = std::move(reason);
  info.min_rows = std::max(1, s.min_rows);
  info.max_rows = static_cast<int>(max_served_rows(s));
  info.row_block = kernel.row_block;
  info.kv_tile = kernel.kv_tile;
  info.split_tokens = s.absolute && s.queue_tokens == 0 ? kernel.split_tokens : 0;
  info.max_units = saturating_product(max_units(s), pass.staged.rounds);
  info.max_partials = pass.partials;
  info.fuses_append = fuses_append;
  info.staged_bytes = pass.staged.bytes;
  return info;
}

/// Fields that PlanInfo has from its last pass.
void describe_longest(PlanInfo& info) {
  const PassInfo& last = info.passes.back();
  info.config = last.config;
  info.reason = last.reason;
  info.row_block = last.row_block;
  info.kv_tile = last.kv_tile;
  info.split_tokens = last.split_tokens;
  info.max_units = last.max_units;
  info.max_partials = last.max_partials;
  info.staged_bytes = last.staged_bytes;
}

void check_resources(const Plan::Impl& plan, const ScheduleParams& s) {
  constexpr std::int64_t kMaxBytes = std::int64_t{1} << 46;
  if (saturating_product(max_positions(s), s.workers) >= std::int64_t{1} << 62) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("batch {} with max_q_len {} and max_kv_len {} allows so many steps of work that, "
                            "times the {} workers, they do not stay below 2^62: use smaller bounds.",
                            s.batch, s.max_q_len, s.max_kv_len, s.workers));
  }
  if (s.queue_tokens > 0 && max_units(s) > INT32_MAX) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("batch {} with max_q_len {} allows {} units of work, but a queue counts them in 31 "
                    "bits: use smaller bounds.",
                    s.batch, s.max_q_len, max_units(s)));
  }
  if (plan.info.workspace_bytes > kMaxBytes || max_partials(s) > INT32_MAX) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("workspace_bytes is {} for {} workers, but must be at most 2^46: use fewer workers or a "
                    "smaller max_kv_len.",
                    plan.info.workspace_bytes, s.workers));
  }
}

std::string mask_text(const Mask& mask) {
  std::string text = mask.causal ? "causal" : "all keys";
  if (mask.window_left >= 0) text += fmt::format(", window left {}", mask.window_left);
  if (mask.window_right >= 0) text += fmt::format(", window right {}", mask.window_right);
  return text;
}

std::string place_text(const KvTensors& tensors) {
  return fmt::format("plain K and V in {}", dtype_name(tensors.dtype));
}

std::string place_text(const KvCacheSpec& spec) {
  std::string text, treated;
  for (const KvSpan& span : spec.spans()) {
    const std::string_view part = span.k_first < 0 ? "V" : span.v_first < 0 ? "K" : "K and V";
    text += fmt::format("{} {}, ", part, format_name(span.format));
    if (span.rotate) treated += fmt::format(", {} rotated", part);
  }
  if (spec.offset_k) treated += ", K less an offset per channel";
  if (spec.scale_k) treated += ", K scaled per channel";
  return text + fmt::format("pages of {} tokens", spec.page_size) + treated;
}

std::string keys_text(const ListedKeys& listed) {
  std::string first = fmt::format("each query's list of up to {} slots", listed.top_k);
  if (listed.extra_top_k == 0) return first;
  return fmt::format("{}, and one of up to {} slots of a second cache: {}", first, listed.extra_top_k,
                     place_text(listed.extra));
}

}  // namespace

std::string_view policy_name(SplitPolicy policy) {
  switch (policy) {
    case SplitPolicy::kFast:
      return "fast";
    case SplitPolicy::kReproducible:
      return "reproducible";
    case SplitPolicy::kBatchInvariant:
      return "batch_invariant";
  }
  return "unknown";
}

Plan make_plan(const AttentionProblem& problem) {
  validate_problem(problem);
  auto impl = std::make_shared<Plan::Impl>();
  const Backend& backend = backend_for("plan", problem.device);
  std::vector<Choice> choices = choose_kernels(backend, problem);
  if (choices.empty()) backend.refuse(problem);
  const int workers = problem.workers != 0 ? problem.workers : backend.workers(problem.device);

  impl->problem = problem;
  impl->backend = &backend;
  impl->scale = problem.scale != 0
                    ? problem.scale
                    : static_cast<float>(1.0 / std::sqrt(static_cast<double>(problem.head_dim())));
  if (const auto* spec = std::get_if<KvCacheSpec>(&problem.kv)) impl->layout = page_layout(*spec);
  if (problem.listed.extra_top_k != 0) impl->extra_layout = page_layout(problem.listed.extra);
  impl->id = fingerprint(problem, workers);
  impl->workspace.v_dim = problem.v_dim();
  impl->workspace.plain = !problem.is_paged();
  impl->workspace.lists = problem.listed.extra_top_k != 0;
  impl->workspace.count = 0;
  PlanInfo& info = impl->info;
  for (Choice& choice : choices) {
    Pass& pass = impl->workspace.passes[impl->workspace.count++];
    pass = make_pass(problem, backend, choice, workers);
    const Kernel& kernel = impl->kernel(pass);
    const bool fuses =
        problem.appends && backend.fuses_append != nullptr && backend.fuses_append(problem, kernel);
    info.passes.push_back(pass_info(pass, kernel, std::move(choice.reason), fuses));
  }
  const Workspace workspace = carve_workspace(impl->workspace, nullptr);
  describe_longest(info);
  info.workers = workers;
  info.group = problem.q_heads / problem.kv_heads();
  info.schedule_bytes = workspace.schedule_bytes;
  info.workspace_bytes = workspace.bytes;
  info.fuses_append = std::ranges::all_of(info.passes, &PassInfo::fuses_append);
  for (const Pass& pass : impl->passes()) check_resources(*impl, pass.schedule);
  return Plan(std::move(impl));
}

}  // namespace planning

const AttentionProblem& Plan::problem() const { return planning::require_plan(*this).problem; }
const PlanInfo& Plan::info() const { return planning::require_plan(*this).info; }
std::size_t Plan::workspace_bytes() const { return static_cast<std::size_t>(info().workspace_bytes); }

std::string Plan::describe() const {
  const Impl& plan = planning::require_plan(*this);
  const AttentionProblem& p = plan.problem;
  const PlanInfo& i = plan.info;
  std::string text;
  const auto line = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("{:<10} {}\n", name, value);
  };
  line("device", device_name(p.device));
  line("problem", fmt::format("batch {}, {} query heads over {} KV heads, head_dim {}, V {}, up to {} "
                              "queries{}",
                              p.batch, p.q_heads, p.kv_heads(), p.head_dim(), p.v_dim(), p.max_q_len,
                              p.is_listed() ? "" : fmt::format(" and {} keys", p.max_kv_len)));
  line("cache", std::visit([](const auto& place) { return planning::place_text(place); }, p.kv));
  line("types",
       fmt::format("Q {}, O {}{}", dtype_name(p.q_dtype), dtype_name(p.out_dtype), p.lse ? ", LSE f32" : ""));
  std::string logits = fmt::format("scale {}", plan.scale);
  if (p.softcap > 0) logits += fmt::format(", softcap {}", p.softcap);
  if (p.alibi) logits += ", ALiBi";
  if (p.sinks) logits += ", sinks";
  line("logits", logits);
  line("arithmetic", std::string(arithmetic_name(p.arithmetic)));
  if (p.is_listed()) {
    line("keys", planning::keys_text(p.listed));
  } else {
    line("mask", planning::mask_text(p.mask));
  }
  if (p.appends) line("append", i.fuses_append ? "by the attention kernels" : "before attention");
  std::int64_t partials = 0;
  for (std::size_t n = 0; n < i.passes.size(); ++n) {
    const PassInfo& pass = i.passes[n];
    if (i.passes.size() > 1) {
      line("pass", fmt::format("{} of {}: requests of {} to {} packed rows", n + 1, i.passes.size(),
                               pass.min_rows, pass.max_rows));
    }
    line("config", fmt::format("{} ({})", pass.config, plan.kernel(plan.passes()[n]).use));
    line("reason", pass.reason);
    line("units", fmt::format("up to {}, each of up to {} packed rows; KV tiles of {} tokens", pass.max_units,
                              pass.row_block, pass.kv_tile));
    partials = std::max(partials, pass.max_partials);
    const planning::Staged& staged = plan.passes()[n].staged;
    if (staged.keys > 0) {
      line("staged",
           fmt::format(
               "{} of {} KV head{} at a time, up to {} keys: {} bytes of workspace",
               plan.problem.is_paged() || plan.problem.arithmetic == Arithmetic::kFp8 ? "K and V" : "K",
               staged.heads, staged.heads == 1 ? "" : "s", staged.keys, staged.bytes));
    } else if (staged.bytes > 0) {
      line("staged", fmt::format("what lists name: {} bytes of workspace", staged.bytes));
    }
  }
  for (std::size_t n = 0; n < i.passes.size(); ++n) {
    const planning::ScheduleParams& s = plan.passes()[n].schedule;
    const std::string cost = s.unit_cost == 0 ? "" : fmt::format(", a unit counted as {} more", s.unit_cost);
    const std::string split =
        s.queue_tokens > 0 ? (s.absolute ? "units from a queue" : "units from a queue, the last ones cut")
        : s.absolute       ? fmt::format("every {} tokens, equal shares of splits", i.passes[n].split_tokens)
                           : fmt::format("equal shares of KV tiles{}", cost);
    if (n == 0 || s.queue_tokens > 0) {
      line("split", fmt::format("{}: {}", planning::policy_name(p.policy), split));
    }
  }
  line("workers", fmt::format("{}", i.workers));
  line("workspace", fmt::format("{} bytes: schedule {}, up to {} partial results", i.workspace_bytes,
                                i.schedule_bytes, partials));
  return text;
}

}  // namespace halftone
