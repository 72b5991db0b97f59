#include <fmt/format.h>

#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "plan/check_tensor.h"
#include "plan/fail.h"
#include "plan/validate.h"
#include "plan/validate_cache.h"
#include "plan/validate_listed.h"
#include "plan/validate_step.h"

namespace halftone::planning {
namespace {

void check_stream(Device device, Stream stream) {
  if (device.type == DeviceType::kCpu && stream != nullptr) {
    invalid("stream is {}, but must be null on the CPU: pass {}.", stream, "nullptr");
  }
}

std::span<const std::int32_t> entries_of(const TensorView& t) {
  return {static_cast<const std::int32_t*>(t.data), static_cast<std::size_t>(t.shape[0])};
}

/// cu[0] = 0, non-decreasing, no request longer than `max`.
void check_cumulative(const TensorView& t, std::string_view name, std::int32_t max,
                      std::string_view max_name) {
  const std::span<const std::int32_t> cu = entries_of(t);
  if (cu[0] != 0) invalid("{}[0] is {}, but must be 0: start at the first token.", name, cu[0]);
  for (std::size_t i = 1; i < cu.size(); ++i) {
    if (cu[i] < cu[i - 1]) {
      invalid("{}[{}] is {}, but must be at least {}[{}] = {}: pass cumulative lengths.", name, i, cu[i],
              name, i - 1, cu[i - 1]);
    }
    if (cu[i] - cu[i - 1] > max) {
      fail(ErrorCode::kOutOfRange,
           "{} gives request {} {} tokens, but the plan's {} is {}: plan with a larger {}.", name, i - 1,
           cu[i] - cu[i - 1], max_name, max, max_name);
    }
  }
}

void check_kv_lengths(const TensorView& t, std::int32_t max) {
  const std::span<const std::int32_t> lengths = entries_of(t);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0) {
      fail(ErrorCode::kOutOfRange,
           "kv_lengths[{}] is {}, but must be 0 to max_kv_len {}: use 0 for an empty request.", i, lengths[i],
           max);
    }
    if (lengths[i] > max) {
      fail(ErrorCode::kOutOfRange,
           "kv_lengths[{}] is {}, but the plan's max_kv_len is {}: plan with a larger max_kv_len.", i,
           lengths[i], max);
    }
  }
}

/// Of lengths that are valid each; lists have no keys of requests.
void check_total(const AttentionProblem& p, const SequenceLengths& lengths) {
  const bool bounded = p.max_total_kv != 0 || p.max_prompt_kv != 0;
  if (!bounded || p.batch == 0 || p.is_listed()) return;
  const TotalKeys total = total_keys(p, lengths);
  if (p.max_total_kv != 0 && total.all > p.max_total_kv) {
    fail(ErrorCode::kOutOfRange,
         "the requests have {} keys together, but the plan's max_total_kv is {}: plan with a larger "
         "max_total_kv.",
         total.all, p.max_total_kv);
  }
  if (p.max_prompt_kv != 0 && total.prompts > p.max_prompt_kv) {
    fail(
        ErrorCode::kOutOfRange,
        "the requests of more than one query have {} keys together, but the plan's max_prompt_kv is {}: plan "
        "with a larger max_prompt_kv.",
        total.prompts, p.max_prompt_kv);
  }
}

