// Turns lengths into a schedule. Phases, each a loop over independent calls but for a sum, so that one CUDA
// block can run them as well as the host:
// - per request: row_blocks(), head_steps(); the prefix sum of steps into first_step; totals for
//   begin_schedule()
// - per request, if units cost something: row_blocks(); their prefix sum times that, added to first_step
// - per worker: locate_worker()
// - per worker: slots_of(), then the prefix sum into starts[].slot
// Before: cu_q, kv_lengths and (plain K and V) cu_kv are filled in and within the bounds.
#pragma once

#include "plan/queue.h"
#include "plan/work.h"

namespace halftone::planning {

/// Totals of a batch, from which begin_schedule() decides how the line is shared. `alike`: all requests with
/// queries have equally many steps, hence equal units where a request has one row block or all blocks see all
/// keys; elsewhere only the balance suffers. It counts only if beginning a unit costs something.
struct BatchTotals {
  std::int64_t steps;
  std::int64_t units;
  bool alike;
};

/// Workers that share the line: all, or fewer where units of equal length then are cut into equally many
/// parts, so that no worker has parts of two, or stay whole. Of few units up to one worker in 16 stays idle
/// for that; with even_parts more do, and of many units any, if what they could do takes no longer than what
/// cutting costs each worker, a unit more and the merging of two.
HT_HOST_DEVICE constexpr std::int64_t workers_for(const ScheduleParams& p, const BatchTotals& batch) {
  const std::int64_t workers = p.workers;
  const bool counts = batch.alike && p.unit_cost > 0;
  const std::int64_t line = batch.steps + batch.units * p.unit_cost;
  const auto pays = [&](std::int64_t w) {
    return counts && line / w * (workers - w) / workers <= 2 * p.unit_cost;
  };
  if (batch.units > 0 && batch.units <= workers) {
    const std::int64_t idle = workers % batch.units;
    const bool even = idle * 16 <= workers || (p.even_parts && pays(workers - idle));
    return even ? workers - idle : workers;
  }
  for (std::int64_t w = workers; counts && (workers - w) * 16 <= workers && w > 0; --w) {
    if (batch.units % w == 0) return pays(w) ? w : workers;
  }
  return workers;
}

/// Sets what locating the workers needs besides first_step. Where all parts are whole or equal ones, what
/// beginning a unit costs is the same for all workers and does not count.
HT_HOST_DEVICE constexpr void begin_schedule(const Schedule& s, const BatchTotals& batch) {
  ScheduleHeader& h = *s.header;
  const std::int64_t workers = workers_for(s.params, batch);
  const bool equal_parts =
      batch.alike && batch.units > 0 && (workers % batch.units == 0 || batch.units % workers == 0);
  h.units = batch.units;
  h.active = static_cast<std::int32_t>(workers);
  h.unit_cost = equal_parts ? 0 : s.params.unit_cost;
}

/// Totals and shares, from first_step[batch].
HT_HOST_DEVICE constexpr void divide_steps(const Schedule& s) {
  ScheduleHeader& h = *s.header;
  h.total_steps = s.first_step[s.params.batch];
  if (h.total_steps < h.active) h.active = static_cast<std::int32_t>(h.total_steps);
  h.share = h.active == 0 ? 0 : h.total_steps / h.active;
  h.extra = h.active == 0 ? 0 : static_cast<std::int32_t>(h.total_steps % h.active);
}

/// Fills in starts[worker] but for its slot.
HT_HOST_DEVICE constexpr void locate_worker(const Schedule& s, std::int32_t worker) {
  const std::int64_t at = share_begin(*s.header, worker);
  if (worker >= s.header->active) {
    s.starts[worker] = {at, s.params.batch, 0, 0, 0, 0, 0, 0, 0, 0};
    return;
  }
  std::int32_t low = 0, high = s.params.batch;  // first_step[low] <= at < first_step[high]
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (s.first_step[middle] <= at ? low : high) = middle;
  }
  const std::int64_t per_head = (s.first_step[low + 1] - s.first_step[low]) / s.params.kv_heads;
  std::int64_t rest = at - s.first_step[low];
  const auto head = static_cast<std::int32_t>(rest / per_head);
  rest -= head * per_head;
  BlockWalk walk(s.params);
  walk.request(s.params, q_length(s, low), s.kv_lengths[low]);
  walk.rewind(s.params);
  const std::int32_t cost = s.header->unit_cost;
  if (s.params.window_left < 0 && s.params.window_right < 0) {  // equal blocks
    const auto block = static_cast<std::int32_t>(rest / (cost + walk.steps));
    rest -= std::int64_t{block} * (cost + walk.steps);
    walk.seek(s.params, block);
  }
  for (; rest >= cost + walk.steps; walk.next(s.params)) rest -= cost + walk.steps;
  const auto position = static_cast<std::int32_t>(rest);  // within the unit
  const std::int64_t first = at - position + cost;        // of the unit's steps
  s.starts[worker] = {at,
                      low,
                      head,
                      walk.block,
                      max_of(0, position - cost),
                      max_of(0, cost - position),
                      walk.steps,
                      worker_at(*s.header, first),
                      worker_at(*s.header, first + walk.steps - 1),
                      0};
}

