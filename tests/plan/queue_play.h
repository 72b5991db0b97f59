// Random queues, and what their items must be: the order, the row blocks and the cuts, from their
// description.
#pragma once

#include <algorithm>
#include <climits>
#include <set>

#include "plan/queue.h"
#include "tests/plan/schedule_play.h"

namespace halftone::queue_play {

using namespace schedule_play;

/// A random_case() for a queue, with the requests of one of two passes or all.
inline RandomCase queue_case(std::uint64_t seed) {
  RandomCase c = schedule_play::random_case(seed);
  std::mt19937_64 random(seed);
  constexpr std::int32_t kTokens[] = {1, 100, 1000, 3000, 50000, INT_MAX};
  c.params.queue_tokens = kTokens[random() % std::size(kTokens)];
  c.params.queue_heads = 1 + static_cast<std::int32_t>(random() % 3);
  c.params.unit_cost = 0;
  if (random() % 4 != 0) c.params.absolute = false;
  if (random() % 2 == 0) c.params.step_log2 = 4;
  switch (random() % 4) {
    case 0:
      c.params.max_rows = 4 * c.params.group;
      break;
    case 1:
      c.params.min_rows = c.params.group + 1;
      break;
    default:
      break;
  }
  return c;
}

struct QueuedItem {
  WorkItem work;
  std::int32_t parts;
};

inline QueuedItem item_of(const Built& built, std::int64_t index) {
  QueuedItem item{};
  item.parts = queue_item(*built, index, item.work);
  return item;
}

inline std::vector<QueuedItem> all_items(const Built& built) {
  std::vector<QueuedItem> items;
  for (std::int64_t i = 0; i < queue_items(*built->header); ++i) items.push_back(item_of(built, i));
  return items;
}

inline UnitKey unit_of(const WorkItem& item) { return {item.request, item.kv_head, item.row_begin}; }

/// Where the row blocks of a request begin, and behind the last one where it ends: groups of 64 rows are
/// dealt to as many blocks as hold them, from the last one on.
inline std::vector<std::int32_t> block_rows(const ScheduleParams& p, std::int32_t rows) {
  const std::int32_t each = p.row_block % 64 == 0 ? 64 : p.row_block;
  std::vector<std::int32_t> sizes(static_cast<std::size_t>((rows + p.row_block - 1) / p.row_block));
  for (std::int32_t first = 0, i = 0; first < rows; first += each, ++i) {
    sizes[static_cast<std::size_t>(i) % sizes.size()] += each;
  }
  std::reverse(sizes.begin(), sizes.end());
  std::vector<std::int32_t> begins = {0};
  for (const std::int32_t size : sizes) begins.push_back(std::min(rows, begins.back() + size));
  return begins;
}

/// expected_units(), in these blocks.
inline std::map<UnitKey, Unit> queue_units(const ScheduleParams& p, const std::vector<Request>& requests) {
  std::map<UnitKey, Unit> units;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const std::int32_t rows = requests[r].q_len * p.group;
    if (rows < p.min_rows || rows > p.max_rows || rows == 0) continue;
    const std::vector<std::int32_t> begins = block_rows(p, rows);
    for (std::size_t block = 0; block + 1 < begins.size(); ++block) {
      const Unit unit = unit_of_rows(p, requests[r], begins[block], begins[block + 1]);
      for (std::int32_t h = 0; h < p.kv_heads; ++h) {
        units[{static_cast<std::int32_t>(r), h, begins[block]}] = unit;
      }
    }
  }
  return units;
}

/// The order in which units leave the queue, from its description.
inline std::vector<UnitKey> expected_order(const ScheduleParams& p, const std::vector<Request>& requests) {
  std::vector<UnitKey> order;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const std::int32_t rows = requests[r].q_len * p.group;
    if (rows < p.min_rows || rows > p.max_rows || rows == 0) continue;
    const std::int32_t together =
        std::min(p.kv_heads, std::max(p.queue_heads, p.queue_tokens / std::max(1, requests[r].kv_len)));
    for (std::int32_t first = 0; first < p.kv_heads; first += together) {
      const std::vector<std::int32_t> begins = block_rows(p, rows);
      for (std::size_t block = begins.size() - 1; block-- > 0;) {
        for (std::int32_t h = first; h < std::min(p.kv_heads, first + together); ++h) {
          order.emplace_back(static_cast<std::int32_t>(r), h, begins[block]);
        }
      }
    }
  }
  return order;
}

inline std::int64_t steps_in(const ScheduleParams& p, const KvRange& range) {
  return range.end == 0 ? 1 : ((range.end - 1) >> p.step_log2) - (range.begin >> p.step_log2) + 1;
}

