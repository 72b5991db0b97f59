// Items as the roles pass them: the warp that takes them from the queue, works out what follows from one, and
// leaves it in a ring for the others.
#pragma once

#include "cuda/attention/items.h"
#include "cuda/attention/logits.h"
#include "cuda/attention/rows.h"
#include "cuda/device/range.h"
#include "cuda/prefill/params.h"
#include "cuda/prefill/traits.h"
#include "plan/queue.h"

namespace halftone::cuda {

/// Tiles of kTile tokens from kv_begin on that hold an item's keys.
template <int kTile>
__device__ inline int tiles_of(const planning::WorkItem& work) {
  return (work.kv_end - work.kv_begin + kTile - 1) / kTile;
}

/// The items as a role takes them from the ring in shared memory: those that load need no more than the item,
/// and begin before what follows from it is worked out.
template <PrefillConfig C>
struct ItemReader {
  using Traits = PrefillTraits<C>;
  typename Traits::Shared& s;
  int index = 0;

  __device__ int stage() const { return index % Traits::kItems; }
  __device__ void wait_empty() {
    barrier_wait(shared_address(&s.item_empty[stage()]), index / Traits::kItems % 2 ^ 1);
  }
  /// Null: there are no more.
  __device__ const typename Traits::Item* next() {
    barrier_wait(shared_address(&s.item_full[stage()]), index / Traits::kItems % 2);
    const typename Traits::Item& item = s.items[stage()];
    return item.item.work.row_end < 0 ? nullptr : &item;
  }
  /// Until tiles and positions of the item are there.
  __device__ void wait_for_tiles() const {
    barrier_wait(shared_address(&s.items[stage()].followed), index / Traits::kItems % 2);
  }
  __device__ void advance() { ++index; }
  /// By one lane of each warp that reads.
  __device__ void release() { barrier_arrive(shared_address(&s.item_empty[stage()])); }
};

/// Leaves out what the caller's tensors lack: queries beyond Q, keys beyond plain K and V.
__device__ inline void limit_item(const PrefillParams& p, DeviceItem& item) {
  planning::WorkItem& work = item.work;
  bounds_of(p.attention).apply(item);
  if (work.row_end == work.row_begin) work.kv_end = work.kv_begin;
  const std::int32_t* const cu_kv = p.attention.schedule.cu_kv;
  if (cu_kv == nullptr) return;
  const std::int64_t first = cu_kv[work.request];
  const std::int64_t left = p.present != nullptr ? p.present[work.request]
                            : first < 0          ? 0
                                                 : p.kv_tokens - first;
  if (left >= item.keys) return;
  item.present = left < 0 ? 0 : static_cast<std::int32_t>(left);
  if (left >= work.kv_end) return;
  work.kv_end = left < work.kv_begin ? work.kv_begin : static_cast<std::int32_t>(left);
  if (p.attention.status != nullptr) atomicOr(p.attention.status, kStatusBadKeys);
}

/// Whether logits are more than products times a factor.
__device__ inline bool modifies_logits(const AttentionParams& p) {
  return caps_or_biases(p) || p.scale_log2 < 0.0f;
}

/// `position`: of the item's rows. Fills `tiles` piece by piece: registers are few.
template <int kTile>
__device__ inline void find_tiles(const AttentionParams& p, const DeviceItem& item, const int* position,
                                  int group, volatile GroupTiles& tiles) {
  const planning::WorkItem& work = item.work;
  const int rows = work.row_end - work.row_begin, zero = work.kv_begin, row = 64 * group;
  const int all = tiles_of<kTile>(work);
  tiles.before = all;
  tiles.last = -1;
  tiles.after = 0;
  if (row >= rows) return;
  const int first = position[row], last = position[min(row + 63, rows - 1)];
  const int begin = max(zero, first - p.window_left) - zero;
  const int end = min(work.kv_end, last + p.causal_right + 1) - zero;
  if (begin >= end) return;
  const int from = begin / kTile, behind = (end + kTile - 1) / kTile;
  tiles.before = all - behind;
  tiles.last = behind - from - 1;
  tiles.after = from;
  tiles.first = zero + from * kTile;
  tiles.alive = min(item.present - (zero + (behind - 1) * kTile), kTile);
  const KeyRange inner = seen_by_all(p, first, last, work.kv_end);
  const int inner_begin = max(zero, inner.begin) - zero, inner_end = max(zero, inner.end) - zero;
  const int whole_first = (inner_begin + kTile - 1) / kTile, whole_end = inner_end / kTile;
  tiles.unmasked_first = zero + whole_first * kTile;
  tiles.unmasked_end = zero + whole_end * kTile;
  // The first row sees none of the tile behind, if that is where its keys end.
  const int plain = whole_end - (whole_end * kTile == inner_end ? 1 : 0) - whole_first;
  tiles.plain = whole_first - from;
  tiles.plain_count = modifies_logits(p) ? 0 : max(plain, 0);
}

/// The warp that takes items from the queue for the block.
template <PrefillConfig C>
struct ItemTaker {
  using Traits = PrefillTraits<C>;
  const PrefillParams& params;
  typename Traits::Shared& s;

