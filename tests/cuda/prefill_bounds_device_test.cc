// What prefill's caller may get wrong, or change between replays: addresses, lengths and tables.
#include <algorithm>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "format/status.h"
#include "tests/attention/prefill_cases.h"
#include "tests/cuda/bounds_checks.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

class DevicePrefillBounds : public ::testing::Test {
 protected:
  /// Whether prefill serves the problem: not in a build of other head_dims.
  bool has_prefill(const Problem& p) {
    const bool has = cuda_runner().serves(p) && plan_on_device(p).info().config.starts_with("sm90-prefill");
    served_ += has ? 1 : 0;
    return has;
  }
  void TearDown() override { EXPECT_GT(served_, 0) << "no kernel of prefill is in this build"; }

 private:
  int served_ = 0;
};

/// The rows of prefill_cases(), plain or in pages.
std::vector<AttentionCase> cases_of(bool plain, const std::vector<Request>& requests) {
  std::vector<AttentionCase> rows;
  for (const AttentionCase& row : prefill_cases(requests)) {
    if (row.plain.has_value() == plain) rows.push_back(row);
  }
  return rows;
}

/// The bytes of a tensor `shift` bytes past where an allocation begins.
DeviceMemory& shifted(std::list<DeviceMemory>& memory, const Tensor& host, std::size_t shift) {
  DeviceMemory& place = memory.emplace_back(host.bytes().size() + 16);
  check_cuda(
      cudaMemcpy(place.data() + shift, host.bytes().data(), host.bytes().size(), cudaMemcpyHostToDevice));
  return place;
}

TEST_F(DevicePrefillBounds, MisalignedQGivesTheSameBits) {
  for (const bool plain : {true, false}) {
    for (AttentionCase row : cases_of(plain, {{130, 200}, {64, 64}, {1, 9}})) {
      for (const int group : {1, 3, 8}) {
        row.q_heads = group * row.kv_heads;
        const Problem p = make_problem(row);
        if (!has_prefill(p)) continue;
        const Plan plan = plan_on_device(p);
        const Outputs expected = run_on_device(p, plan);
        for (const std::size_t shift : {2U, 8U, 14U}) {
          std::list<DeviceMemory> memory;
          DeviceRun device(p, plan);
          device.args.q.data = shifted(memory, p.q, shift).data() + shift;
          device.schedule();
          device.run();
          expect_same_bits(expected, device.outputs(), row.name + ", " + std::to_string(shift));
        }
      }
    }
  }
}

/// Refused before any work; then the same arguments, mended, work.
TEST_F(DevicePrefillBounds, MisalignedKeysAndValuesAreRefused) {
  for (const AttentionCase& row : cases_of(true, {{130, 200}, {1, 9}})) {
    const Problem p = make_problem(row);
    if (!has_prefill(p)) continue;
    const Plan plan = plan_on_device(p);
    DeviceRun device(p, plan);
    const AttentionArgs good = device.args;
    device.schedule();
    const auto refuses = [&](std::initializer_list<std::string_view> words, const auto& change) {
      device.args = good;
      change(device.args, tensors_of(device.args));
      expect_error(kInvalidArgument, words, [&] { device.run(); });
      device.args = good;  // outputs() reads where they say
      const Outputs outputs = device.outputs();
      EXPECT_TRUE(untouched(outputs.out) && untouched(outputs.lse)) << row.name;
    };
    const auto moved = [](TensorView& t, int bytes) { t.data = static_cast<std::uint8_t*>(t.data) + bytes; };
    using Args = AttentionArgs&;
    using Views = KvTensorViews&;
    refuses({"k starts 2 bytes past a multiple of 16", "aligned buffer"},
            [&](Args, Views kv) { moved(kv.k, 2); });
    refuses({"v starts 8 bytes past a multiple of 16"}, [&](Args, Views kv) { moved(kv.v, 8); });
    refuses({"k starts 0 bytes", "with strides", "multiples of 8"},
            [](Args, Views kv) { kv.k.strides[0] -= 4; });
    refuses({"v starts 0 bytes", "with strides"}, [](Args, Views kv) { kv.v.strides[1] += 1; });
    refuses({"k starts 0 bytes", "none of them shared"}, [](Args, Views kv) { kv.k.strides[1] = 0; });
    refuses({"out starts 2 bytes past a multiple of 8"}, [&](Args args, Views) { moved(args.out, 2); });
    device.run();
    expect_same_bits(run_on_device(p, plan), device.outputs(), row.name);
  }
}

