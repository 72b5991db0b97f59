#include "cpu/backend.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>

#include "cpu/append.h"
#include "cpu/attention/gather.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/run.h"
#include "cpu/dequantize.h"
#include "cpu/merge.h"
#include "halftone/error.h"
#include "plan/plan.h"
#include "plan/validate.h"

namespace halftone::cpu {

namespace {

/// Tokens that are gathered one by one have kernels for 16-bit operands, and for fewer rows at a time. Of the
/// two rows without a limit the bound of the problem's rows chooses one.
int variant(const AttentionProblem& problem, const planning::Kernel& kernel) {
  const bool gathered = is_gathered(problem);
  if (gathered && problem.arithmetic != Arithmetic::k16Bit) return -1;
  if (gathered) return kernel.row_block > kGatheredRows ? -1 : 0;
  if (kernel.row_block < kStripRows) return 0;
  const std::int64_t rows = std::int64_t{problem.q_heads / problem.kv_heads()} * problem.max_q_len;
  return (kernel.row_block > kStripRows) == (rows > kChunkRows) ? 0 : -1;
}

/// Only an arithmetic is refused, and only there.
void refuse(const AttentionProblem& problem) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("arithmetic is {}, but over {} the CPU backend serves 16-bit: use that.",
                          arithmetic_name(problem.arithmetic),
                          problem.is_listed() ? "listed keys" : "a latent cache"));
}

}  // namespace

const planning::Backend& backend() {
  static constexpr planning::Backend kBackend{
      .kernels = kAttentionKernels,
      .rows_share_bits = true,
      .variant = variant,
      .refuse = refuse,
      .workers = [](Device) { return std::clamp(omp_get_max_threads(), 1, planning::kMaxWorkers); },
      .staged_key = nullptr,
      .fuses_append = nullptr,
      .extra_bytes = [](int, std::int64_t) { return std::int64_t{0}; },
      .scratch_bytes = nullptr,
      .schedule =
          [](const Plan::Impl& plan, const SequenceLengths& lengths, std::byte* workspace, Stream) {
            planning::fill_schedules(plan, lengths, planning::carve_workspace(plan, workspace));
          },
      .run = [](const Plan::Impl& plan, const AttentionArgs& args, std::byte* workspace,
                Stream) { cpu::run(plan, args, workspace); },
      .merge = [](const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
                  const TensorView& out, const TensorView& lse,
                  Stream) { cpu::merge(parts, part_lse, out, lse); },
      .append = [](const PagedKv& cache, const AppendArgs& args, Stream) { cpu::append(cache, args); },
      .dequantize = [](const PagedKv& cache, const TensorView& k_out, const TensorView& v_out,
                       Stream) { cpu::dequantize(cache, k_out, v_out); }};
  return kBackend;
}

}  // namespace halftone::cpu
