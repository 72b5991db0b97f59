// The queue's properties: every key of every unit exactly once, the order of the items, cuts and slots in
// bounds, and what is left to do at the end short.
#include "plan/queue.h"

#include <algorithm>
#include <climits>
#include <functional>
#include <queue>
#include <set>

#include "tests/plan/schedule_play.h"

namespace halftone {
namespace {

using namespace schedule_play;

/// A random_case() for a queue, with the requests of one of two passes or all.
RandomCase queue_case(std::uint64_t seed) {
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

QueuedItem item_of(const Built& built, std::int64_t index) {
  QueuedItem item{};
  item.parts = queue_item(*built, index, item.work);
  return item;
}

std::vector<QueuedItem> all_items(const Built& built) {
  std::vector<QueuedItem> items;
  for (std::int64_t i = 0; i < queue_items(*built->header); ++i) items.push_back(item_of(built, i));
  return items;
}

UnitKey unit_of(const WorkItem& item) { return {item.request, item.kv_head, item.row_begin}; }

/// Where the row blocks of a request begin, and behind the last one where it ends: groups of 64 rows are
/// dealt to as many blocks as hold them, with a mask from the last one on.
std::vector<std::int32_t> block_rows(const ScheduleParams& p, std::int32_t rows) {
  const std::int32_t each = p.row_block % 64 == 0 ? 64 : p.row_block;
  std::vector<std::int32_t> sizes(static_cast<std::size_t>((rows + p.row_block - 1) / p.row_block));
  for (std::int32_t first = 0, i = 0; first < rows; first += each, ++i) {
    sizes[static_cast<std::size_t>(i) % sizes.size()] += each;
  }
  if (p.window_left >= 0 || p.window_right >= 0) std::reverse(sizes.begin(), sizes.end());
  std::vector<std::int32_t> begins = {0};
  for (const std::int32_t size : sizes) begins.push_back(std::min(rows, begins.back() + size));
  return begins;
}

/// expected_units(), in these blocks.
std::map<UnitKey, Unit> queue_units(const ScheduleParams& p, const std::vector<Request>& requests) {
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
std::vector<UnitKey> expected_order(const ScheduleParams& p, const std::vector<Request>& requests) {
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

std::int64_t steps_in(const ScheduleParams& p, const KvRange& range) {
  return range.end == 0 ? 1 : ((range.end - 1) >> p.step_log2) - (range.begin >> p.step_log2) + 1;
}

void check_header(const Built& built, const std::vector<Request>& requests,
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
void check_items(const Built& built, const std::vector<Request>& requests,
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
void check_queue(const ScheduleParams& params, const std::vector<Request>& requests, std::int32_t slack = 0) {
  const Built built(params, requests, slack);
  ASSERT_TRUE(built.guards_intact());
  check_header(built, requests, expected_units(built->params, requests));  // steps are those of full blocks
  if (::testing::Test::HasFatalFailure()) return;
  check_items(built, requests, queue_units(built->params, requests));
}

ScheduleParams queue_params(std::int32_t kv_heads, std::int32_t group, std::int32_t workers,
                            std::int32_t queue_tokens = INT_MAX) {
  ScheduleParams p = make_params(kv_heads, group, 192, 7, workers, false);
  p.queue_tokens = queue_tokens;
  return p;
}

TEST(Queue, RandomRaggedBatches) {
  int cut = 0, whole = 0, windows_cut = 0;
  for (std::uint64_t seed = 0; seed < 8000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const RandomCase c = queue_case(seed);
    check_queue(c.params, c.requests, c.slack);
    if (HasFatalFailure()) return;
    const Built built(c.params, c.requests, c.slack);
    const bool windows = c.params.window_left >= 0 || c.params.window_right >= 0;
    cut += built->header->cut_units > 0 ? 1 : 0;
    windows_cut += windows && built->header->cut_units > 0 ? 1 : 0;
    whole += !c.params.absolute && built->header->units > 0 && built->header->cut_units == 0 ? 1 : 0;
  }
  EXPECT_GT(cut, 500);
  EXPECT_GT(windows_cut, 100);
  EXPECT_GT(whole, 500);
}

/// Token by token: no (row, key) twice, and none missing that the mask shows.
TEST(Queue, EveryVisibleKeyOfEveryRowExactlyOnce) {
  for (std::uint64_t seed = 100000; seed < 100400; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    RandomCase c = queue_case(seed);
    c.params.group = std::min(c.params.group, 8);
    c.params.min_rows = 0, c.params.max_rows = INT_MAX;
    for (Request& r : c.requests) r.kv_len %= 400;
    const Built built(c.params, c.requests, c.slack);
    Visits visits(c);
    for (const QueuedItem& item : all_items(built)) visits.add(item.work);
    visits.expect_once();
    if (HasFatalFailure()) return;
  }
}

/// Where the keys of each request stand that the pass stages, one request after the other, from multiples of
/// what the kernel wants on.
TEST(Queue, StagedKeysFollowOneAnother) {
  int with_keys = 0, without = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    RandomCase c = queue_case(seed);
    const std::int32_t each = c.params.staged_tokens = seed % 3 == 0 ? 16 : 1;
    const Built built(c.params, c.requests, c.slack, true);
    ASSERT_TRUE(built.guards_intact());
    std::int32_t before = 0;
    for (std::size_t r = 0; r < c.requests.size(); ++r) {
      const std::int32_t rows = c.requests[r].q_len * c.params.group;
      const bool served = rows > 0 && rows >= c.params.min_rows && rows <= c.params.max_rows;
      ASSERT_EQ(built->cu_kv[r], before) << "request " << r;
      ASSERT_EQ(built->staged[r], served ? c.requests[r].kv_len : 0) << "request " << r;
      ASSERT_EQ(built->kv_lengths[r], c.requests[r].kv_len) << "request " << r;
      before += (built->staged[r] + each - 1) / each * each;
      (served ? with_keys : without) += c.requests[r].kv_len > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(with_keys, 1000);
  EXPECT_GT(without, 500);
  EXPECT_EQ(Built(queue_params(1, 1, 3), {{5, 9}})->staged, nullptr);
}

TEST(Queue, StagedKeysBeyondInt32) {
  const Built built(queue_params(1, 1, 3), {{1, kMaxTokens}, {1, kMaxTokens}, {1, kMaxTokens}, {1, 5}}, 0,
                    true);
  EXPECT_EQ(built->cu_kv[1], kMaxTokens);
  for (const int r : {2, 3}) EXPECT_EQ(built->cu_kv[r], INT_MAX) << "as near as can be, never negative";
  EXPECT_EQ(built->staged[2], kMaxTokens);
  EXPECT_EQ(built->header->total_kv, 3 * std::int64_t{kMaxTokens} + 5);
}

/// (KV head, first row) of all items of one request of 500 keys and three row blocks, of 192, 128 and 80
/// rows.
std::vector<std::pair<int, int>> order_of(std::int32_t queue_tokens, std::int32_t queue_heads = 1) {
  ScheduleParams params = queue_params(3, 1, 1000, queue_tokens);
  params.queue_heads = queue_heads;
  const Built built(params, {{400, 500}});
  std::vector<std::pair<int, int>> order;
  for (const QueuedItem& item : all_items(built)) {
    const std::pair unit{item.work.kv_head, item.work.row_begin};
    if (order.empty() || order.back() != unit) order.push_back(unit);
  }
  return order;
}

TEST(Queue, LastRowBlocksFirstOfAsManyHeadsAsFit) {
  using Order = std::vector<std::pair<int, int>>;
  const Order one_by_one = {{0, 320}, {0, 192}, {0, 0},   {1, 320}, {1, 192},
                            {1, 0},   {2, 320}, {2, 192}, {2, 0}};
  const Order pairs = {{0, 320}, {1, 320}, {0, 192}, {1, 192}, {0, 0}, {1, 0}, {2, 320}, {2, 192}, {2, 0}};
  const Order all = {{0, 320}, {1, 320}, {2, 320}, {0, 192}, {1, 192}, {2, 192}, {0, 0}, {1, 0}, {2, 0}};
  for (const std::int32_t tokens : {1, 500, 999}) EXPECT_EQ(order_of(tokens), one_by_one) << tokens;
  for (const std::int32_t tokens : {1000, 1499}) EXPECT_EQ(order_of(tokens), pairs) << tokens;
  for (const std::int32_t tokens : {1500, 100000, INT_MAX}) EXPECT_EQ(order_of(tokens), all) << tokens;
  EXPECT_EQ(order_of(1, 2), pairs);
  for (const int heads : {3, 4, INT_MAX}) EXPECT_EQ(order_of(1, heads), all) << heads;
  EXPECT_EQ(order_of(1000, 1), pairs);
}

TEST(Queue, WhereUnitsDifferEightWorkersHaveAHead) {
  ScheduleParams params = queue_params(3, 1, 132);
  EXPECT_EQ(least_queue_heads(params), 1);
  params.window_right = 0;
  EXPECT_EQ(least_queue_heads(params), 16);
  params.window_right = -1, params.window_left = 100;
  EXPECT_EQ(least_queue_heads(params), 16);
  params.workers = 7;
  EXPECT_EQ(least_queue_heads(params), 1);
}

/// The last chunk of a long prompt: 40 units for 16 workers, which would be busy for three rounds instead of
/// two and a half.
TEST(Queue, UnitsThatAMaskLeavesNearlyAlikeAreCut) {
  ScheduleParams params = queue_params(10, 1, 16);
  params.window_right = 0;
  params.max_q_len = 768;
  const auto cut_units = [&](std::int32_t keys) { return Built(params, {{768, keys}})->header->cut_units; };
  EXPECT_EQ(cut_units(3000), 0) << "a quarter of the mean is less than what may be hidden";
  EXPECT_EQ(cut_units(32768), 40 % 16);
  check_queue(params, {{768, 32768}});
  params.window_left = 20000;
  EXPECT_EQ(cut_units(32768), 0);
}

/// 1,024 rows are 16 groups of 64, which six blocks of up to three share.
TEST(Queue, RowBlocksAreAsEqualAsGroupsAllow) {
  ScheduleParams params = queue_params(1, 1, 1000);
  const auto rows = [&] {  // of the blocks, the last one first
    std::vector<int> all;
    const Built built(params, {{1024, 64}});
    for (const QueuedItem& item : all_items(built)) all.push_back(item.work.row_end - item.work.row_begin);
    return all;
  };
  EXPECT_EQ(rows(), (std::vector<int>{128, 128, 192, 192, 192, 192}));
  params.window_right = 0;
  EXPECT_EQ(rows(), (std::vector<int>{192, 192, 192, 192, 128, 128}));
}

TEST(Queue, RequestsWithoutKeysHaveAnItemAndThoseWithoutQueriesNone) {
  const std::vector<Request> requests = {{0, 100}, {5, 0}, {0, 0}, {3, 40}, {7, 0}, {0, 9}};
  for (const bool causal : {false, true}) {
    ScheduleParams params = queue_params(2, 1, 3);
    params.window_right = causal ? 0 : -1;
    check_queue(params, requests);
    const Built built(params, requests);
    ASSERT_EQ(built->header->units, 6);
    for (const QueuedItem& item : all_items(built)) {
      const bool empty = item.work.kv_end == item.work.kv_begin;
      EXPECT_EQ(empty, requests[static_cast<std::size_t>(item.work.request)].kv_len == 0);
    }
  }
  check_queue(queue_params(2, 1, 3), {{0, 100}, {0, 0}});
  check_queue(queue_params(2, 1, 3), {});
  EXPECT_EQ(queue_items(*Built(queue_params(2, 1, 3), {})->header), 0);
}

/// When the last worker is done, if each item takes as long as its steps and everyone takes the next one.
std::int64_t time_of(const Built& built) {
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free;
  for (std::int32_t w = 0; w < built->params.workers; ++w) free.push(0);
  std::int64_t end = 0;
  for (const QueuedItem& item : all_items(built)) {
    const std::int64_t done = free.top() + (item.work.kv_end - item.work.kv_begin + 127) / 128;
    free.pop();
    free.push(done);
    end = std::max(end, done);
  }
  return end;
}

/// Where units are alike, or few, no worker waits for others while there are keys to share.
TEST(Queue, TheLastUnitsAreShared) {
  constexpr std::int32_t kWorkers = 132, kSteps = 64;
  const auto alike = [](std::size_t batch) {
    return Built(queue_params(1, 1, kWorkers), std::vector<Request>(batch, {192, kSteps * 128}));
  };
  for (const std::size_t batch : {1U, 2U, 40U, 133U, 150U, 265U, 300U}) {
    const Built built = alike(batch);
    const auto ideal = static_cast<double>(batch * kSteps) / kWorkers;
    EXPECT_LE(static_cast<double>(time_of(built)), 1.25 * ideal + 3) << batch << " equal units";
    EXPECT_GT(built->header->cut_units, 0) << batch;
  }
  for (const std::size_t batch : {100U, 131U, 132U, 263U, 264U}) {  // cutting costs more than it gains
    const Built built = alike(batch);
    EXPECT_EQ(time_of(built), (batch + kWorkers - 1) / kWorkers * kSteps) << batch;
    EXPECT_EQ(built->header->cut_units, 0) << batch;
  }
  ScheduleParams causal = queue_params(1, 1, kWorkers);
  causal.window_right = 0;
  for (const std::int32_t queries : {192, 1024, 8192}) {  // 1, 6 and 43 units
    const Built built(causal, {{queries, 16384}});
    EXPECT_GT(built->header->cut_units, 0);
    const double ideal = static_cast<double>(built->header->total_steps) / kWorkers;
    EXPECT_LE(static_cast<double>(time_of(built)), 1.5 * ideal + 3) << queries;
  }
  // Many units of different lengths: the short ones at the end even out what the long ones left.
  causal.kv_heads = 8;
  const Built many(causal, {{8192, 8192}});
  EXPECT_EQ(many->header->cut_units, 0);
  const double ideal = static_cast<double>(many->header->total_steps) / kWorkers;
  EXPECT_LE(static_cast<double>(time_of(many)), 1.25 * ideal);
}

/// A request's items are the same alone, among neighbours and for any number of workers.
TEST(Queue, AbsoluteItemsDependOnTheRequestAlone) {
  const auto items = [](const std::vector<Request>& requests, std::int32_t request, std::int32_t workers) {
    ScheduleParams params = queue_params(2, 4, workers, 10000);
    params.absolute = true;
    params.window_right = 0;
    const Built built(params, requests, 5000);
    std::vector<std::tuple<int, int, int, int, int, int>> all;
    for (const QueuedItem& item : all_items(built)) {
      const WorkItem& w = item.work;
      if (w.request == request) {
        all.emplace_back(w.kv_head, w.row_begin, w.row_end, w.kv_begin, w.kv_end, w.partial);
      }
    }
    return all;
  };
  const auto alone = items({{100, 5000}}, 0, 1);
  ASSERT_EQ(alone.size(), 6U);
  EXPECT_EQ(alone, items({{100, 5000}}, 0, 132));
  EXPECT_EQ(alone, items({{1, 77}, {40, 900}, {100, 5000}, {1, 0}}, 2, 3));
}

/// The longest requests that a plan accepts, and more units than fit into 32 bits.
TEST(Queue, HugeLengths) {
  for (const bool causal : {false, true}) {
    ScheduleParams params = queue_params(64, 1, 257);
    params.window_right = causal ? 0 : -1;
    params.row_block = 1 << 20;
    const Request longest{kMaxTokens - 1, kMaxTokens};
    check_queue(queue_params(8, 1, 257), {{1, kMaxTokens}, {1, kMaxTokens}, {1, kMaxTokens}});
    const Built built(params, {longest});
    EXPECT_EQ(built->header->units, 64 * 1024);
    for (const std::int64_t index : {std::int64_t{0}, std::int64_t{1}, queue_items(*built->header) - 1}) {
      const WorkItem item = item_of(built, index).work;
      EXPECT_LE(0, item.kv_begin);
      EXPECT_LE(item.kv_begin, item.kv_end);
      EXPECT_LE(item.kv_end, longest.kv_len);
      EXPECT_LT(item.row_begin, item.row_end);
      EXPECT_LE(item.row_end, longest.q_len);
    }
  }
  ScheduleParams params = queue_params(100000, 1, 132);
  params.row_block = 1;
  params.window_right = 0;
  const std::vector<Request> requests(3000, {100, 100});
  const Built built(params, requests);
  ASSERT_EQ(built->header->units, std::int64_t{3000} * 100 * 100000);
  const WorkItem last = item_of(built, queue_items(*built->header) - 1).work;
  EXPECT_EQ(unit_of(last), (UnitKey{2999, 99999, 0}));
  EXPECT_EQ(unit_of(item_of(built, 0).work), (UnitKey{0, 0, 99}));
}

}  // namespace
}  // namespace halftone