/// No key at all, and none in the tensors.
TEST_F(DevicePrefillBounds, NoKeysGiveZeros) {
  for (const bool plain : {true, false}) {
    for (const AttentionCase& row : cases_of(plain, {{130, 0}, {0, 0}, {70, 0}})) {
      const Problem p = make_problem(row);
      if (!has_prefill(p)) continue;
      const Outputs outputs = run_on_device(p);
      expect_empty_rows(p, outputs, 0, 200);
      EXPECT_EQ(status_of(outputs), 0) << row.name;
    }
  }
}

/// cu_q counts more queries than q, out and lse have rows.
/// With one worker items follow each other: of 35 rows, warpgroups without any pass tiles that the five of
/// the second request's first unit do not see.
TEST_F(DevicePrefillBounds, MoreQueriesThanRows) {
  for (const bool plain : {true, false}) {
    for (AttentionCase row : cases_of(plain, {{30, 70}, {200, 333}, {40, 129}})) {
      for (const auto& [group, workers] : {std::pair{1, 0}, {3, 0}, {1, 1}}) {
        row.q_heads = group * row.kv_heads;
        row.workers = workers;
        const Problem p = make_problem(row);
        if (!has_prefill(p)) continue;
        const Plan plan = plan_on_device(p);
        const Outputs expected = run_on_device(p, plan);
        EXPECT_EQ(status_of(expected), 0) << row.name;
        for (const std::int64_t rows : {1, 29, 30, 35, 94, 229, 231, 269}) {
          expect_bounded_queries(p, plan, expected, rows);
        }
      }
    }
  }
}

/// `p`, plain, with the first `rows` tokens of its K and V.
Problem with_first_tokens(const Problem& p, std::int64_t rows) {
  AttentionCase row = p.row;
  const std::vector<std::int64_t> first = first_tokens(row);
  for (std::size_t r = 0; r < row.requests.size(); ++r) {
    row.requests[r].kv_len =
        static_cast<int>(std::clamp<std::int64_t>(rows - first[r], 0, row.requests[r].kv_len));
  }
  Problem twin = make_problem(row);
  twin.q = p.q.clone();
  twin.k = Tensor::of(*row.plain, {rows, row.kv_heads, row.head_dim}, floats_of_rows(p.k, 0, rows));
  twin.v = Tensor::of(*row.plain, {rows, row.kv_heads, p.v.shape()[2]}, floats_of_rows(p.v, 0, rows));
  return twin;
}

/// cu_kv counts more keys than k and v have rows: tokens beyond are left out, and never read, for what lies
/// there is NaN. Without a mask that is the same as not having them.
TEST_F(DevicePrefillBounds, MoreKeysThanRows) {
  for (AttentionCase row : cases_of(true, {{70, 100}, {33, 90}, {0, 10}, {200, 400}})) {
    row.mask = {};
    const Problem p = make_problem(row);
    if (!has_prefill(p)) continue;
    const Plan plan = plan_on_device(p);
    const std::int64_t all = p.k.shape()[0];
    for (const std::int64_t rows : {0, 1, 50, 99, 100, 101, 195, 200, 201, 280, 599}) {
      SCOPED_TRACE(row.name + ", " + std::to_string(rows) + " rows");
      const Problem twin = with_first_tokens(p, rows);
      DeviceRun device(p, plan);
      KvTensorViews& kv = tensors_of(device.args);
      const Tensor k = p.k.clone(), v = p.v.clone();
      poison_rows(k, rows, all);
      poison_rows(v, rows, all);
      device.write(kv.k, k);
      device.write(kv.v, v);
      kv.k.shape[0] = kv.v.shape[0] = rows;
      device.schedule();
      device.run();
      const Outputs outputs = device.outputs();
      EXPECT_EQ(status_of(outputs), kStatusBadKeys);
      EXPECT_EQ(judge_device(twin, outputs), "");
    }
    DeviceRun exact(p, plan);
    exact.schedule();
    exact.run();
    EXPECT_EQ(status_of(exact.outputs()), 0) << row.name;
  }
}

