// The queue, the other way to share units: workers take them whole, one after the other, each the next one
// when it is done with its last. For kernels bound by arithmetic, whose units are long.
//
// Order: requests as they come; of a request as many heads at a time as have queue_tokens keys together, so
// that what all workers read at a time fits into a cache they share; of these heads, the last row blocks
// first, which with a causal mask are the longest. What remains at the end is then short. Where a mask makes
// units differ, there are at least queue_heads heads at a time: those that run together are then nearly
// equally long, and read the same keys at about the same time.
//
// Where the units of a request are nearly alike, or all are few, that would leave workers idle at the end:
// the last units are cut into equally many parts, at multiples of the step from the unit's first key. Every
// part stores its state in a slot of its own; who has one merges some rows of all, always in the same
// order. What a queue computes depends on lengths and workers only, not on who takes what. With `absolute` no
// unit is cut, so that a request's bits do not depend on the others.
#pragma once

#include "plan/work.h"

namespace halftone::planning {

/// Slots per worker that the parts of cut units may take.
inline constexpr std::int64_t kQueueSlotsPerWorker = 2;

/// Parts of a unit at most: a backend may count them in 16 bits.
inline constexpr std::int32_t kMostQueueParts = 4096;

HT_HOST_DEVICE constexpr std::int64_t queue_items(const ScheduleHeader& h) {
  return h.units + std::int64_t{h.cut_units} * (h.cut_parts - 1);
}

/// Whether a mask can make the units of a request differ.
HT_HOST_DEVICE constexpr bool has_mask(const ScheduleParams& p) {
  return p.window_left >= 0 || p.window_right >= 0;
}

/// ScheduleParams::queue_heads.
constexpr std::int32_t least_queue_heads(const ScheduleParams& p) {
  constexpr std::int32_t kSharers = 8;  // workers
  return has_mask(p) ? max_of(1, p.workers / kSharers) : 1;
}

/// Rows that go together: blocks are as equal as multiples of it allow.
inline constexpr std::int32_t kQueueRows = 64;

/// Sets the rows of row block `block` of a request that has so many packed rows and blocks. Were all blocks
/// but the last one full, that one would keep a worker nearly as long as they do, whatever it lacks. The
/// first blocks have fewer rows than the others: they are taken last and, causal, see the fewest keys.
HT_HOST_DEVICE constexpr void set_queue_rows(const ScheduleParams& p, std::int32_t rows, std::int32_t blocks,
                                             std::int32_t block, WorkItem& item) {
  const std::int32_t each = p.row_block % kQueueRows == 0 ? kQueueRows : p.row_block;
  const std::int32_t groups = (rows + each - 1) / each, least = groups / blocks;
  const std::int32_t shorter = blocks - (groups - least * blocks);
  item.row_begin = (block * least + max_of(0, block - shorter)) * each;
  item.row_end = min_of(rows, item.row_begin + (block < shorter ? least : least + 1) * each);
}

/// Item `index` of a queue that has so many. Returns into how many parts its unit is cut; the unit's first
/// slot is then that of `item` rounded down to a multiple of it. `fold` is never set.
HT_HOST_DEVICE constexpr std::int32_t queue_item(const Schedule& s, std::int64_t index, WorkItem& item) {
  const ScheduleHeader& h = *s.header;
  const std::int64_t whole = h.units - h.cut_units;
  std::int64_t unit = index;
  std::int32_t parts = 1;
  item.partial = -1;
  if (index >= whole) {
    parts = h.cut_parts;
    item.partial = static_cast<std::int32_t>(index - whole);
    unit = whole + item.partial / parts;
  }
  item.fold = false;
  item.finish = parts == 1;
  std::int32_t low = 0, high = s.params.batch;  // first_step[low] <= unit < first_step[high]
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (s.first_step[middle] <= unit ? low : high) = middle;
  }
  item.request = low;
  const std::int32_t queries = q_length(s, low), keys = s.kv_lengths[low];
  const std::int32_t blocks = row_blocks(s.params, queries), all = s.params.kv_heads;
  auto rest = static_cast<std::int32_t>(unit - s.first_step[low]);
  std::int32_t heads = min_of(all, max_of(s.params.queue_heads, s.params.queue_tokens / max_of(1, keys)));
  const std::int32_t set = rest / (heads * blocks);
  item.kv_head = set * heads;
  rest -= set * heads * blocks;
  heads = min_of(heads, all - item.kv_head);
  item.kv_head += rest % heads;
  set_queue_rows(s.params, queries * s.params.group, blocks, blocks - 1 - rest / heads, item);
  const KvRange range = visible_range(s.params, queries, keys, item.row_begin / s.params.group,
                                      (item.row_end - 1) / s.params.group);
  item.kv_begin = range.begin;
  item.kv_end = range.end;
  if (parts == 1) return parts;
  const std::int32_t length = item.kv_end - item.kv_begin;
  const std::int32_t steps = (length + (1 << s.params.step_log2) - 1) >> s.params.step_log2;
  const std::int32_t each = steps / parts, longer = steps % parts;  // the first parts have a step more
  const std::int32_t part = item.partial % parts, first = part * each + min_of(part, longer);
  const std::int32_t end = first + each + (part < longer ? 1 : 0);
  item.kv_end = item.kv_begin + min_of(length, end << s.params.step_log2);
  item.kv_begin += min_of(length, first << s.params.step_log2);
  return parts;
}

