#include "cuda/latent/host.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <variant>

#include "cuda/append/host.h"
#include "cuda/attention/maps.h"
#include "cuda/latent/bf16/config.h"
#include "cuda/latent/bf16/kernels.h"
#include "cuda/latent/bf16/params.h"
#include "cuda/latent/copied/copy.h"
#include "cuda/latent/copied/host.h"
#include "cuda/latent/few/config.h"
#include "cuda/latent/few/kernels.h"
#include "cuda/latent/few/params.h"
#include "cuda/latent/wide/config.h"
#include "cuda/latent/wide/kernels.h"
#include "cuda/latent/wide/params.h"
#include "halftone/error.h"
#include "halftone/format.h"
#include "plan/listed.h"
#include "plan/plan.h"

namespace halftone::cuda {
namespace {

// Variants: rows of kLatentFewTable, then those of kLatentWideTable, then of kLatentBf16Table, then of that
// again, over copies.
constexpr int kFewRows = static_cast<int>(kLatentFewTable.size());
constexpr int kBf16First = kFewRows + static_cast<int>(kLatentWideTable.size());
constexpr int kCopiedFirst = kBf16First + static_cast<int>(kLatentBf16Table.size());

bool is_few(const planning::Pass& pass) { return pass.variant < kFewRows; }
bool is_bf16(const planning::Pass& pass) { return pass.variant >= kBf16First; }
bool is_copied(const planning::Pass& pass) { return pass.variant >= kCopiedFirst; }
int bf16_row(const planning::Pass& pass) {
  return pass.variant - (is_copied(pass) ? kCopiedFirst : kBf16First);
}

constexpr int kBlockRows = rows_of(kLatentBf16Table.front());  // packed rows of a thread block
static_assert(rows_of(kLatentWideTable.front()) == kBlockRows);

/// Queries of a request whose lists hardly meet. Those of more have tokens in common, which L2 has then.
constexpr int kFewQueries = 16;

/// Whether boxes of kBlockRows packed rows are whole tokens or a part of one, so that tensor copies can bring
/// Q.
bool has_query_boxes(int group) { return kBlockRows % group == 0 || group % kBlockRows == 0; }

/// Whether the kernel for 64 rows takes the 17 to 32 of this problem, although half of its rows are then
/// padding: over bf16 it reads faster. Where requests without lists may have more rows the kernel for 32
/// remains, and so it does in batch-invariant problems, whose requests have the same kernel under every
/// bound.
bool goes_to_bf16_rows(const AttentionProblem& problem) {
  if (problem.policy == SplitPolicy::kBatchInvariant || problem.listed.extra_top_k != 0) return false;
  const int group = problem.q_heads / problem.kv_heads();
  const bool fits = problem.is_listed() || std::int64_t{group} * problem.max_q_len <= kBlockRows;
  return fits && group <= kBlockRows / 2 &&
         find_latent_bf16_row(std::get<KvCacheSpec>(problem.kv), problem.q_dtype, kBlockRows,
                              problem.is_listed()) >= 0;
}

/// Packed rows of the largest kernel that a problem goes to. One of fewer rows, which then takes them that
/// many at a time, begins sooner, and is done sooner as long as it has few units, but not of so many keys
/// that products count. Of bf16 the kernels for many heads begin sooner than `sm90-latent-32` where tensor
/// copies or several warps bring Q. Figures: docs/kernels/latent-wide-measured.md, Few queries. In
/// batch-invariant problems requests have the same kernel under every bound.
int largest_rows(const AttentionProblem& problem) {
  constexpr int kAny = INT_MAX;
  const bool bf16 = std::get<KvCacheSpec>(problem.kv).k_format.dtype == DType::kBFloat16;
  const bool listed = problem.is_listed();
  const int group = problem.q_heads / problem.kv_heads();
  const std::int64_t keys = planning::scheduled_bounds(problem).max_kv_len;
  if (problem.policy == SplitPolicy::kBatchInvariant) return kAny;
  if (!listed && problem.max_q_len > 1) return kAny;  // drafts: requests of fewer queries would be a pass
  const std::int64_t requests = std::int64_t{problem.batch} * problem.max_q_len;
  struct Limit {
    int rows;
    std::int64_t units, keys;  // keys: of all units
  };
  const bool boxes = has_query_boxes(group);
  const bool padded = bf16 && !listed && !boxes && group <= 32;  // in units of 64, whose rows come one by one
  const Limit limits[] = {padded ? Limit{16, 16, 131072}
                          : bf16 ? Limit{16, 8, 32768}
                                 : Limit{16, 16, 65536},
                          bf16 ? Limit{32, 8, 65536} : Limit{32, 16, 32768}};
  for (const Limit& most : limits) {
    if (most.rows == 32 && bf16 && (listed || padded || boxes)) continue;
    const std::int64_t each = (group + most.rows - 1) / most.rows;  // units of a request
    if (requests <= most.units / each && requests * each * keys <= most.keys) return most.rows;
  }
  return kAny;
}

/// Whether a block's queries come by tensor copies; then `map` is theirs.
bool bring_query_boxes(int group, const TensorView& q, CUtensorMap& map) {
  if (!has_query_boxes(group) || !has_boxes(q) || q.numel() == 0) return false;
  const int heads = std::min(group, kBlockRows);
  map = tensor_map(q, nullptr, heads, kBlockRows / heads);
  return true;
}

LatentBf16Params bf16_params(const AttentionParams& attention, const StepParams& step, const Plan::Impl& plan,
                             int row, const AttentionArgs& args) {
  const auto& cache = std::get<PagedKv>(args.kv);
  const int group = attention.schedule.params.group;
  LatentBf16Params p{};
  p.attention = attention;
  p.step = step;
  p.ahead = plan.problem.max_q_len <= kFewQueries;
  p.box_tokens =
      std::min(static_cast<int>(cache.spec.page_size), kLatentBf16Tokens / kLatentBf16Table[row].blocks);
  const auto map = [&](int columns) {
    return latent_page_map(cache, plan.layout, attention.schedule.header, cache.spec.k_format.dtype,
                           p.box_tokens, columns);
  };
  if (!kLatentBf16Table[row].listed) {
    p.latent = map(kLatentBf16HalfColumns);
    p.rope = map(1);
  }
  p.q_boxes = bring_query_boxes(group, args.q, p.q);
  return p;
}

LatentWideParams wide_params(const AttentionParams& attention, const StepParams& step,
                             const AttentionArgs& args) {
  LatentWideParams p{};
  p.attention = attention;
  p.step = step;
  p.q_boxes = bring_query_boxes(attention.schedule.params.group, args.q, p.q);
  return p;
}

/// Whether the kernel of a pass, behind append's, begins with older tokens while that ends. Those for few
/// heads and over bf16 lose 1 to 2 us by it, and others up to 4% with more requests
/// (docs/kernels/layer-measured.md).
bool reads_ahead(const planning::Pass& pass, const AttentionProblem& problem) {
  constexpr int kMostRequests = 32;
  return !is_few(pass) && !is_bf16(pass) && problem.batch <= kMostRequests;
}

/// Whether the kernel writes the new tokens of a plan. Each row block of a request writes all that it reads.
bool writes_tokens(const AttentionProblem& problem) {
  constexpr int kMostQueries = 16;
  return problem.appends && !problem.is_listed() && problem.max_q_len <= kMostQueries;
}

}  // namespace

int latent_variant(const AttentionProblem& problem, const planning::Kernel& kernel) {
  const auto& spec = std::get<KvCacheSpec>(problem.kv);
  if (problem.arithmetic != Arithmetic::k16Bit || problem.q_dtype == DType::kFloat32) return -1;
  if (problem.alibi) return -1;
  const int largest = largest_rows(problem);
  if (copies_lists(problem, largest)) {
    const int row = find_latent_bf16_row(kernel.row_block, problem.q_dtype, true);
    return row < 0 ? -1 : kCopiedFirst + row;
  }
  if (kernel.row_block > largest) return -1;
  const auto row_of = [&](const KvCacheSpec& kv) {
    return find_latent_few_row(kv, problem.q_dtype, kernel.row_block, writes_tokens(problem));
  };
  const int few = row_of(spec);
  const bool second = problem.listed.extra_top_k != 0;
  if (second && row_of(problem.listed.extra) != few) return -1;
  if (few >= 0) return kernel.row_block == kBlockRows / 2 && goes_to_bf16_rows(problem) ? -1 : few;
  if (second) return -1;  // the kernels for few heads take more, 32 at a time
  const int bf16 = find_latent_bf16_row(spec, problem.q_dtype, kernel.row_block, problem.is_listed());
  if (bf16 >= 0) return kBf16First + bf16;
  const int wide = find_latent_wide_row(spec, problem.q_dtype, kernel.row_block);
  return wide < 0 ? -1 : kFewRows + wide;
}

planning::StagedKey latent_staged_key(const AttentionProblem& problem, const planning::Kernel& kernel) {
  if (!problem.is_latent() || latent_variant(problem, kernel) < kCopiedFirst) return {};
  return {.bytes = kCopiedBytes};
}

void refuse_latent(const AttentionProblem& problem) {
  const auto refuse = [](const std::string& sentence) { throw Error(ErrorCode::kUnsupported, sentence); };
  const auto& spec = std::get<KvCacheSpec>(problem.kv);
  if (problem.alibi) {
    refuse("alibi is set, but the CUDA backend has none over latent caches: use the CPU.");
  }
  const KvFormat& second = problem.listed.extra.k_format;
  if (problem.listed.extra_top_k != 0 && find_latent_few_row(spec, problem.q_dtype, 0) >= 0) {
    refuse(
        fmt::format("listed.extra.k_format is {}, but on the CUDA backend the second list's cache has the "
                    "format of the first one, {}: use that, attend to each list in a call of its own and "
                    "merge() the two, or use the CPU.",
                    format_name(second), format_name(spec.k_format)));
  }
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16};
  for (const DType type : kTypes) {
    if (find_latent_few_row(spec, type, 0) < 0) continue;
    refuse(
        fmt::format("q_dtype is {}, but over latent caches in {} the CUDA backend takes Q in bf16{}: convert "
                    "Q or use the CPU.",
                    dtype_name(problem.q_dtype), format_name(spec.k_format),
                    find_latent_few_row(spec, DType::kFloat16, 0) < 0 ? "" : " and f16"));
  }
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format(
          "kv.k_format is {} with {} latent dims, {} rotary ones and V of {}, but the CUDA backend "
          "attends to latent caches in fp8-g128-f32, int8-g64, int4-g64 and bf16 with 512 latent dims, which "
          "are V, and 64 rotary ones, and in fp8-g64-e8m0 with 448 and 64, which all are V: use such a cache "
          "or the CPU.",
          format_name(spec.k_format), spec.latent_dim(), spec.rope_dim, spec.v_dim()));
}

