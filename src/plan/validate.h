// Every user error of plan(), schedule(), run() and merge(), found before any work.
#pragma once

#include <vector>

#include "halftone/attention.h"
#include "plan/plan.h"

namespace halftone::planning {

/// Limits of a problem beyond those that the schedule's arithmetic sets (kMaxTokens).
inline constexpr int kMaxBatch = 1 << 24;
inline constexpr int kMaxHeads = 1 << 16;
inline constexpr int kMaxWorkers = 65536;

/// Throws InvalidArgument, Unsupported or OutOfRange.
void validate_problem(const AttentionProblem& problem);

/// Throws InvalidArgument if the plan is default-constructed.
const Plan::Impl& require_plan(const Plan& plan);

/// On the CPU also reads the lengths: they are non-negative, cumulative where they must be, and within the
/// bounds.
void validate_lengths(const Plan::Impl& plan, const SequenceLengths& lengths);

/// Size, device and alignment of a workspace, not what it holds.
void validate_workspace(const Plan::Impl& plan, const TensorView& workspace);

/// The lengths and the workspace.
void validate_schedule(const Plan::Impl& plan, const SequenceLengths& lengths, const TensorView& workspace,
                       Stream stream);

/// On the CPU also reads the schedule and, in trusted mode, the live entries of the block table.
void validate_run(const Plan::Impl& plan, const AttentionArgs& args, const TensorView& workspace,
                  Stream stream);

void validate_merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
                    const TensorView& out, const TensorView& lse, Stream stream);

}  // namespace halftone::planning