  // Read anew: registers are few.
  __device__ static int lane() { return thread_index() % 32; }
  __device__ static std::uint32_t grid_size() {
    std::uint32_t size;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size));
    return size;
  }
  __device__ void find(std::int64_t index, DeviceItem& item) const {
    find_queue_item(params.attention.schedule, index, item);
    limit_item(params, item);
  }
  /// Of staged values, and of packed ones with a static scale: what all of the head, or of the request's
  /// head, are divided by. Looked up here, where nobody waits for it.
  __device__ float value_scale(const planning::WorkItem& work) const {
    const AttentionParams& p = params.attention;
    if constexpr (Traits::kE4m3) {
      if (params.value_units != nullptr) {
        return params.value_units[work.request * p.schedule.params.kv_heads + work.kv_head];
      }
    }
    if (p.v.static_scale == nullptr) return 1.0f;
    return value_unit(p.v.static_scale, p.v.static_min, work.kv_head * p.v.static_stride);
  }
  /// By all lanes, what follows from the item.
  __device__ void complete(typename Traits::Item& item) const {
    const AttentionParams& p = params.attention;
    const int last = max(item.item.work.row_end - item.item.work.row_begin, 1) - 1;
#pragma unroll 1
    for (int row = lane(); row < Traits::kRows; row += 32) {
      const RowPlace place = place_of(p, item.item, min(row, last));
      item.position[row] = place.position;
      if (row % 64 == 0) item.tiles[row / 64].query = static_cast<int>(place.token);
      if constexpr (Traits::kKeepsSlopes) {
        if (p.alibi_slopes != nullptr) item.slope[row] = slope_of(p, place.head);
      }
    }
    if constexpr (Traits::kStaged) {
      if (lane() == 0) item.value_scale = value_scale(item.item.work);
    }
    __syncwarp();
    if (lane() < Traits::kRowGroups) {
      find_tiles<C.kv_tile>(p, item.item, item.position, lane(), item.tiles[lane()]);
    }
  }
  /// The worker's first item, which the schedule lists: to find it takes a chain of reads. Whether there is
  /// one.
  __device__ bool take_first(DeviceItem& item) const {
    const ItemList& list = params.attention.list;
    const bool has = list.counts[blockIdx.x] > 0;
    if (lane() < static_cast<int>(sizeof item / 4)) {
      reinterpret_cast<std::int32_t*>(&item)[lane()] =
          reinterpret_cast<const std::int32_t*>(list.items + std::int64_t{blockIdx.x} * kListedItems)[lane()];
    }
    __syncwarp();
    if (has && lane() == 0) limit_item(params, item);
    return has;
  }
  __device__ void run() const {
    ItemReader<C> place{s};
    std::uint32_t next = 0;
#pragma unroll 1
    for (;; place.advance()) {
      place.wait_empty();
      typename Traits::Item& item = s.items[place.stage()];
      bool more;
      if (place.index == 0) {
        more = take_first(item.item);
      } else {
        more = next < planning::queue_items(*params.attention.schedule.header);
        if (more && lane() == 0) find(next, item.item);
      }
      if (!more && lane() == 0) item.item.work.row_end = -1;
      __syncwarp();
      if (lane() == 0) barrier_arrive(shared_address(&s.item_full[place.stage()]));
      if (!more) break;
      complete(item);
      __syncwarp();
      if (lane() == 0) barrier_arrive(shared_address(&item.followed));
      barrier_wait(shared_address(&s.take_next), place.index % 2);
      next = grid_size() + __shfl_sync(~0u, lane() == 0 ? atomicAdd(&params.taken[0], 1) : 0, 0);
    }
    // The last worker leaves the counters as it found them.
    if (lane() == 0 && count_arrival(&params.taken[1]) == static_cast<int>(grid_size()) - 1) {
      params.taken[0] = params.taken[1] = 0;
    }
  }
};

}  // namespace halftone::cuda