/// Shapes of the lengths. `needed`: those that schedule() cannot do without must be present.
void check_length_tensors(const AttentionProblem& p, const SequenceLengths& lengths, bool needed) {
  const std::int64_t batch = p.batch;
  const auto check = [&](const TensorView& t, std::string_view name, std::int64_t size, bool required) {
    if (given(t) || (required && needed && batch > 0))
      check_tensor(t, {name, {DType::kInt32}, {size}, p.device});
  };
  check(lengths.cu_q, "cu_q", batch + 1, false);
  check_counts(p, lengths);
  if (p.is_listed()) {
    check_absent(lengths.kv_lengths, "kv_lengths", "counts say how long lists are");
    check_absent(lengths.cu_kv, "cu_kv", "counts say how long lists are");
  } else if (p.is_paged()) {
    check(lengths.kv_lengths, "kv_lengths", batch, true);
    check_absent(lengths.cu_kv, "cu_kv", "a paged cache is addressed by kv_lengths and its block table");
  } else {
    check(lengths.cu_kv, "cu_kv", batch + 1, true);
    check_absent(lengths.kv_lengths, "kv_lengths", "plain K and V are addressed by cu_kv");
  }
}

/// A tensor that is present exactly when the problem has asked for it.
void check_optional(const TensorView& t, const TensorRule& rule, bool asked, std::string_view option) {
  if (asked) {
    if (!given(t)) invalid("{} is absent, but problem.{} is set: pass it.", rule.name, option);
    check_tensor(t, rule);
  } else if (given(t)) {
    invalid("{} is present, but problem.{} is not set: plan with {} = true or leave it out.", rule.name,
            option, option);
  }
}

/// The schedule in a host workspace is this plan's.
const ScheduleHeader& check_header(const Plan::Impl& plan, const Schedule& schedule) {
  const ScheduleHeader& header = *schedule.header;
  if (header.magic != ScheduleHeader::kMagic) {
    invalid("workspace holds no schedule, but run needs one of this plan: call {}.", "schedule() first");
  }
  if (header.plan_id != plan.id) {
    invalid(
        "workspace holds a schedule of another plan ({:016x}), but run needs one of this plan ({:016x}): "
        "call "
        "schedule() with this plan.",
        header.plan_id, plan.id);
  }
  return header;
}

void check_tokens(const NamedTensor& t, std::int64_t total, std::string_view of) {
  if (t.view.shape[0] == total) return;
  invalid("{}.shape[0] is {}, but the schedule has {} {}: pass [{}, ...] or call schedule() again.", t.name,
          t.view.shape[0], total, of, total);
}

/// `name`: "cache", or "extra_kv".
void check_pages(const Plan::Impl& plan, const PagedKv& cache, const KvCacheSpec& want,
                 std::string_view name) {
  const KvCacheSpec& have = cache.spec;
  KvCacheSpec normal = have;  // v_head_dim 0 means head_dim
  normal.v_head_dim = normal.v_dim() == want.v_dim() ? want.v_head_dim : normal.v_head_dim;
  if (!(normal == want)) {
    const auto text = [](const KvCacheSpec& s) {
      return fmt::format("K {}, V {}, {} heads, dims {} and {}, pages of {}{}{}{}{}{}",
                         format_name(s.k_format), format_name(s.v_format), s.kv_heads, s.head_dim, s.v_dim(),
                         s.page_size, s.rotate_k ? ", K rotated" : "", s.rotate_v ? ", V rotated" : "",
                         s.offset_k ? ", K less an offset" : "", s.scale_k ? ", K scaled by channel" : "",
                         s.is_latent() ? ", latent" : "");
    };
    invalid("{}.spec is ({}), but the plan was made for ({}): plan with this cache's spec.", name, text(have),
            text(want));
  }
  const Device device = plan.problem.device;
  if (given(cache.pages) && cache.pages.device != device) {
    invalid("{}.pages is on {}, but the plan is for {}: copy the cache there or plan for its device.", name,
            device_name(cache.pages.device), device_name(device));
  }
  (void)validate_cache(cache, CacheIndex::kUnused);
}

/// How the requests of a cache without lists find their pages.
void check_table(const Plan::Impl& plan, const PagedKv& cache) {
  const Device device = plan.problem.device;
  if (plan.problem.batch > 0 || given(cache.block_table)) {
    check_tensor(cache.block_table, {"cache.block_table",
                                     {DType::kInt32},
                                     {plan.problem.batch, kAnySize},
                                     device,
                                     Strides::kLastContiguous});
  }
  if (given(cache.lengths)) {
    check_tensor(cache.lengths, {"cache.lengths", {DType::kInt32}, {plan.problem.batch}, device});
  }
}

