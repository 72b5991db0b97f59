// append() on CUDA, and what run() appends, for arguments that the planner has accepted.
#pragma once

#include "halftone/attention.h"
#include "plan/work.h"

namespace halftone::cuda {

void append(const PagedKv& cache, const AppendArgs& args, Stream stream);

/// What run() appends, in a launch of its own: tokens go where the schedule says.
void append_step(const AttentionArgs& args, const planning::Schedule& schedule, Stream stream);
/// NewTokens::advance.
void settle_lengths(const AttentionArgs& args, const planning::Schedule& schedule, Stream stream);

}  // namespace halftone::cuda