CompiledKernel latent_kernel(const Plan::Impl&, const planning::Pass& pass, const AttentionArgs& args) {
  check_out(args);
  if (!is_few(pass)) require_tensor_maps();
  const CompiledKernel kernel = is_few(pass)    ? latent_few_kernel(pass.variant)
                                : is_bf16(pass) ? latent_bf16_kernel(bf16_row(pass))
                                                : latent_wide_kernel(pass.variant - kFewRows);
  require_built(kernel, "latent", pass.variant);
  return kernel;
}

bool latent_appends(const AttentionProblem& problem, int variant) {
  return variant >= 0 && writes_tokens(problem);
}

bool latent_appends(const AppendParams& step) { return loads_early(step) && has_whole_angles(step); }

bool run_latent(const CompiledKernel& kernel, const Plan::Impl& plan, const AttentionArgs& args,
                const planning::Workspace& workspace, std::size_t index, bool fused, Stream stream) {
  const planning::Pass& pass = plan.passes()[index];
  AttentionParams params = attention_params(plan, args, workspace, index);
  StepParams step = pass_step(plan.problem, args, params.schedule, index, fused);
  if (step.new_tokens_late && !fused && (index > 0 || !reads_ahead(pass, plan.problem))) {
    if (index == 0) params.cache_settled = false;
    step.new_tokens_late = false;
  }
  if (is_few(pass)) {
    const LatentFewParams own{params, step};
    launch(kernel, &own, plan, pass, stream);
  } else if (is_bf16(pass)) {
    if (is_copied(pass)) copy_lists(plan, workspace.staged, params, stream);
    LatentBf16Params own = bf16_params(params, step, plan, bf16_row(pass), args);
    own.copied = is_copied(pass);
    own.ahead = own.ahead && !own.copied;
    launch(kernel, &own, plan, pass, stream);
  } else {
    const LatentWideParams own = wide_params(params, step, args);
    launch(kernel, &own, plan, pass, stream);
  }
  return step.lengths != nullptr;
}

}  // namespace halftone::cuda
