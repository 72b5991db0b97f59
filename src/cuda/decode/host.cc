#include "cuda/decode/host.h"

#include <fmt/format.h>

#include <array>
#include <variant>

#include "cuda/append/host.h"
#include "cuda/decode/config.h"
#include "cuda/decode/kernels.h"
#include "cuda/decode/unit.h"
#include "halftone/error.h"
#include "plan/plan.h"

namespace halftone::cuda {
namespace {

using Compiled = std::array<CompiledKernel, kDecodeTable.size()>;

/// The kernels of all rows; of a row that is not in this build a null one.
const Compiled& compiled_kernels() {
  static const Compiled all = [] {
    Compiled kernels;
    for (std::size_t row = 0; row < kernels.size(); ++row) {
      for (const auto find : {decode_kernel_16bit, decode_kernel_fp8, decode_kernel_int8, decode_kernel_int4,
                              decode_kernel_mixed8, decode_kernel_mixed4}) {
        if (kernels[row].function == nullptr) kernels[row] = find(static_cast<int>(row));
      }
    }
    return kernels;
  }();
  return all;
}

/// Row of kDecodeTable for units of `rows` packed rows (0: of any number); -1 if there is none.
int find_table_row(const AttentionProblem& problem, int rows) {
  const auto& kv = std::get<KvCacheSpec>(problem.kv);
  if (kv.v_dim() != kv.head_dim) return -1;
  if (problem.q_dtype == DType::kFloat32 || problem.out_dtype == DType::kFloat32) return -1;
  return find_row(kv, rows);
}

/// Of the pass `index` of the plan. `fused`: of pass_step().
DecodeParams decode_params(const Plan::Impl& plan, const AttentionArgs& args,
                           const planning::Workspace& workspace, std::size_t index, bool fused) {
  const AttentionParams attention = attention_params(plan, args, workspace, index);
  DecodeParams p{attention, pass_step(plan.problem, args, attention.schedule, index, fused)};
  if (plan.passes()[index].variant != kUniversalKernel) return p;
  if (index == 0 && p.new_tokens_late) p.cache_settled = false;  // it knows no new tokens
  static_cast<StepParams&>(p) = {};
  return p;
}

}  // namespace

int decode_variant(const AttentionProblem& problem, const planning::Kernel& kernel) {
  if (!problem.is_paged() || problem.arithmetic != Arithmetic::k16Bit) return -1;
  if (!kernel.universal) return find_table_row(problem, kernel.row_block);
  return find_table_row(problem, 0) < 0 ? kUniversalKernel : -1;
}

bool decode_appends(const AttentionProblem& problem, int variant) {
  if (variant < 0 || variant == kUniversalKernel) return false;
  const auto& kv = std::get<KvCacheSpec>(problem.kv);
  const auto appends = [&](const KvFormat& f) {
    return f.granularity != Granularity::kToken || appends_shared_scales(f.dtype, kv.head_dim);
  };
  if (!appends(kv.k_format) || !appends(kv.v_format)) return false;
  return appends_in_time(problem, kDecodeTable[static_cast<std::size_t>(variant)]);
}

bool decode_appends(const AppendParams& step) {
  return has_whole_chunks(step, step.parts[0]) && has_whole_chunks(step, step.parts[1]);
}

CompiledKernel decode_kernel(const Plan::Impl& plan, const planning::Pass& pass, const AttentionArgs& args) {
  const bool universal = pass.variant == kUniversalKernel;
  if (!universal) check_out(args);
  const AttentionProblem& problem = plan.problem;
  const CompiledKernel kernel =
      universal ? universal_kernel(problem.head_dim(), problem.v_dim()) : compiled_kernels()[pass.variant];
  require_built(kernel, "decode", pass.variant);
  return kernel;
}

bool run_decode(const CompiledKernel& kernel, const Plan::Impl& plan, const AttentionArgs& args,
                const planning::Workspace& workspace, std::size_t index, bool fused, Stream stream) {
  const DecodeParams params = decode_params(plan, args, workspace, index, fused);
  launch(kernel, &params, plan, plan.passes()[index], stream);
  return params.lengths != nullptr;
}

}  // namespace halftone::cuda
