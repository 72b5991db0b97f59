#include "plan/workspace_use.h"

#include <unistd.h>

#include <atomic>

#include "plan/fail.h"
#include "plan/validate.h"
#include "plan/workspace.h"

namespace halftone::planning {
namespace {

/// No other bytes are this by chance. The process is in it since one that is forked during a call inherits a
/// mark that nobody will clear.
std::uint64_t mark_of_this_process() {
  return 0x6e49455355464c48 ^ (static_cast<std::uint64_t>(::getpid()) << 32);  // "HLFUSEIn"
}

}  // namespace

WorkspaceUse::WorkspaceUse(const Plan::Impl& plan, const TensorView& workspace) {
  validate_workspace(plan, workspace);
  if (plan.problem.device.type != DeviceType::kCpu) return;
  std::uint64_t& user = static_cast<ScheduleHeader*>(workspace.data)->user;
  const std::uint64_t mark = mark_of_this_process();
  before_ = std::atomic_ref(user).exchange(mark, std::memory_order_acquire);
  if (before_ == mark) {
    invalid(
        "workspace is in use by another call, but serves one at a time: give each thread a workspace of its "
        "own, "
        "with its own schedule.");
  }
  user_ = &user;
}

WorkspaceUse::~WorkspaceUse() {
  if (user_ != nullptr) std::atomic_ref(*user_).store(before_, std::memory_order_release);
}

}  // namespace halftone::planning