/// Slots that a worker uses: those of the unit that it continues, then one for a unit that it begins.
HT_HOST_DEVICE constexpr std::int32_t slots_of(const Schedule& s, std::int32_t worker) {
  const ScheduleHeader& h = *s.header;
  if (worker >= h.active || s.params.max_steps <= 1) return 0;
  const WorkerStart& start = s.starts[worker];
  const std::int64_t begin = share_begin(s, worker), end = share_begin(s, worker + 1);
  std::int64_t continued = start.offset > 0 ? start.steps - start.offset : 0;
  if (continued > end - begin) continued = end - begin;
  if (s.params.absolute) return static_cast<std::int32_t>(continued) + (begin + continued < end ? 1 : 0);
  const WorkerStart& after = s.starts[worker + 1];
  const bool cut = after.offset > 0 && end - after.offset >= begin;  // and this worker began that unit
  return (continued > 0 ? 1 : 0) + (cut ? 1 : 0);
}

/// The phases, serially. `plan_id` marks whose schedule this is.
HT_HOST_DEVICE constexpr void build_schedule(const Schedule& s, std::uint64_t plan_id) {
  if (s.params.queue_tokens > 0) return build_queue(s, plan_id);
  ScheduleHeader& h = *s.header;
  h.magic = 0;  // set last: an unfinished schedule is none
  h.total_kv = 0;
  h.total_q = s.cu_q[s.params.batch];
  std::int64_t steps = 0, units = 0, least = INT64_MAX, most = 0;
  for (std::int32_t r = 0; r < s.params.batch; ++r) {
    const std::int32_t q_len = served_queries(s, r);
    const std::int64_t own = head_steps(s.params, q_len, s.kv_lengths[r]);
    h.total_kv += s.kv_lengths[r];
    s.first_step[r] = steps;
    steps += own * s.params.kv_heads;
    units += std::int64_t{row_blocks(s.params, q_len)} * s.params.kv_heads;
    if (q_len == 0) continue;
    if (own < least) least = own;
    if (own > most) most = own;
  }
  s.first_step[s.params.batch] = steps;
  begin_schedule(s, {steps, units, least >= most});
  units = 0;
  for (std::int32_t r = 0; h.unit_cost > 0 && r <= s.params.batch; ++r) {
    s.first_step[r] += units * h.unit_cost;
    if (r < s.params.batch) {
      units += std::int64_t{row_blocks(s.params, served_queries(s, r))} * s.params.kv_heads;
    }
  }
  divide_steps(s);
  for (std::int32_t w = 0; w <= h.active; ++w) locate_worker(s, w);
  std::int32_t slot = 0;
  for (std::int32_t w = 0; w <= h.active; ++w) {
    const std::int32_t used = slots_of(s, w);
    s.starts[w].slot = slot;
    slot += used;
  }
  h.partials = slot;
  h.plan_id = plan_id;
  h.magic = ScheduleHeader::kMagic;
}

/// Steps of a unit at the bounds: the longest range is max_kv_len, or what the windows leave of it.
constexpr std::int32_t max_unit_steps(const ScheduleParams& p) {
  std::int64_t tokens = p.max_kv_len;
  if (p.window_left >= 0 && p.window_right >= 0) {
    const std::int64_t queries = min_of(p.max_q_len, (p.row_block - 1) / p.group + 2);
    const std::int64_t seen = std::int64_t{p.window_left} + p.window_right + queries;
    if (seen < tokens) tokens = seen;
  }
  const std::int64_t step = std::int64_t{1} << p.step_log2;
  const std::int64_t whole = (p.max_kv_len + step - 1) / step;
  const std::int64_t touched = (tokens + step - 1) / step + 1;  // a range may begin anywhere in a step
  const std::int64_t steps = touched < whole ? touched : whole;
  return steps < 1 ? 1 : static_cast<std::int32_t>(steps);
}

/// Packed rows of a request that the schedule serves, at the bounds.
constexpr std::int64_t max_served_rows(const ScheduleParams& p) {
  const std::int64_t rows = std::int64_t{p.max_q_len} * p.group;
  return rows < p.max_rows ? rows : p.max_rows;
}

/// Units at the bounds.
constexpr std::int64_t max_units(const ScheduleParams& p) {
  const std::int64_t blocks = (max_served_rows(p) + p.row_block - 1) / p.row_block;
  return saturating_product(saturating_product(p.batch, p.kv_heads), blocks);
}

/// Positions at the bounds.
constexpr std::int64_t max_positions(const ScheduleParams& p) {
  return saturating_product(max_units(p), std::int64_t{p.max_steps} + p.unit_cost);
}

/// Upper bound of the slots that a schedule within the bounds uses. With tiles: two for each cut between
/// workers. With absolute splits: one for each worker and one for each split of a unit that an earlier worker
/// began.
constexpr std::int64_t max_partials(const ScheduleParams& p) {
  if (p.queue_tokens > 0) return max_queue_partials(p, max_units(p));
  const std::int64_t steps = saturating_product(max_units(p), p.max_steps), positions = max_positions(p);
  const std::int64_t active = positions < p.workers ? positions : p.workers;
  if (active == 0 || p.max_steps <= 1) return 0;
  if (!p.absolute) return 2 * (active - 1);
  const std::int64_t continued = (active - 1) * (p.max_steps - 1);
  return active + (continued < steps ? continued : steps);
}

}  // namespace halftone::planning