inline void check_header(const Built& built, const std::vector<Request>& requests,
                         const std::map<UnitKey, Unit>& units) {
  const ScheduleHeader& h = *built->header;
  const ScheduleParams& p = built->params;
  std::int64_t queries = 0, keys = 0, steps = 0;
  for (const Request& r : requests) queries += r.q_len, keys += r.kv_len;
  for (const auto& [key, unit] : units) steps += steps_in(p, unit.range);
  ASSERT_EQ(h.magic, ScheduleHeader::kMagic);
  ASSERT_EQ(h.plan_id, 7U);
  ASSERT_EQ(h.total_q, queries);
  ASSERT_EQ(h.total_kv, keys);
  ASSERT_EQ(h.total_steps, steps);
  ASSERT_EQ(h.units, static_cast<std::int64_t>(units.size()));
  ASSERT_EQ(h.active, 0) << "no worker has a share of a line";
  ASSERT_GE(h.cut_parts, 1);
  ASSERT_LE(h.cut_units, h.units);
  ASSERT_EQ(h.cut_units > 0, h.cut_parts > 1);
  ASSERT_EQ(h.partials, h.cut_units * h.cut_parts);
  ASSERT_LE(h.partials, built.max_slots());
  ASSERT_LE(h.partials, kQueueSlotsPerWorker * p.workers);
  ASSERT_EQ(queue_items(h), h.units + h.partials - h.cut_units);
  if (p.absolute) {
    ASSERT_EQ(h.cut_units, 0);
    ASSERT_EQ(built.max_slots(), 0);
  }
}

/// The units in their order; of each, all keys of its range, in the order of its parts, and the slots.
inline void check_items(const Built& built, const std::vector<Request>& requests,
                        const std::map<UnitKey, Unit>& units) {
  const ScheduleHeader& h = *built->header;
  const std::int32_t step = 1 << built->params.step_log2;
  const std::vector<UnitKey> order = expected_order(built->params, requests);
  ASSERT_EQ(order.size(), units.size());
  std::set<std::int32_t> slots;
  std::int64_t index = 0;
  for (std::size_t u = 0; u < order.size(); ++u) {
    const Unit& unit = units.at(order[u]);
    SCOPED_TRACE(fmt::format("request {}, KV head {}, row {}", std::get<0>(order[u]), std::get<1>(order[u]),
                             std::get<2>(order[u])));
    const bool cut = static_cast<std::int64_t>(u) >= h.units - h.cut_units;
    const std::int32_t parts = cut ? h.cut_parts : 1;
    std::int32_t at = unit.range.begin, first_slot = -1;
    for (std::int32_t part = 0; part < parts; ++part) {
      const QueuedItem item = item_of(built, index++);
      ASSERT_EQ(unit_of(item.work), order[u]);
      ASSERT_EQ(item.work.row_end, unit.row_end);
      ASSERT_EQ(item.parts, parts);
      ASSERT_EQ(item.work.kv_begin, at) << "a gap or an overlap before part " << part;
      ASSERT_LE(item.work.kv_begin, item.work.kv_end);
      if (item.work.kv_begin < item.work.kv_end) {
        ASSERT_EQ(item.work.kv_begin % kRangeTokens, 0);
      }
      at = item.work.kv_end;
      ASSERT_FALSE(item.work.fold);
      ASSERT_EQ(item.work.finish, parts == 1);
      if (parts == 1) {
        ASSERT_EQ(item.work.partial, -1);
        continue;
      }
      if (part + 1 < parts && at < unit.range.end) {
        ASSERT_EQ((at - unit.range.begin) % step, 0) << "cuts lie at steps from the unit's first key";
      }
      if (part == 0) first_slot = item.work.partial;
      ASSERT_EQ(item.work.partial, first_slot + part);
      ASSERT_EQ(item.work.partial / parts * parts, first_slot) << "what the kernel takes as the first slot";
      ASSERT_GE(item.work.partial, 0);
      ASSERT_LT(item.work.partial, h.partials);
      ASSERT_TRUE(slots.insert(item.work.partial).second) << "slot " << item.work.partial << " is taken";
    }
    ASSERT_EQ(at, unit.range.end);
  }
  ASSERT_EQ(index, queue_items(h));
  ASSERT_EQ(static_cast<std::int32_t>(slots.size()), h.partials);
}

/// Every property of the queue for these requests.
inline void check_queue(const ScheduleParams& params, const std::vector<Request>& requests,
                        std::int32_t slack = 0) {
  const Built built(params, requests, slack);
  ASSERT_TRUE(built.guards_intact());
  check_header(built, requests, expected_units(built->params, requests));  // steps are those of full blocks
  if (::testing::Test::HasFatalFailure()) return;
  check_items(built, requests, queue_units(built->params, requests));
}

inline ScheduleParams queue_params(std::int32_t kv_heads, std::int32_t group, std::int32_t workers,
                                   std::int32_t queue_tokens = INT_MAX) {
  ScheduleParams p = make_params(kv_heads, group, 192, 7, workers, false);
  p.queue_tokens = queue_tokens;
  return p;
}

}  // namespace halftone::queue_play
