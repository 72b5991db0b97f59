// What a Plan holds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "halftone/attention.h"
#include "plan/backend.h"
#include "plan/workspace.h"

namespace halftone {

struct Plan::Impl {
  AttentionProblem problem;  ///< as given
  PlanInfo info;
  const planning::Backend* backend = nullptr;
  float scale = 0;                      ///< resolved: never 0
  planning::WorkspaceParams workspace;  ///< with the passes
  PageLayout layout;                    ///< paged only
  PageLayout extra_layout;              ///< of ListedKeys::extra, if there is a second list
  std::uint64_t id = 0;  ///< equal for equal problems on the same number of workers; marks a schedule

  std::span<const planning::Pass> passes() const {
    return std::span(workspace.passes).first(static_cast<std::size_t>(workspace.count));
  }
  const planning::Kernel& kernel(const planning::Pass& pass) const {
    return backend->kernels[pass.kernel_index];
  }
};

namespace planning {

/// The workspace of this plan at `base`.
inline Workspace carve_workspace(const Plan::Impl& plan, std::byte* base) {
  return carve_workspace(plan.workspace, base);
}

/// Chooses, sizes and describes. Throws as halftone::plan() says.
Plan make_plan(const AttentionProblem& problem);

/// "fast", "reproducible" or "batch_invariant".
std::string_view policy_name(SplitPolicy policy);

/// schedule() on the host, after validation: copies the lengths, then builds every pass's schedule.
void fill_schedules(const Plan::Impl& plan, const SequenceLengths& lengths, const Workspace& workspace);

/// The plan in words, then how its workers share the work for the given lengths (on the CPU). Throws like
/// schedule().
std::string explain(const Plan& plan, const SequenceLengths& lengths);

}  // namespace planning
}  // namespace halftone
