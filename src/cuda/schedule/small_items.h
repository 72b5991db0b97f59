// The schedule of a small batch: where workers begin, and their items.
#pragma once

#include "cuda/schedule/small_line.h"

namespace halftone::cuda::small {

/// Where something of a line lies: a position, or a unit by its number.
struct Place {
  std::int32_t request;
  std::uint32_t head, rest;  // rest: within the head
};

/// `before`: positions or units before each request; before[low] <= at < before[high].
__device__ inline Place find_place(const Pass& p, const std::uint32_t* before, std::uint32_t at,
                                   std::int32_t low, std::int32_t high) {
#pragma unroll 1
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (before[middle] <= at ? low : high) = middle;
  }
  const std::uint32_t own = before[low], per_head = p.divisors.kv_heads.quotient(before[low + 1] - own);
  const std::uint32_t head = (at - own) / per_head;
  return {low, head, at - own - head * per_head};
}

/// The number of a unit.
__device__ inline std::uint32_t unit_number(const Pass& p, std::int32_t request, std::uint32_t head,
                                            std::int32_t queries, std::int32_t block) {
  return p.shared.units[request] + head * row_blocks(p, queries) + block;
}

/// planning::locate_worker(), of an active worker; `start`: the same for shared memory.
__device__ inline planning::WorkerStart locate_worker(const Pass& p, const Line& line, std::uint32_t at,
                                                      Start& start) {
  auto [request, head, rest] = find_place(p, p.shared.position, at, 0, p.shape.batch);
  const std::int32_t queries = p.shared.cu_q[request + 1] - p.shared.cu_q[request],
                     keys = p.shared.keys[request];
  std::int32_t block = 0;
  Unit unit = unit_of(p, queries, keys, 0);
  if (!p.has_mask()) {  // equal blocks
    const std::uint32_t length = line.unit_cost + unit.steps;
    if (rest >= length) block = static_cast<std::int32_t>(rest / length);
    rest -= block * length;
  } else {
#pragma unroll 1
    while (rest >= line.unit_cost + unit.steps) {
      rest -= line.unit_cost + unit.steps;
      unit = unit_of(p, queries, keys, ++block);
    }
  }
  const std::uint32_t first_step = at - rest + line.unit_cost;
  const auto into = static_cast<std::int32_t>(rest - line.unit_cost);
  const std::int32_t offset = planning::max_of(0, into), before = planning::max_of(0, -into),
                     first = line.worker_at(first_step), last = line.worker_at(first_step + unit.steps - 1);
  start = {at, unit_number(p, request, head, queries, block), request, block, offset, unit.steps, first, last,
           0};
  return {at, request, static_cast<std::int32_t>(head), block, offset, before, unit.steps, first, last, 0};
}

/// planning::slots_of(), of an active worker.
__device__ inline std::int32_t slots_of(const Pass& p, const Start& start, const Start& after) {
  if (p.shape.max_steps <= 1) return 0;
  const auto share = static_cast<std::int32_t>(after.position - start.position);
  const std::int32_t continued = start.offset > 0 ? planning::min_of(start.steps - start.offset, share) : 0;
  if (p.shape.absolute) return continued + (continued < share ? 1 : 0);
  const bool cut = after.offset > 0 && after.offset <= share;  // and this worker began that unit
  return (continued > 0 ? 1 : 0) + (cut ? 1 : 0);
}

/// Items of an active worker: its steps if `absolute`, where beginning a unit costs nothing, else its units.
__device__ inline std::uint32_t items_of(const Pass& p, const Start& start, const Start& after) {
  if (p.shape.absolute) return after.position - start.position;
  return after.unit - start.unit + (after.offset > 0 ? 1 : 0);
}

/// Of an item that does not end its unit: who merges the unit, if it is cut.
__device__ inline void set_merge(const Pass& p, std::int32_t owner, std::uint32_t unit, DeviceItem& item) {
  const Start& after = p.shared.starts[owner + 1];
  if (after.unit != unit) return;
  item.first_slot = after.slot - 1;
  item.parts = 1 + (p.shape.absolute ? after.steps - after.offset : after.last - owner);
  item.arrivals = p.shape.absolute ? after.steps : item.parts;
}

