// The schedule that the device builds is the host's, field by field.
#include "tests/cuda/device_schedule.h"

namespace halftone::testing {
namespace {

/// Both kinds of splits, with and without the cost of a unit, windows, empty requests.
TEST(DeviceSchedule, RandomRaggedBatches) {
  int absolute = 0, with_cost = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = schedule_play::random_case(seed);
    absolute += c.params.absolute ? 1 : 0;
    with_cost += c.params.unit_cost > 0 ? 1 : 0;
    expect_same_schedule(c.params, c.requests, c.slack);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(absolute, 200);
  EXPECT_GT(with_cost, 100);
}

/// More requests than the kernel has threads.
TEST(DeviceSchedule, LargeBatches) {
  for (const int batch : {1023, 1024, 1025, 5000, 100000}) {
    for (const bool absolute : {false, true}) {
      for (const std::int32_t unit_cost : {0, 7}) {
        if (absolute && unit_cost > 0) continue;
        SCOPED_TRACE(std::to_string(batch) + (absolute ? ", absolute" : ", tiles"));
        Random random(static_cast<std::uint64_t>(batch));
        std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch));
        for (schedule_play::Request& r : requests) {
          r.q_len = static_cast<std::int32_t>(random.integer(0, 3));
          r.kv_len = static_cast<std::int32_t>(random.integer(0, 400));
        }
        ScheduleParams params = make_params(2, 8, 16, absolute ? 8 : 6, 132, absolute);
        params.unit_cost = unit_cost;
        params.window_right = batch % 2 == 0 ? 0 : -1;
        expect_same_schedule(params, requests, 0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(DeviceSchedule, TwoPasses) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = schedule_play::random_case(seed);
    for (const std::int32_t rows : {c.params.group, 4 * c.params.group}) {
      expect_same_passes(c.params, rows, c.requests, c.slack);
      if (HasFatalFailure()) return;
    }
  }
  for (const int batch : {1024, 1025, 3000}) {
    Random random(static_cast<std::uint64_t>(batch));
    std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch));
    for (schedule_play::Request& r : requests) {
      r.q_len = static_cast<std::int32_t>(random.chance(0.1) ? random.integer(2, 300) : random.integer(0, 1));
      r.kv_len = static_cast<std::int32_t>(random.integer(0, 1000));
    }
    for (const std::int32_t unit_cost : {0, 7}) {
      ScheduleParams params = make_params(2, 8, 64, 7, 132, false);
      params.unit_cost = unit_cost;
      expect_same_passes(params, 8, requests, 0);
      if (HasFatalFailure()) return;
    }
  }
}

/// Equal requests: units stay whole or are cut alike, and cu_q may be absent.
TEST(DeviceSchedule, EqualRequests) {
  for (const int batch : {1, 3, 32, 131, 132, 133, 500, 512, 2048}) {
    for (const std::int32_t unit_cost : {0, 4}) {
      for (const bool with_cu_q : {false, true}) {
        SCOPED_TRACE("batch " + std::to_string(batch));
        ScheduleParams params = make_params(1, 8, 16, 7, 132, false);
        params.unit_cost = unit_cost;
        const std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch), {2, 8192});
        expect_same_schedule(params, requests, 0, {.cu_q = with_cu_q});
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// Queues over pages, over plain K and V and over staged ones, with and without cuts.
TEST(DeviceSchedule, QueuesOfRandomRaggedBatches) {
  int cut = 0, absolute = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomCase c = schedule_play::random_case(seed);
    c.params.unit_cost = 0;
    c.params.queue_tokens = seed % 3 == 0 ? 1 : 2000;
    c.params.queue_heads = static_cast<std::int32_t>(1 + seed % 7 / 3);
    if (seed % 2 == 0) c.params.step_log2 = 4;
    if (seed % 4 != 0) c.params.absolute = false;
    c.params.staged_tokens = seed % 5 == 0 ? 16 : 1;
    const Built host(c.params, c.requests, c.slack);
    cut += host->header->cut_units > 0 ? 1 : 0;
    absolute += c.params.absolute ? 1 : 0;
    for (const Given given : {Given{}, Given{.cu_kv = true}, Given{.staged = true}}) {
      expect_same_schedule(c.params, c.requests, c.slack, given);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(cut, 10);
  EXPECT_GT(absolute, 50);
}

/// More requests than the kernel has threads; equal ones, of which the last are cut.
TEST(DeviceSchedule, QueuesOfLargeAndEqualBatches) {
  for (const int batch : {1, 3, 131, 133, 1023, 1024, 1025, 5000, 100000}) {
    for (const bool equal : {false, true}) {
      for (const bool plain : {false, true}) {
        SCOPED_TRACE(std::to_string(batch) + (equal ? ", equal" : ", ragged") + (plain ? ", plain" : ""));
        Random random(static_cast<std::uint64_t>(batch));
        std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch));
        for (schedule_play::Request& r : requests) {
          r.q_len = equal ? 5 : static_cast<std::int32_t>(random.integer(0, 300));
          r.kv_len = equal ? 4000 : static_cast<std::int32_t>(random.integer(0, 400));
        }
        ScheduleParams params = make_params(2, 4, 192, 7, 132, false);
        params.queue_tokens = 10000;
        params.window_right = equal ? -1 : 0;
        expect_same_schedule(params, requests, 0, {.cu_q = !equal, .cu_kv = plain, .staged = !plain});
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// Units that a causal mask leaves nearly alike, of which the last ones are cut.
TEST(DeviceSchedule, ALastChunk) {
  ScheduleParams params = make_params(10, 1, 192, 7, 16, false);
  params.queue_tokens = 100'000;
  params.window_right = 0;
  const std::vector<schedule_play::Request> requests{{768, 32768}};
  EXPECT_GT(Built(params, requests)->header->cut_units, 0);
  expect_same_schedule(params, requests, 0, {});
}

/// A line for short requests beside a queue for the others, in one launch.
TEST(DeviceSchedule, ALineAndAQueue) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = schedule_play::random_case(seed);
    auto [few, many] = divided(c.params, 4 * c.params.group);
    many.queue_tokens = 3000;
    many.unit_cost = 0;
    const bool staged = seed % 2 == 0;
    const Built line(few, c.requests, c.slack), queue(many, c.requests, c.slack, staged);
    const DeviceBuilt device({&line, &queue}, c.requests, {.staged = staged});
    ASSERT_TRUE(device.guards_intact());
    expect_same_pass(line, device.pass(0));
    expect_same_pass(queue, device.pass(1));
    if (HasFatalFailure()) return;
  }
}

/// Totals beyond 2^31.
TEST(DeviceSchedule, HugeLengths) {
  for (const std::int32_t unit_cost : {0, 40}) {
    ScheduleParams params = make_params(8, 8, 128, 10, 257, false);
    params.unit_cost = unit_cost;
    std::vector<schedule_play::Request> requests(3000, {1, kMaxTokens});
    requests[17] = {1, 1};
    expect_same_schedule(params, requests, 0);
    params.unit_cost = 0;
    params.queue_tokens = 3000;
    expect_same_schedule(params, requests, 0, {.staged = true});
  }
}

std::vector<schedule_play::Request> random_requests(int batch, std::int32_t max_q, std::int32_t max_kv) {
  Random random(static_cast<std::uint64_t>(batch));
  std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch));
  for (schedule_play::Request& r : requests) {
    r.q_len = static_cast<std::int32_t>(random.integer(0, max_q));
    r.kv_len = static_cast<std::int32_t>(random.integer(0, max_kv));
  }
  requests[0] = {max_q, max_kv};
  return requests;
}

/// What the kernel for small batches just takes and what it just does not, in every kind of schedule.
void expect_same_of_every_kind(int batch, std::int32_t workers, bool small) {
  SCOPED_TRACE(std::to_string(batch) + " requests, " + std::to_string(workers) + " workers");
  const std::vector<schedule_play::Request> requests = random_requests(batch, 3, 400);
  for (const bool absolute : {false, true}) {
    for (const bool window : {false, true}) {
      for (const bool equal : {false, true}) {
        SCOPED_TRACE(fmt::format("absolute {}, window {}, equal {}", absolute, window, equal));
        ScheduleParams params = make_params(2, 8, 16, absolute ? 8 : 6, workers, absolute);
        params.unit_cost = absolute ? 0 : 3;
        params.even_parts = true;
        if (window) params.window_left = 100, params.window_right = 0;
        const std::vector<schedule_play::Request> alike(requests.size(), {3, 400});
        expect_same_schedule(params, equal ? alike : requests, 0, {.cu_q = !equal, .small = small});
        if (::testing::Test::HasFatalFailure()) return;
        if (!absolute && !equal) expect_same_passes(params, 8, requests, 0, small);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(DeviceSchedule, LimitsOfSmallBatches) {
  for (const int batch : {2047, 2048, 2049}) expect_same_of_every_kind(batch, 132, batch <= 2048);
  for (const std::int32_t workers : {254, 255, 256}) {
    for (const int batch : {7, 300}) expect_same_of_every_kind(batch, workers, workers <= 255);
  }
  expect_same_of_every_kind(2048, 255, true);
}

/// Positions times workers + 1, and tokens together, on both sides of 2^31.
TEST(DeviceSchedule, NumbersOfSmallBatches) {
  constexpr std::int32_t kStep = 16;
  struct Case {
    std::int32_t workers, batch, unit_cost, kv_len;
    bool small;
  };
  const Case cases[] = {
      {255, 1, 0, 8388607 * kStep, true}, {255, 1, 0, 8388608 * kStep, false},
      {255, 1, 7, 8388600 * kStep, true}, {255, 1, 7, 8388601 * kStep, false},
      {15, 4, 3, 33554428 * kStep, true}, {15, 4, 3, 33554429 * kStep, false},
      {1, 2, 0, kMaxTokens - 1, true},    {1, 2, 0, kMaxTokens, false},
      {3, 3, 0, INT32_MAX / 3, true},     {3, 3, 0, INT32_MAX / 3 + 1, false},
      {7, 2048, 3, 1048575, true},        {7, 2048, 3, 1048576, false},
  };
  for (const Case& c : cases) {
    for (const bool equal : {false, true}) {
      for (const bool window : {false, true}) {
        SCOPED_TRACE(fmt::format("{} workers, {} x {}, equal {}, window {}", c.workers, c.batch, c.kv_len,
                                 equal, window));
        ScheduleParams params = make_params(1, 1, 16, 4, c.workers, false);
        params.unit_cost = c.unit_cost;
        if (window) params.window_left = std::min(c.kv_len, kMaxTokens - 1);
        std::vector<schedule_play::Request> requests(static_cast<std::size_t>(c.batch), {1, c.kv_len});
        if (!equal && c.batch > 1) requests.back().kv_len -= 1000;
        expect_same_schedule(params, requests, 0, {.small = c.small});
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// One list and two, with counts and without, of fewer queries than the plan has.
TEST(DeviceSchedule, Lists) {
  for (const std::int32_t queries : {1, 100, 2048, 2049}) {
    for (const std::int32_t extra : {0, 500}) {
      for (const bool counts : {false, true}) {
        SCOPED_TRACE(fmt::format("{} queries, extra {}, counts {}", queries, extra, counts));
        Lists lists{.top_k = 700, .extra_top_k = extra, .live = std::max(1, queries - 5)};
        Random random(static_cast<std::uint64_t>(queries));
        for (std::int32_t i = 0; counts && i < queries - 2; ++i) {
          lists.counts.push_back(static_cast<std::int32_t>(random.integer(-1, 800)));
          if (extra > 0) lists.extra_counts.push_back(static_cast<std::int32_t>(random.integer(-1, 600)));
        }
        std::vector<schedule_play::Request> requests;
        for (std::int32_t r = 0; r < queries; ++r) requests.push_back(lists.request(r));
        ScheduleParams params = make_params(1, 16, 16, 6, 132, false);
        params.unit_cost = 3;
        expect_same_schedule(params, requests, 100, {.lists = &lists, .small = queries <= 2048});
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// Queues, staged keys and plain K and V are the other kernel's.
TEST(DeviceSchedule, WhatIsNoSmallBatch) {
  const std::vector<schedule_play::Request> requests(5, {1, 1000});
  ScheduleParams params = make_params(2, 8, 16, 6, 132, false);
  expect_same_schedule(params, requests, 0, {.small = true});
  expect_same_schedule(params, requests, 0, {.cu_kv = true, .small = false});
  params.queue_tokens = 3000;
  expect_same_schedule(params, requests, 0, {.small = false});
  expect_same_schedule(params, requests, 0, {.staged = true, .small = false});
}

}  // namespace
}  // namespace halftone::testing