/// K and V are where the plan expects them.
void check_place(const AttentionProblem& p, const AttentionArgs& args) {
  if (p.is_paged() == std::holds_alternative<PagedKv>(args.kv)) return;
  if (p.is_paged()) {
    invalid("k and v are {}, but the plan is for a paged cache: pass the cache, or plan for tensors.",
            "present");
  }
  invalid("k and v are {}, but the plan is for tensors: pass them, or plan for the spec of a cache.",
          "absent");
}

/// Lengths against the table's width; in trusted mode also every entry that a query can reach.
void check_block_table(const Plan::Impl& plan, const PagedKv& cache, const Schedule& schedule) {
  const std::int64_t page_size = cache.spec.page_size, width = cache.block_table.shape[1];
  const std::int64_t num_pages = cache.pages.shape[0];
  const auto* table = static_cast<const std::int32_t*>(cache.block_table.data);
  for (std::int32_t r = 0; r < plan.problem.batch; ++r) {
    const std::int32_t kv_len = schedule.kv_lengths[r], q_len = q_length(schedule, r);
    if (kv_len > width * page_size) {
      fail(ErrorCode::kOutOfRange,
           "kv_lengths[{}] is {}{}, but cache.block_table has {} pages of {} tokens per request: pass a "
           "wider table.",
           r, kv_len, plan.problem.appends ? fmt::format(" with {} new tokens", q_len) : "", width,
           page_size);
    }
    if (cache.table_mode != BlockTableMode::kTrusted || q_len == 0) continue;
    const KvRange seen = visible_range(schedule.params, q_len, kv_len, 0, q_len - 1);
    const std::int64_t end = (seen.end + page_size - 1) / page_size;
    for (std::int64_t i = seen.begin / page_size; i < end; ++i) {
      const std::int32_t page = table[r * cache.block_table.strides[0] + i];
      if (page >= 0 && page < num_pages) continue;
      fail(ErrorCode::kOutOfRange,
           "cache.block_table[{}, {}] is {}, but the cache has pages 0 to {}: correct the table or use "
           "kClamped.",
           r, i, page, num_pages - 1);
    }
  }
}

}  // namespace

void validate_workspace(const Plan::Impl& plan, const TensorView& workspace) {
  check_tensor(workspace, {"workspace", {DType::kUInt8}, {kAnySize}, plan.problem.device});
  const std::int64_t size = workspace.shape[0];
  if (size < plan.info.workspace_bytes) {
    fail(ErrorCode::kResourceExhausted,
         "workspace has {} bytes, but the plan needs {}: allocate workspace_bytes().", size,
         plan.info.workspace_bytes);
  }
  if (const auto rest = reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlignment; rest != 0) {
    invalid(
        "workspace starts {} bytes past a multiple of {}, but must be {}-byte aligned: use aligned memory.",
        rest, kWorkspaceAlignment, kWorkspaceAlignment);
  }
}

void validate_lengths(const Plan::Impl& plan, const SequenceLengths& lengths) {
  const AttentionProblem& p = plan.problem;
  check_length_tensors(p, lengths, true);
  if (!given(lengths.cu_q) && std::int64_t{p.batch} * p.max_q_len > INT32_MAX) {
    fail(ErrorCode::kOutOfRange,
         "cu_q is absent and batch * max_q_len is {}, but the number of queries must be at most {}: pass "
         "cu_q.",
         std::int64_t{p.batch} * p.max_q_len, INT32_MAX);
  }
  if (p.device.type != DeviceType::kCpu) return;
  if (given(lengths.cu_q)) check_cumulative(lengths.cu_q, "cu_q", p.max_q_len, "max_q_len");
  if (given(lengths.kv_lengths)) check_kv_lengths(lengths.kv_lengths, p.max_kv_len);
  if (given(lengths.cu_kv)) check_cumulative(lengths.cu_kv, "cu_kv", p.max_kv_len, "max_kv_len");
  check_grown(p, lengths);
  check_total(p, lengths);
  check_count_values(p, lengths);
}