/// k and v with rows behind the last request's: nobody's, and NaN.
TEST_F(DevicePrefillBounds, RowsBehindTheLastRequest) {
  for (const AttentionCase& row : cases_of(true, {{63, 79}, {65, 177}})) {
    const Problem p = make_problem(row);
    if (!has_prefill(p)) continue;
    const Plan plan = plan_on_device(p);
    const std::int64_t all = p.k.shape()[0], more = all + 200;
    const auto longer = [&](const Tensor& x) {
      Tensor y(x.dtype(), {more, x.shape()[1], x.shape()[2]});  // NaN
      std::copy(x.bytes().begin(), x.bytes().end(), y.bytes().begin());
      return y;
    };
    const Tensor k = longer(p.k), v = longer(p.v);
    Uploads uploads;
    DeviceRun device(p, plan);
    tensors_of(device.args) = {uploads.add(k.view()), uploads.add(v.view())};
    device.schedule();
    device.run();
    const Outputs outputs = device.outputs();
    expect_same_bits(run_on_device(p, plan), outputs, row.name);
    EXPECT_EQ(status_of(outputs), 0) << row.name;
  }
}

/// cu_kv that falls, or begins before the tensors: no key is read outside them.
TEST_F(DevicePrefillBounds, WildFirstKeys) {
  for (AttentionCase row : cases_of(true, {{70, 100}, {33, 90}, {40, 120}})) {
    row.mask = {};
    const Problem p = make_problem(row);
    if (has_prefill(p)) expect_wild_first_keys_are_left_out(p);
  }
}

/// Entries that name no page: their tokens are left out, in both modes of the table.
TEST_F(DevicePrefillBounds, BadPagesAreLeftOut) {
  for (AttentionCase row : cases_of(false, {{70, 100}, {33, 90}, {150, 333}, {40, 0}})) {
    row.mask = {};
    row.q_heads = 8;
    for (const int page_size : {16, 64}) {
      for (const auto& [bad, column] : {std::pair{-1, 0}, {INT32_MIN, 2}, {INT32_MAX, 332 / page_size}}) {
        row.page_size = page_size;
        if (has_prefill(make_problem(row))) expect_bad_page_is_left_out(row, column, bad);
      }
    }
  }
}

/// Captured once, replayed with other lengths, tables and counters: eager's bits.
TEST_F(DevicePrefillBounds, GraphReplayWithOtherLengths) {
  using Lengths = std::vector<std::int32_t>;
  const auto sums = [](const Lengths& lengths) {
    Lengths all = {0};
    for (const std::int32_t n : lengths) all.push_back(all.back() + n);
    return Tensor::of({static_cast<std::int64_t>(all.size())}, all);
  };
  struct Step {
    Lengths queries, keys;
  };
  const std::vector<Step> steps = {{{300, 300, 300, 300}, {900, 700, 300, 2000}},
                                   {{0, 0, 300, 0}, {900, 700, 300, 2000}},
                                   {{100, 1, 0, 64}, {100, 650, 300, 0}},
                                   {{0, 0, 0, 0}, {1, 1, 1, 1}},
                                   {{1, 1, 1, 1}, {0, 0, 0, 0}},
                                   {{192, 193, 65, 1}, {192, 193, 65, 1999}},
                                   {{300, 300, 300, 300}, {900, 700, 300, 2000}}};
  for (const bool plain : {true, false}) {
    for (AttentionCase row : cases_of(plain, {{300, 900}, {300, 700}, {300, 300}, {300, 2000}})) {
      for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
        row.policy = policy;
        const Problem p = make_problem(row);
        if (!has_prefill(p)) continue;
        const DeviceRun device(p, plan_on_device(p));
        const SequenceLengths& lengths = device.args.lengths;
        const auto set = [&](const Step& step) {
          device.write(lengths.cu_q, sums(step.queries));
          if (plain) {
            device.write(lengths.cu_kv, sums(step.keys));
          } else {
            device.write(lengths.kv_lengths, Tensor::of({4}, step.keys));
          }
          device.clear();
          check_cuda(cudaDeviceSynchronize());
        };
        SCOPED_TRACE(row.name);
        expect_replays(device, steps, 2, set);
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
