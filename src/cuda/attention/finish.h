// The end of an item: the states that the block's warps leave are merged, partial states folded and stored,
// the output written. A warp takes a group of rows at a time, one over a few lanes each, and works alone.
#pragma once

#include "cuda/attention/output.h"
#include "cuda/attention/states.h"
#include "format/codec.h"
#include "format/status.h"

namespace halftone::cuda {

/// Merges the teams' states of an item and writes the rows, or stores them in the item's slot; the last part
/// of a cut unit to arrive merges the slots in KV order and writes the rows. kAtOnce: parts that are read
/// together, as the caller's registers allow. `states_of(row)`: the Parts that the teams leave of a row.
template <class Traits, int kAtOnce, class StatesOf>
__device__ inline void finish_item(const AttentionParams& p, const DeviceItem& item,
                                   const StatesOf& states_of, int warp, int warps, int lane) {
  constexpr int kDim = Traits::kDim;
  using State = Row<kDim, Traits::kRowLanes>;
  constexpr int kGroup = State::kGroup;
  const planning::WorkItem& work = item.work;
  const Slots<kDim> slots{p};
  const int rows = work.row_end - work.row_begin, groups = (rows + kGroup - 1) / kGroup;
  std::uint32_t classes = classes_of(warp, warps, groups);
  Merge merge{-1, 0, 0, 0, 0, work.finish ? -1 : work.partial};
#pragma unroll 1
  while (classes != 0) {
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
      if (!(classes >> group % kRowClasses & 1)) continue;
      const int place = group * kGroup + lane / State::kLanes, row = min(place, rows - 1);
      const bool keep = place < rows;
      State r;
      if (merge.first < 0) {
        r.template add<kAtOnce>(states_of(row), lane);
        if (work.fold) r.put_behind(slots.parts(work.partial, 0, 1, row), lane);
      } else {
        r.template add<kAtOnce>(slots.parts(merge.first, merge.step, merge.count, row), lane);
      }
      if (merge.target < 0) {
        constexpr auto kStore = Traits::kAnyOutput ? RowStore::kAnything : RowStore::kHalves;
        write_row<kDim, kStore>(p, place_of(p, item, row), r, lane, keep);
      } else {
        slots.store(r, merge.target, row, lane, keep);
      }
    }
    if (merge.target < 0 || item.first_slot < 0) return;
    merge = next_merge(item, merge, kGroupsAtOnce, p.schedule.params.absolute);
    classes = last_arrivals(p, merge.counter, classes, merge.arrivals, lane);
  }
}

/// Sets the status if the schedule has more queries than Q has rows, or a static scale or min of the cache is
/// none. By a warp of each worker.
__device__ inline void check_inputs(const AttentionParams& p, int worker, int lane) {
  if (p.status == nullptr || !p.checks_inputs) return;
  const bool first = worker == 0 && lane == 0;
  if (first && p.schedule.header->total_q > p.q_tokens) atomicOr(p.status, kStatusBadQueries);
  const ParamView& part = lane % 2 == 0 ? p.k : p.v;
  if (part.static_scale == nullptr) return;
  const int heads = part.static_stride == 0 ? 1 : p.schedule.params.kv_heads;
#pragma unroll 1
  for (int head = worker * 16 + lane / 2; head < heads; head += static_cast<int>(gridDim.x) * 16) {
    const float min = part.static_min == nullptr ? 0.0f : part.static_min[head];
    if (!codec::is_static_scale(part.static_scale[head], min)) atomicOr(p.status, kStatusBadScale);
  }
}

}  // namespace halftone::cuda
