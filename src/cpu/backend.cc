#include "cpu/backend.h"

#include <omp.h>

#include <algorithm>

#include "cpu/append.h"
#include "cpu/attention/gather.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/run.h"
#include "cpu/dequantize.h"
#include "cpu/merge.h"
#include "plan/plan.h"
#include "plan/validate.h"

namespace halftone::cpu {

const planning::Backend& backend() {
  static constexpr planning::Backend kBackend{
      .kernels = kAttentionKernels,
      .rows_share_bits = true,
      .variant =
          [](const AttentionProblem& problem, const planning::Kernel& kernel) {
            return is_gathered(problem) && kernel.row_block > kGatheredRows ? -1 : 0;
          },
      .refuse = [](const AttentionProblem&) {},
      .workers = [](Device) { return std::clamp(omp_get_max_threads(), 1, planning::kMaxWorkers); },
      .extra_bytes = [](int, std::int64_t) { return std::int64_t{0}; },
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
