// What the schedule kernel receives.
#pragma once

#include "cuda/attention/items.h"
#include "plan/workspace.h"

namespace halftone::cuda {

/// Where the schedule of a pass goes.
struct PassBuildParams {
  planning::Schedule schedule;  // all pointers into the workspace
  ItemList list;                // likewise
  std::int32_t* arrivals;       // [slots, kArrivalCounters], zeroed here; 16-byte aligned
  std::int32_t* taken;          // [2], likewise
};

/// Lengths of a step and where the schedules go.
struct ScheduleBuildParams {
  PassBuildParams passes[planning::kMaxPasses];
  std::int32_t count;              // of passes
  const std::int32_t* cu_q;        // [batch + 1], or null: max_q_len queries each
  const std::int32_t* kv_lengths;  // [batch]; null: cu_kv
  bool appends;                    // the keys of a request are kv_lengths and its queries
  const std::int32_t* cu_kv;       // [batch + 1] plain K and V
  // Lists of keys (plan/listed.h): the schedule's requests are queries, of which there are cu_q[requests].
  std::int32_t top_k, extra_top_k;   // 0: no lists; no second one
  std::int32_t requests;             // of cu_q
  const std::int32_t* counts;        // [counted], or null: top_k each
  const std::int32_t* extra_counts;  // [extra_counted], or null: extra_top_k each
  std::int32_t counted, extra_counted;
  std::uint64_t plan_id;
};

/// Most requests (with lists: queries) and workers of a small batch: shared memory holds them.
inline constexpr int kSmallBatch = 2048, kSmallWorkers = 255;

/// Whether launch_schedule() takes the kernel for small batches, which gives the same schedules sooner. It is
/// for lines, not queues, over pages. Whatever the lengths within the bounds, positions times workers + 1,
/// and tokens of the requests together, are less than 2^31: the kernel counts in 32 bits.
bool is_small_batch(const ScheduleBuildParams& params);

/// cudaError_t as int. `stream` is a cudaStream_t.
int launch_schedule(const ScheduleBuildParams& params, void* stream);

}  // namespace halftone::cuda
