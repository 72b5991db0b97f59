// The items of a worker, queued in shared memory.
#pragma once

#include <new>

#include "cuda/items.h"

namespace halftone::cuda {

/// The worker's next items, in shared memory: the listed ones first, then what a cursor of the load warp
/// finds.
struct ItemQueue {
  static constexpr int kCapacity = 16;
  static_assert(kListedItems < kCapacity);
  alignas(16) DeviceItem items[kCapacity];
  volatile int count;    // items queued so far; the last kCapacity are kept
  volatile int current;  // the oldest item in use
  volatile bool more;    // items will follow
  alignas(ItemCursor) unsigned char cursor[sizeof(ItemCursor)];

  /// By one warp; a barrier must follow.
  __device__ void start(const ItemList& list, int worker, int lane) {
    const int listed = list.counts[worker];
    const int4* source = reinterpret_cast<const int4*>(list.items + worker * kListedItems);
    constexpr int kWords = sizeof(DeviceItem) / sizeof(int4) * kListedItems;
    static_assert(kWords == 32);
    reinterpret_cast<int4*>(items)[lane] = source[lane];
    if (lane == 0) {
      more = listed > kListedItems;
      count = listed > kListedItems ? kListedItems : listed;
      current = 0;
    }
    __syncwarp();
  }
  /// By one thread: queues one item that the list does not hold, if there is room.
  __device__ void produce(const planning::Schedule& schedule, int worker) {
    const int at = count;
    if (at >= current + kCapacity - 1) return;
    ItemCursor& walk = *reinterpret_cast<ItemCursor*>(cursor);
    int steps = 1;
    if (at == kListedItems) {
      new (cursor) ItemCursor(schedule, worker);
      steps += kListedItems;
    }
    bool found = true;
#pragma unroll 1
    for (; steps > 0; --steps) found = walk.next(items[at % kCapacity]);
    __threadfence_block();
    if (found) count = at + 1;
    more = found;
  }
  /// Whether item `index` exists, once that is known.
  __device__ bool has(int index) const {
    while (count <= index) {
      if (!more) return count > index;
    }
    __threadfence_block();
    return true;
  }
};

}  // namespace halftone::cuda
