// The host half of an attention kernel: from a call's arguments to what the kernel receives, and its launch.
#pragma once

#include <string_view>

#include "cuda/attention/compiled_kernel.h"
#include "cuda/attention/params.h"
#include "plan/plan.h"

namespace halftone::cuda {

/// Throws Internal if this build lacks the kernel, which is `family`'s variant `variant`.
void require_built(const CompiledKernel& kernel, std::string_view family, int variant);

/// Of the pass `index` of the plan. `workspace` holds the schedules.
AttentionParams attention_params(const Plan::Impl& plan, const AttentionArgs& args,
                                 const planning::Workspace& workspace, std::size_t index);

/// Throws InvalidArgument unless the rows of O begin at multiples of 8 bytes.
void check_out(const AttentionArgs& args);

/// One block, or cluster, per worker of the pass, which may begin while the previous kernel of the stream
/// ends. `params`: the kernel's one argument.
void launch(const CompiledKernel& kernel, const void* params, const Plan::Impl& plan,
            const planning::Pass& pass, Stream stream);

}  // namespace halftone::cuda
