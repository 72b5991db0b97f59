// What the schedule kernel receives.
#pragma once

#include "cuda/items.h"
#include "plan/build.h"

namespace halftone::cuda {

/// Lengths of a step and where the schedule goes.
struct ScheduleBuildParams {
  planning::Schedule schedule;     // all pointers into the workspace
  ItemList list;                   // likewise
  std::int32_t* arrivals;          // [slots, kArrivalCounters], zeroed here
  const std::int32_t* cu_q;        // [batch + 1], or null: max_q_len queries each
  const std::int32_t* kv_lengths;  // [batch]
  std::uint64_t plan_id;
};

}  // namespace halftone::cuda
