// What a workspace holds for this backend beyond planning::Workspace.
#pragma once

#include "cuda/attention/items.h"
#include "plan/plan.h"

namespace halftone::cuda {

struct BackendParts {  // of a pass
  ItemList list;
  std::int32_t* arrivals;  // [partials, kArrivalCounters]
  std::int32_t* taken;     // [2] of a queue: items, and workers that have none left; 0 between launches
  float* sums;             // [workers, sums]
  std::int64_t bytes;
};

/// `sums`: floats that a worker of the pass keeps, last of all.
inline BackendParts backend_parts(planning::Carver carver, const planning::Pass& pass, std::int64_t sums) {
  const std::int64_t workers = pass.schedule.workers;
  BackendParts parts{};
  parts.list.items = carver.take<DeviceItem>(workers * kListedItems);
  parts.list.counts = carver.take<std::int32_t>(workers);
  parts.arrivals = carver.take<std::int32_t>(pass.partials * kArrivalCounters);
  parts.taken = carver.take<std::int32_t>(2);
  if (sums > 0) parts.sums = carver.take<float>(workers * sums);
  parts.bytes = carver.bytes();
  return parts;
}

inline BackendParts backend_parts(const planning::Pass& pass, const planning::PassWorkspace& workspace,
                                  std::int64_t sums = 0) {
  return backend_parts(planning::Carver(workspace.backend), pass, sums);
}

}  // namespace halftone::cuda
