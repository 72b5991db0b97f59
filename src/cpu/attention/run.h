// Entry points of the CPU backend's attention. Arguments are already validated (plan/validate.h).
#pragma once

#include <cstddef>

#include "halftone/attention.h"
#include "plan/plan.h"

namespace halftone::cpu {

/// Runs the schedule in `workspace` (see plan/work.h: items, then merges). Lengths come from the schedule's
/// copies, never from args.lengths. Workers are independent of threads: any number of threads runs all of
/// them.
void run(const Plan::Impl& plan, const AttentionArgs& args, std::byte* workspace);

}  // namespace halftone::cpu
