#include "cuda/schedule/host.h"

#include "cuda/attention/workspace.h"
#include "cuda/device/call.h"
#include "cuda/schedule/params.h"

namespace halftone::cuda {

void schedule(const Plan::Impl& plan, const SequenceLengths& lengths, std::byte* workspace, Stream stream) {
  const planning::Workspace parts = planning::carve_workspace(plan, workspace);
  ScheduleBuildParams p{};
  for (const planning::Pass& pass : plan.passes()) {
    const planning::PassWorkspace& own = parts.passes[p.count];
    const BackendParts backend = backend_parts(pass, own);
    p.passes[p.count++] = {own.schedule, backend.list, backend.arrivals, backend.taken};
  }
  p.cu_q = pointer<std::int32_t>(lengths.cu_q);
  p.kv_lengths = pointer<std::int32_t>(lengths.kv_lengths);
  p.cu_kv = pointer<std::int32_t>(lengths.cu_kv);
  p.plan_id = plan.id;
  const DeviceScope scope(plan.problem.device.index);
  check(launch_schedule(p, stream), "schedule");
}

}  // namespace halftone::cuda