void validate_schedule(const Plan::Impl& plan, const SequenceLengths& lengths, const TensorView& workspace,
                       Stream stream) {
  check_stream(plan.problem.device, stream);
  validate_workspace(plan, workspace);
  const NamedTensor output[] = {{workspace, "workspace"}};
  const NamedTensor inputs[] = {{lengths.cu_q, "cu_q"},
                                {lengths.kv_lengths, "kv_lengths"},
                                {lengths.cu_kv, "cu_kv"},
                                {lengths.counts, "counts"},
                                {lengths.extra_counts, "extra_counts"}};
  check_disjoint(output, inputs);
  validate_lengths(plan, lengths);
}

void validate_run(const Plan::Impl& plan, const AttentionArgs& args, const TensorView& workspace,
                  Stream stream) {
  const AttentionProblem& p = plan.problem;
  const std::int64_t q_heads = p.q_heads, kv_heads = p.kv_heads(), dim = p.head_dim(), v_dim = p.v_dim();
  check_stream(p.device, stream);
  validate_workspace(plan, workspace);
  const bool host = p.device.type == DeviceType::kCpu;
  // Headers of all passes hold the same totals of queries and keys.
  const Schedule schedule = carve_workspace(plan, static_cast<std::byte*>(workspace.data)).passes[0].schedule;
  if (host) check_header(plan, schedule);
  check_length_tensors(p, args.lengths, false);

  constexpr auto kLast = Strides::kLastContiguous;
  check_tensor(args.q, {"q", {p.q_dtype}, {kAnySize, q_heads, dim}, p.device, kLast});
  if (host) check_tokens({args.q, "q"}, schedule.header->total_q, "queries");
  const std::int64_t total_q = args.q.shape[0], all_q = std::int64_t{p.batch} * p.max_q_len;
  if (!host && !given(args.lengths.cu_q) && total_q != all_q) {
    invalid(
        "q.shape[0] is {}, but without lengths.cu_q each of {} requests has max_q_len {} queries: pass [{}, "
        "...], or the cu_q that schedule() saw.",
        total_q, p.batch, p.max_q_len, all_q);
  }
  check_tensor(args.out, {"out", {p.out_dtype}, {total_q, q_heads, v_dim}, p.device, kLast});
  check_optional(args.lse, {"lse", {DType::kFloat32}, {total_q, q_heads}, p.device, kLast}, p.lse, "lse");
  check_optional(args.alibi_slopes, {"alibi_slopes", {DType::kFloat32}, {q_heads}, p.device}, p.alibi,
                 "alibi");
  check_optional(args.sinks, {"sinks", {DType::kFloat32}, {q_heads}, p.device}, p.sinks, "sinks");
  if (given(args.status)) check_tensor(args.status, {"status", {DType::kInt32}, {1}, p.device});
  check_no_self_overlap(args.out, "out");
  check_no_self_overlap(args.lse, "lse");

  check_place(p, args);
  static const PagedKv kNoCache;
  static const KvTensorViews kNoTensors;
  const PagedKv& cache = p.is_paged() ? std::get<PagedKv>(args.kv) : kNoCache;
  const KvTensorViews& tensors = p.is_paged() ? kNoTensors : std::get<KvTensorViews>(args.kv);
  if (p.is_paged()) {
    check_pages(plan, cache, std::get<KvCacheSpec>(p.kv), "cache");
    if (!p.is_listed()) check_table(plan, cache);
  } else {
    const DType dtype = std::get<KvTensors>(p.kv).dtype;
    check_tensor(tensors.k, {"k", {dtype}, {kAnySize, kv_heads, dim}, p.device, kLast});
    check_tensor(tensors.v, {"v", {dtype}, {tensors.k.shape[0], kv_heads, v_dim}, p.device, kLast});
    if (host) check_tokens({tensors.k, "k"}, schedule.header->total_kv, "keys");
  }
  if (p.listed.extra_top_k != 0) check_pages(plan, args.extra_kv, p.listed.extra, "extra_kv");
  check_lists(p, args, total_q);
  check_new_tokens(p, args, total_q);

  const NamedTensor outputs[] = {
      {args.out, "out"}, {args.lse, "lse"}, {args.status, "status"}, {workspace, "workspace"}};
  const NamedTensor inputs[] = {{args.q, "q"},
                                {tensors.k, "k"},
                                {tensors.v, "v"},
                                {args.append.k, "k"},
                                {args.append.v, "v"},
                                {args.append.slot_mapping, "slot_mapping"},
                                {args.append.rope.cos, "rope.cos"},
                                {args.append.rope.sin, "rope.sin"},
                                {args.append.rope.positions, "rope.positions"},
                                {args.lengths.cu_q, "cu_q"},
                                {args.lengths.kv_lengths, "kv_lengths"},
                                {args.lengths.cu_kv, "cu_kv"},
                                {args.lengths.counts, "counts"},
                                {args.lengths.extra_counts, "extra_counts"},
                                {args.indices, "indices"},
                                {args.extra_indices, "extra_indices"},
                                {args.extra_kv.pages, "extra_kv.pages"},
                                {args.alibi_slopes, "alibi_slopes"},
                                {args.sinks, "sinks"},
                                {cache.pages, "cache.pages"},
                                {cache.block_table, "cache.block_table"},
                                {cache.lengths, "cache.lengths"}};
  check_disjoint(outputs, inputs);
  check_apart(outputs, cache);
  if (!host || !p.is_paged() || p.batch == 0) return;
  if (p.is_listed()) {
    check_listed_slots(args, schedule);
  } else {
    check_block_table(plan, cache, schedule);
  }
}

