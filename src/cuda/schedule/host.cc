#include "cuda/schedule/host.h"

#include <algorithm>
#include <cstdint>

#include "cuda/attention/workspace.h"
#include "cuda/device/call.h"
#include "cuda/schedule/params.h"

namespace halftone::cuda {
namespace {

std::int32_t rows_of(const TensorView& t) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(t.shape[0], INT32_MAX));
}

}  // namespace

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
  p.appends = plan.problem.appends;
  p.cu_kv = pointer<std::int32_t>(lengths.cu_kv);
  const ListedKeys& listed = plan.problem.listed;
  p.top_k = listed.top_k;
  p.extra_top_k = listed.extra_top_k;
  p.requests = plan.problem.batch;
  p.counts = pointer<std::int32_t>(lengths.counts);
  p.extra_counts = pointer<std::int32_t>(lengths.extra_counts);
  p.counted = rows_of(lengths.counts);
  p.extra_counted = rows_of(lengths.extra_counts);
  p.plan_id = plan.id;
  const DeviceScope scope(plan.problem.device.index);
  check(launch_schedule(p, stream), "schedule");
}

}  // namespace halftone::cuda
