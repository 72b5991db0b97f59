// append() on CUDA, and what run() appends, for arguments that the planner has accepted.
#pragma once

#include "cuda/append/params.h"
#include "halftone/attention.h"
#include "plan/work.h"

namespace halftone::cuda {

void append(const PagedKv& cache, const AppendArgs& args, Stream stream);

/// What run() appends: tokens go where the schedule says.
AppendParams step_params(const AttentionArgs& args, const planning::Schedule& schedule);
/// The same, in a launch of its own. The next kernel must be one of run(): it may begin before this one has
/// seen the end of the last, and then reads no more than AttentionArgs::cache_settled allows.
void append_step(const AttentionArgs& args, const planning::Schedule& schedule, Stream stream);
/// The new tokens in the kernel of the pass `index`. `fused`: it writes them; else, where the problem
/// appends, the kernel before the first pass does.
StepParams pass_step(const AttentionProblem& problem, const AttentionArgs& args,
                     const planning::Schedule& schedule, std::size_t index, bool fused);
/// NewTokens::advance.
void settle_lengths(const AttentionArgs& args, const planning::Schedule& schedule, Stream stream);

}  // namespace halftone::cuda