/// Item `index` of a worker, as an ItemCursor finds it after those before.
__device__ inline DeviceItem find_item(const Pass& p, std::int32_t worker, std::int32_t index) {
  const Start &start = p.shared.starts[worker], &after = p.shared.starts[worker + 1];
  const bool absolute = p.shape.absolute;
  const auto [request, head, rest] = find_place(
      p, absolute ? p.shared.position : p.shared.units, (absolute ? start.position : start.unit) + index,
      start.request, planning::min_of(after.request + 1, p.shape.batch));
  const std::int32_t first_query = p.shared.cu_q[request], queries = p.shared.cu_q[request + 1] - first_query,
                     keys = p.shared.keys[request];
  std::int32_t block = static_cast<std::int32_t>(rest), offset = index == 0 ? start.offset : 0;
  if (absolute) {
    const bool same_head = block >= index;  // as the start's: `rest` counts steps, so far
    offset = same_head ? start.offset + index : block;
    block = same_head ? start.block : 0;
  }
  Unit unit = unit_of(p, queries, keys, block);
#pragma unroll 1
  while (offset >= unit.steps) {  // only if absolute: units before the item's, at most one for each item
    offset -= unit.steps;
    unit = unit_of(p, queries, keys, ++block);
  }
  const std::uint32_t number = unit_number(p, request, head, queries, block);
  const std::int32_t end = absolute ? offset + 1 : number == after.unit ? after.offset : unit.steps;
  const bool ends = end == unit.steps;
  const std::int32_t continued = start.offset == 0 ? 0 : absolute ? start.steps - start.offset : 1;  // items
  const bool inherited = index < continued;
  DeviceItem item{};
  item.work.request = request;
  item.work.kv_head = static_cast<std::int32_t>(head);
  item.work.row_begin = unit.row_begin;
  item.work.row_end = unit.row_end;
  item.work.kv_begin = offset == 0 ? unit.range.begin : (unit.first_step + offset) << p.shape.step_log2;
  item.work.kv_end = ends ? unit.range.end : (unit.first_step + end) << p.shape.step_log2;
  item.work.fold = !inherited && offset > 0;
  item.work.finish = !inherited && ends;
  item.work.partial =
      item.work.finish && !item.work.fold ? -1 : start.slot + planning::min_of(index, continued);
  item.first_query = first_query;
  item.queries = queries;
  item.keys = keys;
  item.first_slot = -1;
  if (!item.work.finish) set_merge(p, inherited ? start.first : worker, number, item);
  return item;
}

template <bool kSimple>
__device__ inline void build_block(const ScheduleBuildParams& build, const PassBuildParams& pass,
                                   const Divisors& divisors, Shared& shared) {
  const Pass p{pass.schedule, pass.schedule.params, divisors, shared, kSimple};
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  planning::ScheduleHeader& header = *p.s.header;
  if (thread == 0) header.magic = 0;
  Line line = place_requests(build, p);
  if (warp * 32 <= planning::max_of(p.shape.batch, p.shape.workers)) {  // further warps only list items
    share_line(p.shape, line);
    place_positions(p, line);
  }
  __syncthreads();
  const auto worker = static_cast<std::uint32_t>(thread);
  const bool active = worker < line.active;
  Start start{line.total, line.units, p.shape.batch, 0, 0, 0, 0, 0, 0};  // of `active`: where all work ends
  planning::WorkerStart written{line.total, p.shape.batch, 0, 0, 0, 0, 0, 0, 0, 0};
  if (active) written = locate_worker(p, line, line.share_begin(worker), start);
  if (worker <= line.active) shared.starts[worker] = start;
  __syncthreads();
  std::uint32_t own[2] = {}, sums[2], before[2];  // slots, listed items
  if (active) {
    const Start& after = shared.starts[worker + 1];
    const std::uint32_t items = items_of(p, start, after);
    own[0] = slots_of(p, start, after);
    own[1] = min(items, std::uint32_t{kListedItems});
    pass.list.counts[worker] = static_cast<std::int32_t>(min(items, std::uint32_t{kListedItems + 1}));
  } else if (thread < p.shape.workers) {
    pass.list.counts[worker] = 0;
  }
  for (int n = 0; n < 2; ++n) sums[n] = own[n];
  warp_sums(sums, lane);
  if (lane == 31) shared.slots[warp] = sums[0], shared.listed[warp] = sums[1];
  __syncthreads();
  const bool is_warp = lane < static_cast<int>(blockDim.x) / 32;
  const std::uint32_t slots = sum_warps(is_warp ? shared.slots[lane] : 0, lane, warp, before[0]),
                      listed = sum_warps(is_warp ? shared.listed[lane] : 0, lane, warp, before[1]);
  if (worker <= line.active) {
    shared.starts[worker].slot = written.slot = static_cast<std::int32_t>(before[0] + sums[0] - own[0]);
    p.s.starts[worker] = written;
    std::uint16_t* const places = shared.places + before[1] + sums[1] - own[1];
#pragma unroll 1
    for (std::uint32_t i = 0; i < own[1]; ++i)
      places[i] = static_cast<std::uint16_t>(worker * kListedItems + i);
  }
  __syncthreads();
#pragma unroll 1
  for (std::uint32_t i = thread; i < listed; i += blockDim.x) {  // whosever: no worker's items take longer
    const std::int32_t at = shared.places[i];
    pass.list.items[at] = find_item(p, at / kListedItems, at % kListedItems);
  }
  zero_arrivals(pass, slots);
  if (thread == 0) {
    write_header(header, line);
    header.partials = static_cast<std::int32_t>(slots);
    seal(build, header);
  }
}

}  // namespace halftone::cuda::small
