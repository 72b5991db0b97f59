// Work items as the kernels take them: with the lengths that they need and who merges a cut unit.
#pragma once

#include "plan/queue.h"

namespace halftone::cuda {

struct alignas(16) DeviceItem {
  planning::WorkItem work;
  std::int32_t first_query;  // cu_q[request]
  std::int32_t queries;      // of the request
  std::int32_t keys;         // of the request
  std::int32_t first_slot;   // of the unit, if it is cut and its slots are to be merged; else -1
  std::int32_t parts;        // slots of the cut unit
  std::int32_t arrivals;     // items that store a part of the cut unit
  std::int32_t present;      // of prefill: keys of the request that K and V have
  std::int32_t unused;       // a size that divides into 16-byte loads
};
static_assert(sizeof(DeviceItem) == 64);

/// Arrival counters of a partial slot: one for each of the classes into which its rows fall.
inline constexpr int kArrivalCounters = 8;

/// Parts of a unit are merged in groups of this size first, so that the work spreads over CTAs. Where rows
/// are few, those of up to kGroupsAtOnce groups are not, since a second merge would take longer.
inline constexpr int kMergeGroup = 8, kGroupsAtOnce = 3;

/// Items of a worker that a schedule lists; further ones are found by the kernel with a WorkCursor.
inline constexpr int kListedItems = 8;

/// Produces the items of one worker in order.
class ItemCursor {
 public:
  HT_HOST_DEVICE ItemCursor(const planning::Schedule& schedule, std::int32_t worker)
      : schedule_(schedule), cursor_(schedule, worker), worker_(worker) {}

  HT_HOST_DEVICE bool next(DeviceItem& item) {
    if (!cursor_.next(item.work)) return false;
    const planning::WorkItem& work = item.work;
    item.first_query = schedule_.cu_q[work.request];
    item.queries = planning::q_length(schedule_, work.request);
    item.keys = schedule_.kv_lengths[work.request];
    item.first_slot = -1;
    item.parts = item.arrivals = 0;
    if (work.finish) return true;
    const std::int32_t owner = unit_owner(work);
    planning::MergeItem unit;
    if (planning::merge_item(schedule_, owner, unit) && unit.request == work.request &&
        unit.kv_head == work.kv_head && unit.row_begin == work.row_begin) {
      item.arrivals = schedule_.params.absolute ? schedule_.starts[owner + 1].steps : unit.parts;
      item.first_slot = unit.slot;
      item.parts = unit.parts;
    }
    return true;
  }

 private:
  /// The worker that began the unit of `work`.
  HT_HOST_DEVICE std::int32_t unit_owner(const planning::WorkItem& work) const {
    const planning::WorkerStart& start = schedule_.starts[worker_];
    const bool continued = start.offset > 0 && work.request == start.request &&
                           work.kv_head == start.kv_head &&
                           work.row_begin == start.block * schedule_.params.row_block;
    if (!continued) return worker_;
    return start.first;
  }

  const planning::Schedule& schedule_;
  planning::WorkCursor cursor_;
  std::int32_t worker_;
};

/// Item `index` of a queue that has so many.
HT_HOST_DEVICE inline void find_queue_item(const planning::Schedule& schedule, std::int64_t index,
                                           DeviceItem& item) {
  item.parts = item.arrivals = planning::queue_item(schedule, index, item.work);
  item.first_slot = item.parts == 1 ? -1 : item.work.partial / item.parts * item.parts;
  item.first_query = schedule.cu_q[item.work.request];
  item.queries = planning::q_length(schedule, item.work.request);
  item.keys = item.present = schedule.kv_lengths[item.work.request];
}

/// Where a schedule's list lies: items[worker][kListedItems], counts[worker] (kListedItems + 1: there are
/// more). Of a queue it holds each worker's first item.
struct ItemList {
  DeviceItem* items;
  std::int32_t* counts;
};

HT_HOST_DEVICE inline void list_items(const planning::Schedule& schedule, const ItemList& list,
                                      std::int32_t worker) {
  ItemCursor cursor(schedule, worker);
  std::int32_t count = 0;
  DeviceItem item;
  while (count <= kListedItems && cursor.next(item)) {
    if (count < kListedItems) list.items[std::int64_t{worker} * kListedItems + count] = item;
    ++count;
  }
  list.counts[worker] = count;
}

}  // namespace halftone::cuda
