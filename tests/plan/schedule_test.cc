// The scheduler's properties: every key exactly once, equal shares, partial slots in bounds and merged in KV
// order.
//
// sanitizers: optimised
#include "tests/plan/schedule_play.h"

#include <chrono>
#include <random>

namespace halftone {
namespace {

using namespace schedule_play;

TEST(Schedule, RandomRaggedBatches) {
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const RandomCase c = random_case(seed);
    check(c.params, c.requests, c.slack);
    if (HasFatalFailure()) return;
  }
}

TEST(Schedule, TheWorkerOfAPosition) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const RandomCase c = random_case(seed);
    const Built built(c.params, c.requests, c.slack);
    const ScheduleHeader& header = *built->header;
    for (std::int32_t w = 0; w < header.active; ++w) {
      ASSERT_EQ(worker_at(header, share_begin(header, w)), w);
      ASSERT_EQ(worker_at(header, share_begin(header, w + 1) - 1), w);
    }
  }
}

// Beside the intervals above, token by token: no (row, key) twice, and none missing that the mask shows.
TEST(Schedule, EveryVisibleKeyOfEveryRowExactlyOnce) {
  for (std::uint64_t seed = 100000; seed < 100300; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    RandomCase c = random_case(seed);
    c.params.group = std::min(c.params.group, 8);
    for (Request& r : c.requests) r.kv_len %= 400;
    const Built built(c.params, c.requests, c.slack);
    Visits visits(c);
    for (std::int32_t w = 0; w < c.params.workers; ++w) {
      WorkCursor cursor(*built, w);
      for (WorkItem item; cursor.next(item);) visits.add(item);
    }
    visits.expect_once();
    if (HasFatalFailure()) return;
  }
}

