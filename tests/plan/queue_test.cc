// The queue's properties: every key of every unit exactly once, the order of the items, cuts and slots in
// bounds, and what is left to do at the end short.
//
// sanitizers: optimised
#include "plan/queue.h"

#include <functional>
#include <queue>

#include "tests/plan/queue_play.h"

namespace halftone {
namespace {

using namespace queue_play;

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

/// (KV head, first row) of all items of one request of 500 keys and three row blocks, of 128, 128 and 144
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
  const Order one_by_one = {{0, 256}, {0, 128}, {0, 0},   {1, 256}, {1, 128},
                            {1, 0},   {2, 256}, {2, 128}, {2, 0}};
  const Order pairs = {{0, 256}, {1, 256}, {0, 128}, {1, 128}, {0, 0}, {1, 0}, {2, 256}, {2, 128}, {2, 0}};
  const Order all = {{0, 256}, {1, 256}, {2, 256}, {0, 128}, {1, 128}, {2, 128}, {0, 0}, {1, 0}, {2, 0}};
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
  const Built built(queue_params(1, 1, 1000), {{1024, 64}});
  std::vector<int> rows;  // of the blocks, the last one first
  for (const QueuedItem& item : all_items(built)) rows.push_back(item.work.row_end - item.work.row_begin);
  EXPECT_EQ(rows, (std::vector<int>{192, 192, 192, 192, 128, 128}));
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