void validate_merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
                    const TensorView& out, const TensorView& lse, Stream stream) {
  using enum DType;
  if (parts.empty()) invalid("parts has {} views, but merge needs at least 1: pass the partial outputs.", 0);
  if (parts.size() != part_lse.size()) {
    invalid("part_lse has {} views, but parts has {}: pass one LSE for each part.", part_lse.size(),
            parts.size());
  }
  const Device device = parts[0].device;
  check_stream(device, stream);
  check_tensor(out, {"out",
                     {kFloat32, kFloat16, kBFloat16},
                     {kAnySize, kAnySize, kAnySize},
                     device,
                     Strides::kLastContiguous});
  check_no_self_overlap(out, "out");
  const std::int64_t rows = out.shape[0], heads = out.shape[1], dim = out.shape[2];
  if (given(lse)) {
    check_tensor(lse, {"lse", {kFloat32}, {rows, heads}, device, Strides::kLastContiguous});
    check_no_self_overlap(lse, "lse");
  }
  const NamedTensor outputs[] = {{out, "out"}, {lse, "lse"}};
  check_disjoint(outputs, {});
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string part_name = fmt::format("parts[{}]", i), lse_name = fmt::format("part_lse[{}]", i);
    check_tensor(
        parts[i],
        {part_name, {kFloat32, kFloat16, kBFloat16}, {rows, heads, dim}, device, Strides::kLastContiguous});
    check_tensor(part_lse[i], {lse_name, {kFloat32}, {rows, heads}, device, Strides::kLastContiguous});
    const NamedTensor inputs[] = {{parts[i], part_name}, {part_lse[i], lse_name}};
    check_disjoint(outputs, inputs);
  }
}

}  // namespace halftone::planning
