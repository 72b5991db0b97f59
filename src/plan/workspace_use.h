// One call at a time in a workspace.
#pragma once

#include <cstdint>

#include "halftone/attention.h"
#include "plan/plan.h"

namespace halftone::planning {

/// Marks a workspace on the host as this call's, until the end of the scope: its header says so. A second
/// call would mix its partial results with the first one's. Throws InvalidArgument while another call of this
/// process has it, and for what is no workspace of this plan. On CUDA, where calls only queue work, it does
/// nothing.
class WorkspaceUse {
 public:
  WorkspaceUse(const Plan::Impl& plan, const TensorView& workspace);
  ~WorkspaceUse();
  WorkspaceUse(const WorkspaceUse&) = delete;
  WorkspaceUse& operator=(const WorkspaceUse&) = delete;

 private:
  std::uint64_t* user_ = nullptr;
  std::uint64_t before_ = 0;  ///< any bits: nobody clears a workspace before its first schedule
};

}  // namespace halftone::planning