// Each request in the pass of its packed rows, and the passes together are all of them.
TEST(Schedule, TwoPassesDivideTheRequests) {
  std::int64_t both = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const RandomCase c = random_case(seed);
    for (const std::int32_t rows : {c.params.group, c.params.row_block, 4 * c.params.group}) {
      const auto [few, many] = divided(c.params, rows);
      check(few, c.requests, c.slack);
      check(many, c.requests, c.slack);
      if (HasFatalFailure()) return;
      const Built first(few, c.requests, c.slack), second(many, c.requests, c.slack),
          whole(c.params, c.requests, c.slack);
      EXPECT_EQ(first->header->units + second->header->units, whole->header->units);
      EXPECT_EQ(first->header->total_q, whole->header->total_q);
      EXPECT_EQ(second->header->total_kv, whole->header->total_kv);
      EXPECT_LE(first.max_slots(), whole.max_slots());
      both += first->header->units > 0 && second->header->units > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(both, 1000);
}

// A pass without a request of its own has nothing to do, whatever the others are.
TEST(Schedule, APassWithoutRequestsHasNoWorkers) {
  const auto [few, many] = divided(make_params(2, 4, 16, 6, 5, false), 16);
  const std::vector<Request> decode(100, {1, 500}), prompts(3, {5, 500});
  EXPECT_EQ(Built(few, prompts)->header->active, 0);
  EXPECT_EQ(Built(many, decode)->header->active, 0);
  EXPECT_EQ(Built(few, decode)->header->active, 5);
  EXPECT_EQ(Built(many, prompts)->header->active, 5);
}

TEST(Schedule, EmptyBatch) {
  const Built built(make_params(2, 4, 16, 6, 5, false), {});
  EXPECT_EQ(built->header->total_steps, 0);
  EXPECT_EQ(built->header->active, 0);
  EXPECT_EQ(built.max_slots(), 0);
  WorkItem item{};
  MergeItem merge{};
  for (std::int32_t w = 0; w < 5; ++w) {
    EXPECT_FALSE(WorkCursor(*built, w).next(item));
    EXPECT_FALSE(merge_item(*built, w, merge));
  }
}

TEST(Schedule, NoQueriesGiveNoItems) {
  const Built built(make_params(2, 4, 16, 6, 3, false), {{0, 100}, {0, 0}});
  EXPECT_EQ(built->header->total_steps, 0);
  check(make_params(2, 4, 16, 6, 3, false), {{0, 100}, {1, 70}, {0, 5}, {0, 5}, {2, 0}, {0, 9}});
}

TEST(Schedule, EmptyRequestsBetweenLongOnesGetOneItemEach) {
  const ScheduleParams params = make_params(1, 8, 16, 6, 4, false);
  const std::vector<Request> requests = {{1, 1000}, {1, 0}, {1, 1000}, {1, 0}};
  check(params, requests);
  const Built built(params, requests);
  int empty = 0;
  for (std::int32_t w = 0; w < 4; ++w) {
    WorkCursor cursor(*built, w);
    for (WorkItem item; cursor.next(item);) {
      if (item.kv_end != 0) continue;
      ++empty;
      EXPECT_EQ(item.request % 2, 1);
      EXPECT_EQ(item.partial, -1);
      EXPECT_TRUE(item.finish);
    }
  }
  EXPECT_EQ(empty, 2);
}

TEST(Schedule, MoreQueriesThanKeysCausal) {
  ScheduleParams params = make_params(2, 2, 8, 4, 3, false);
  params.window_right = 0;
  check(params, {{100, 30}, {64, 64}, {17, 0}, {30, 100}});
  params.absolute = true;
  check(params, {{100, 30}, {64, 64}, {17, 0}, {30, 100}});
}

// One unit over n workers: n parts, merged by the worker that began it.
TEST(Schedule, OneUnitInManyParts) {
  for (const std::int32_t workers : {1, 2, 3, 17, 133}) {
    const ScheduleParams params = make_params(1, 4, 16, 6, workers, false);
    const std::vector<Request> requests = {{1, 133 * 64 * 3 + 5}};
    check(params, requests);
    const Built built(params, requests);
    MergeItem merge{};
    EXPECT_EQ(merge_item(*built, 0, merge), workers > 1);
    if (workers > 1) {
      EXPECT_EQ(merge.parts, workers);
      EXPECT_EQ(merge.slot, 0);
    }
    EXPECT_EQ(built->header->partials, workers > 1 ? workers : 0);
  }
}

TEST(Schedule, MoreWorkersThanSteps) {
  for (const bool absolute : {false, true}) {
    check(make_params(2, 4, 16, 6, 65536, absolute), {{1, 200}, {1, 0}, {3, 64}});
    const Built built(make_params(1, 1, 16, 6, 65536, absolute), {{1, 200}});
    EXPECT_EQ(built->header->active, 4);
    EXPECT_LE(built.max_slots(), 12);
  }
}

// A few workers may stay idle so that equal units are cut alike: 132 workers over 32 units are 4 for each.
TEST(Schedule, FewEqualUnitsAreCutAlike) {
  const Built built(make_params(1, 8, 16, 6, 132, false), std::vector<Request>(32, {1, 8192}));
  EXPECT_EQ(built->header->active, 128);
  for (std::int32_t w = 0; w < 128; ++w) {
    WorkCursor cursor(*built, w);
    WorkItem item{};
    ASSERT_TRUE(cursor.next(item));
    EXPECT_EQ(item.request, w / 4);
    EXPECT_EQ(item.kv_end - item.kv_begin, 2048);
    EXPECT_FALSE(cursor.next(item));
  }
  // 5 units would leave 3 of 8 workers idle: all 8 share them, unless cutting them costs more than that.
  ScheduleParams params = make_params(1, 8, 16, 6, 8, false);
  EXPECT_EQ(Built(params, std::vector<Request>(5, {1, 8192}))->header->active, 8);
  params.unit_cost = 16;
  EXPECT_EQ(Built(params, std::vector<Request>(5, {1, 2048}))->header->active, 8);
  params.even_parts = true;
  EXPECT_EQ(Built(params, std::vector<Request>(5, {1, 8192}))->header->active, 8);
  EXPECT_EQ(Built(params, std::vector<Request>(5, {1, 2048}))->header->active, 5);
}

// Whatever the steps divide by: no worker has parts of two units where each unit has equally many workers.
TEST(Schedule, EqualUnitsBeginWhereSharesDo) {
  constexpr std::int32_t kStep = 64;
  std::int32_t cut = 0;
  for (std::int32_t units = 1; units <= 132; ++units) {
    for (const std::int32_t steps : {1, 3, 32, 46, 45, 128, 129}) {
      ScheduleParams params = make_params(1, 8, 16, 6, 132, false);
      params.unit_cost = 4;
      params.even_parts = steps % 2 == 0;
      const Built built(params, std::vector<Request>(static_cast<std::size_t>(units), {1, steps * kStep}));
      const std::int32_t active = built->header->active;
      if (built->header->unit_cost != 0 || active % units != 0) continue;  // parts are not equal
      cut += active > units ? 1 : 0;
      for (std::int32_t w = 0; w < active; ++w) {
        WorkCursor cursor(*built, w);
        WorkItem item{};
        ASSERT_TRUE(cursor.next(item));
        ASSERT_EQ(item.request, w / (active / units)) << units << " units of " << steps << " steps";
        ASSERT_FALSE(cursor.next(item)) << units << " units of " << steps << " steps";
      }
    }
  }
  EXPECT_GT(cut, 100);
}

// More equal units than workers: whole ones for each, if few workers stay idle for it and cutting costs more.
TEST(Schedule, ManyEqualUnitsStayWhole) {
  const auto built = [](int batch, std::int32_t unit_cost) {
    ScheduleParams params = make_params(1, 8, 16, 6, 132, false);
    params.unit_cost = unit_cost;
    return Built(params, std::vector<Request>(static_cast<std::size_t>(batch), {1, 8192}));
  };
  EXPECT_EQ(built(512, 16)->header->active, 128);
  EXPECT_EQ(built(512, 16)->header->partials, 0);
  EXPECT_EQ(built(500, 16)->header->active, 125);
  EXPECT_EQ(built(139, 16)->header->active, 132);
  EXPECT_EQ(built(512, 4)->header->active, 132);  // 4 of 132 workers would be idle for 16 steps less
  EXPECT_EQ(built(512, 0)->header->active, 132);  // cuts are free
}

// Beginning a unit has a price: no worker is left with dozens of short requests while another has one long
// part.
TEST(Schedule, ShortRequestsAreSpreadByWhatTheyCost) {
  const auto dearest = [](std::int32_t unit_cost) {
    constexpr std::int32_t kCost = 7;
    ScheduleParams params = make_params(1, 8, 16, 7, 132, false);
    params.unit_cost = unit_cost;
    std::vector<Request> requests(128, {1, 128});
    for (int i = 0; i < 64; ++i) requests[static_cast<std::size_t>(i)].kv_len = 4096;
    const Built built(params, requests);
    std::int64_t dearest = 0;
    for (std::int32_t w = 0; w < 132; ++w) {
      std::int64_t cost = 0;
      WorkCursor cursor(*built, w);
      for (WorkItem item; cursor.next(item);) cost += kCost + (item.kv_end - item.kv_begin + 127) / 128;
      dearest = std::max(dearest, cost);
    }
    return dearest;
  };
  EXPECT_GT(dearest(0), 100);
  EXPECT_LE(dearest(7), 24 + 7);  // an equal share, and a part that continues another worker's unit
}

// A request's cuts are the same alone, among neighbours and for any number of workers.
TEST(Schedule, BatchInvariantCutsDependOnTheRequestAlone) {
  const auto cuts = [](const std::vector<Request>& requests, std::int32_t request, std::int32_t workers) {
    ScheduleParams params = make_params(2, 4, 16, 8, workers, true);
    params.window_right = 0;
    params.window_left = 3000;
    const Built built(params, requests, 5000);
    std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>> all;
    for (std::int32_t w = 0; w < workers; ++w) {
      WorkCursor cursor(*built, w);
      for (WorkItem item; cursor.next(item);) {
        if (item.request == request)
          all.emplace_back(item.kv_head, item.row_begin, item.kv_begin, item.kv_end);
      }
    }
    return all;
  };
  const auto alone = cuts({{9, 5000}}, 0, 1);
  EXPECT_GT(alone.size(), 20U);
  EXPECT_EQ(alone, cuts({{9, 5000}}, 0, 7));
  EXPECT_EQ(alone, cuts({{1, 77}, {40, 900}, {9, 5000}, {1, 0}}, 2, 3));
  EXPECT_EQ(alone, cuts({{1, 9999}, {9, 5000}}, 1, 1000));
}

// The workspace of batch-invariant splits grows with the workers, not with the batch.
TEST(Schedule, BatchInvariantSlotsDoNotGrowWithTheBatch) {
  const auto slots = [](std::int32_t batch) {
    return Built(make_params(8, 4, 16, 10, 16, true),
                 std::vector<Request>(static_cast<std::size_t>(batch), {1, 32768}))
        .max_slots();
  };
  EXPECT_EQ(slots(64), slots(4096));
  EXPECT_LE(slots(4096), 16 * 32);
}

class LargeBatch : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(LargeBatch, Holds) {
  const auto [batch, absolute] = GetParam();
  std::mt19937_64 random(static_cast<std::uint64_t>(batch));
  std::vector<Request> requests(static_cast<std::size_t>(batch));
  for (Request& r : requests) {
    r.q_len = static_cast<std::int32_t>(random() % 3);
    r.kv_len = static_cast<std::int32_t>(random() % 400);
  }
  for (const std::int32_t workers : {1, 16, 132, 4096})
    check(make_params(1, 8, 16, absolute ? 8 : 6, workers, absolute), requests);
}
INSTANTIATE_TEST_SUITE_P(Schedule, LargeBatch,
                         ::testing::Combine(::testing::Values(65536, 100000), ::testing::Bool()));

TEST(Schedule, BuildingForABatchOf100000TakesMilliseconds) {
  std::vector<Request> requests(100000);
  std::mt19937_64 random(5);
  for (Request& r : requests) r = {1, static_cast<std::int32_t>(random() % 8192)};
  ScheduleParams params = make_params(8, 4, 16, 6, 132, false);
  params.window_right = 0;
  const Built built(params, requests);
  const auto start = std::chrono::steady_clock::now();
  build_schedule(*built, 7);
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  RecordProperty("milliseconds", fmt::format("{:.3f}", elapsed.count()));
  fmt::print("build_schedule, batch 100,000, 132 workers: {:.3f} ms\n", elapsed.count());
  EXPECT_GT(built->header->total_steps, 100000);
}

// Totals beyond 2^31 and the longest requests that a plan accepts.
TEST(Schedule, HugeLengths) {
  for (const bool absolute : {false, true}) {
    ScheduleParams params = make_params(8, 8, 128, 10, 257, absolute);
    const std::vector<Request> requests(5000, {1, kMaxTokens});
    const Built built(params, requests);
    EXPECT_EQ(built->header->total_steps, std::int64_t{5000} * 8 * (kMaxTokens >> 10));
    EXPECT_EQ(built->header->total_kv, std::int64_t{5000} * kMaxTokens);
    std::int64_t steps = 0;
    for (std::int32_t w = 0; w < params.workers; ++w)
      steps += share_begin(*built->header, w + 1) - share_begin(*built->header, w);
    EXPECT_EQ(steps, built->header->total_steps);
    if (absolute) continue;  // 2^35 items
    std::int64_t keys = 0;
    for (std::int32_t w = 0; w < params.workers; ++w) {
      WorkCursor cursor(*built, w);
      for (WorkItem item; cursor.next(item);) {
        ASSERT_GE(item.kv_begin, 0);
        ASSERT_LT(item.kv_begin, item.kv_end);
        keys += item.kv_end - item.kv_begin;
      }
    }
    EXPECT_EQ(keys, std::int64_t{5000} * 8 * kMaxTokens);
  }
}

// The largest window values, queries and keys at once: no sum of two of them may wrap (UBSan watches).
TEST(Schedule, ExtremeWindows) {
  for (const std::int32_t left : {-1, 0, kMaxTokens - 1}) {
    for (const std::int32_t right : {-1, 0, kMaxTokens - 1}) {
      ScheduleParams params = make_params(1, 1, 1 << 24, 10, 3, false);
      params.window_left = left;
      params.window_right = right;
      const std::vector<Request> requests = {
          {kMaxTokens, 100}, {1, kMaxTokens}, {kMaxTokens - 100, kMaxTokens - 1}};
      // cu_q would wrap for all three at once
      for (const Request& r : requests) {
        const Built built(params, {r});
        std::int64_t rows = 0;
        for (std::int32_t w = 0; w < 3; ++w) {
          WorkCursor cursor(*built, w);
          for (WorkItem item; cursor.next(item);) {
            ASSERT_LE(item.kv_end, r.kv_len);
            ASSERT_LE(0, item.kv_begin);
            if (item.kv_end == item.kv_begin ||
                item.kv_begin == row_range(params, r, item.row_begin).begin / 16 * 16 || item.kv_begin == 0) {
              rows += item.row_end - item.row_begin;
            }
          }
        }
        EXPECT_GE(rows, r.q_len);
      }
    }
  }
}

}  // namespace
}  // namespace halftone
