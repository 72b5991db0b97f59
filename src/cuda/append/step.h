// The new tokens of a step in the kernels of attention, which may write them themselves.
#pragma once

#include "cuda/append/params.h"
#include "cuda/append/row.h"
#include "cuda/attention/items.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {

/// Position of a request's first new token.
__device__ inline int first_new_token(const DeviceItem& item) { return item.keys - item.queries; }

/// Between a thread's stores of tokens and the flag that says so, and between that and copies that read them.
__device__ inline void fence_tokens() {
  __threadfence_block();
  fence_async_global();
}

/// Positions [begin, end) of an item's request, of which the new tokens are to be written: append(first, end)
/// writes those, and copies may read them afterwards. Items that read the same tokens, row blocks of a
/// request, each write them, the same bytes. By a warp.
template <class Append>
__device__ inline void append_tokens(const AppendParams& p, const DeviceItem& item, int begin, int end,
                                     const Append& append) {
  begin = max(begin, first_new_token(item)), end = min(end, item.keys);
  if (item.queries > item.keys) {  // the schedule has no room for them
    set_status(p, kStatusBadPage);
  } else if (begin < end) {
    append(begin, end);
    fence_tokens();
  }
  __syncwarp();
}

/// By kThreads threads of each block, of which `thread` is one, once all that came before this kernel is
/// visible: lengths become those of the schedule.
template <int kThreads>
__device__ inline void settle_lengths(const StepParams& step, const planning::Schedule& schedule,
                                      int thread) {
  if (step.lengths == nullptr) return;
  for (int i = blockIdx.x * kThreads + thread; i < schedule.params.batch; i += gridDim.x * kThreads) {
    const int keys = schedule.kv_lengths[i];
    const int added = planning::q_length(schedule, i);
    if (added > 0 && added <= keys) step.lengths[i] = keys;
  }
}

}  // namespace halftone::cuda
