// What a workspace holds for this backend beyond planning::Workspace.
#pragma once

#include "cuda/attention/items.h"
#include "plan/plan.h"

namespace halftone::cuda {

struct BackendParts {  // of a pass
  ItemList list;
  std::int32_t* arrivals;  // [partials, kArrivalCounters]
  std::int32_t* taken;     // [2] of a queue: items, and workers that have none left; 0 between launches
  std::int64_t bytes;
};

inline BackendParts backend_parts(planning::Carver carver, int workers, std::int64_t partials) {
  BackendParts parts{};
  parts.list.items = carver.take<DeviceItem>(std::int64_t{workers} * kListedItems);
  parts.list.counts = carver.take<std::int32_t>(workers);
  parts.arrivals = carver.take<std::int32_t>(partials * kArrivalCounters);
  parts.taken = carver.take<std::int32_t>(2);
  parts.bytes = carver.bytes();
  return parts;
}

inline BackendParts backend_parts(const planning::Pass& pass, const planning::PassWorkspace& workspace) {
  return backend_parts(planning::Carver(workspace.backend), pass.schedule.workers, pass.partials);
}

}  // namespace halftone::cuda