/// Decides what is cut, from the totals of the batch.
HT_HOST_DEVICE constexpr void begin_queue(const Schedule& s, std::int64_t units, std::int64_t steps) {
  ScheduleHeader& h = *s.header;
  const std::int64_t workers = s.params.workers;
  h.units = units;
  h.total_steps = steps;
  h.share = 0;
  h.extra = h.active = h.unit_cost = h.partials = h.cut_units = 0;
  h.cut_parts = 1;
  if (units == 0 || s.params.absolute) return;
  const std::int64_t length = steps / units > 0 ? steps / units : 1;
  // A causal mask hides at most as many keys as there are queries, of nearly alike units a small part.
  constexpr std::int64_t kAlike = 4;
  const std::int64_t hidden = s.params.max_q_len >> s.params.step_log2;
  const bool alike = !has_mask(s.params) || (s.params.window_left < 0 && hidden <= length / kAlike);
  // Where they differ and are many, the short ones at the end even out what workers have.
  if (!alike && units >= 2 * workers) return;
  const std::int64_t cut = alike ? units % workers : units;
  if (cut == 0) return;
  constexpr std::int64_t kUnitCost = 2, kPartCost = 4;  // steps that beginning and ending one takes
  std::int64_t best = INT64_MAX;
  const std::int64_t most = length < kMostQueueParts ? length : kMostQueueParts;
  for (std::int32_t parts = 1; parts <= most && parts * cut <= kQueueSlotsPerWorker * workers; ++parts) {
    const std::int64_t rounds = (cut * parts + workers - 1) / workers;
    const std::int64_t cost = rounds * ((length + parts - 1) / parts + (parts > 1 ? kPartCost : kUnitCost));
    if (cost < best) best = cost, h.cut_parts = parts;
  }
  if (h.cut_parts == 1) return;
  h.cut_units = static_cast<std::int32_t>(cut);
  h.partials = h.cut_units * h.cut_parts;
}

/// Upper bound of the slots of a queue of at most `units` units.
constexpr std::int64_t max_queue_partials(const ScheduleParams& p, std::int64_t units) {
  if (p.absolute || p.max_steps <= 1) return 0;
  const std::int64_t parts = saturating_product(units, p.max_steps);
  return parts < kQueueSlotsPerWorker * p.workers ? parts : kQueueSlotsPerWorker * p.workers;
}

/// Rows that the staged keys of a request take, which the pass serves if it has queries.
HT_HOST_DEVICE constexpr std::int64_t staged_rows(const ScheduleParams& p, std::int32_t queries,
                                                  std::int32_t keys) {
  const std::int64_t each = p.staged_tokens;
  return queries > 0 ? (keys + each - 1) & -each : 0;
}

/// Sets where a request's staged keys begin, after `before` rows of earlier requests, and their number.
HT_HOST_DEVICE constexpr void stage_request(const Schedule& s, std::int32_t request, std::int32_t queries,
                                            std::int64_t before) {
  s.cu_kv[request] = before < INT32_MAX ? static_cast<std::int32_t>(before) : INT32_MAX;
  s.staged[request] = queries > 0 ? s.kv_lengths[request] : 0;
}

/// All of it, serially. Before: as for build_schedule().
HT_HOST_DEVICE constexpr void build_queue(const Schedule& s, std::uint64_t plan_id) {
  ScheduleHeader& h = *s.header;
  h.magic = 0;  // set last: an unfinished schedule is none
  h.total_kv = 0;
  h.total_q = s.cu_q[s.params.batch];
  std::int64_t steps = 0, units = 0, staged = 0;
  for (std::int32_t r = 0; r < s.params.batch; ++r) {
    const std::int32_t queries = served_queries(s, r);
    if (s.staged != nullptr) {
      stage_request(s, r, queries, staged);
      staged += staged_rows(s.params, queries, s.kv_lengths[r]);
    }
    h.total_kv += s.kv_lengths[r];
    s.first_step[r] = units;
    steps += head_steps(s.params, queries, s.kv_lengths[r]) * s.params.kv_heads;
    units += std::int64_t{row_blocks(s.params, queries)} * s.params.kv_heads;
  }
  s.first_step[s.params.batch] = units;
  begin_queue(s, units, steps);
  h.plan_id = plan_id;
  h.magic = ScheduleHeader::kMagic;
}

}  // namespace halftone::planning
