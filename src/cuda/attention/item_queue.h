// The items of a worker, queued in shared memory.
#pragma once

#include <new>

#include "cuda/attention/items.h"

namespace halftone::cuda {

/// What items are limited to: a schedule may count more queries than the caller's tensors have rows.
struct QueryBounds {
  std::int64_t tokens;  // rows of Q
  std::int32_t group;   // query heads per KV head

  /// Leaves out the rows beyond.
  __device__ void apply(DeviceItem& item) const {
    planning::WorkItem& work = item.work;
    const std::int64_t left = tokens - item.first_query;
    if (item.first_query >= 0 && left >= item.queries) return;
    const std::int64_t rows = item.first_query < 0 || left < 0 ? 0 : left * group;
    if (rows < work.row_end) work.row_end = rows < work.row_begin ? work.row_begin : static_cast<int>(rows);
  }
};

/// The worker's next items, in shared memory: the listed ones first, then what a cursor of the first load
/// warp finds. It has room for kSlots.
template <int kSlots>
struct ItemQueueOf {
  static constexpr int kCapacity = kSlots;
  static_assert(kListedItems < kCapacity);
  alignas(16) DeviceItem items[kCapacity];
  volatile int count;    // items queued so far; the last kCapacity are kept
  volatile int current;  // the oldest item in use
  volatile bool more;    // items will follow
  alignas(ItemCursor) unsigned char cursor[sizeof(ItemCursor)];

  /// A worker's listed items, over the lanes of a warp.
  struct Listed {
    int count;
    int4 words;
  };
  static __device__ Listed fetch(const ItemList& list, int worker, int lane) {
    static_assert(sizeof(DeviceItem) / sizeof(int4) * kListedItems == 32);
    return {list.counts[worker], reinterpret_cast<const int4*>(list.items + worker * kListedItems)[lane]};
  }
  /// By one warp; a barrier must follow.
  __device__ void start(const Listed& listed, const QueryBounds& bounds, int lane) {
    reinterpret_cast<int4*>(items)[lane] = listed.words;
    __syncwarp();
    if (lane < kListedItems) bounds.apply(items[lane]);
    if (lane == 0) {
      more = listed.count > kListedItems;
      count = listed.count > kListedItems ? kListedItems : listed.count;
      current = 0;
    }
    __syncwarp();
  }
  /// By one thread: queues one item that the list does not hold, if there is room.
  __device__ void produce(const planning::Schedule& schedule, const QueryBounds& bounds, int worker) {
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
    if (found) bounds.apply(items[at % kCapacity]);
    __threadfence_block();
    if (found) count = at + 1;
    more = found;
  }
  /// By one thread: queues items until `index` is there, or there are no more.
  __device__ void extend(int index, const planning::Schedule& schedule, const QueryBounds& bounds,
                         int worker) {
    while (more && count <= index) produce(schedule, bounds, worker);
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
using ItemQueue = ItemQueueOf<16>;

}  // namespace halftone::cuda
