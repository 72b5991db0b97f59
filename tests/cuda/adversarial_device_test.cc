// Tables and lengths that attention on the GPU must survive.
#include <climits>
#include <optional>

#include "tests/cuda/adversarial_device.h"

namespace halftone::testing {
namespace {

TEST(DeviceTables, DeadEntriesAreNeverUsed) {
  for (const std::string& format : device_formats()) {
    for (const BlockTableMode mode : {BlockTableMode::kTrusted, BlockTableMode::kClamped}) {
      AttentionCase row = decode_case(format);
      row.table_mode = mode;
      const Problem p = make_problem(row);
      const Outputs expected = run_on_device(p);
      for (const std::int32_t garbage : {INT_MAX, -1, 0x7fc00000}) {
        for (std::int64_t r = 0; r < 4; ++r) {
          for (std::int64_t c = live_columns(p, r); c < p.cache->block_table.shape()[1]; ++c)
            entry(p, r, c) = garbage;
        }
        const Outputs actual = run_on_device(p);
        expect_same_bits(expected, actual, format);
        EXPECT_EQ(actual.status.as<std::int32_t>()[0], 0) << "a dead entry set the status";
      }
    }
  }
}

/// Clamped: the tokens of a bad entry are left out, as if masked, and the status word says so.
TEST(DeviceTables, BadLiveEntryIsExcludedWhenClamped) {
  for (const std::string& format : device_formats()) {
    for (const std::int32_t bad : {-1, INT_MIN, INT_MAX, 1000000}) {
      AttentionCase row = decode_case(format);
      row.table_mode = BlockTableMode::kClamped;
      const Problem p = make_problem(row);
      const Dequantised d = dequantised(*p.cache);
      const Outputs clean = run_on_device(p);
      entry(p, 0, 1) = bad;  // tokens 16 to 31 of request 0
      entry(p, 2, 8) = bad;  // the last token of request 2
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 1);
      EXPECT_EQ(row_bytes(clean.out, 1, 2), row_bytes(outputs.out, 1, 2)) << "a healthy neighbour changed";

      const Problem twin = without_two_pages(row, d);
      EXPECT_EQ(judge_device(twin, outputs), "") << format << ", entry " << bad;
    }
  }
}

TEST(DeviceTables, EveryEntryBadGivesEmptyRows) {
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    AttentionCase row = decode_case("int8-head");
    row.table_mode = BlockTableMode::kClamped;
    row.policy = policy;
    const Problem p = make_problem(row);
    for (std::int64_t c = 0; c < live_columns(p, 2); ++c) entry(p, 2, c) = -1;
    const Outputs outputs = run_on_device(p);
    expect_empty_rows(p, outputs, 2, 3);
    EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 1);
  }
}

/// The status word is sticky: a clean run does not clear it, nor bits that are not its own.
TEST(DeviceTables, StatusIsStickyAndOptional) {
  AttentionCase row = decode_case("int8-head");
  row.table_mode = BlockTableMode::kClamped;
  const Problem p = make_problem(row);
  DeviceRun device(p, plan_on_device(p));
  const std::int32_t other_bit = 0x40;
  check_cuda(cudaMemcpy(device.args.status.data, &other_bit, 4, cudaMemcpyHostToDevice));
  const auto status_after_run = [&] {
    device.schedule();
    device.run();
    return device.outputs().status.as<std::int32_t>()[0];
  };
  EXPECT_EQ(status_after_run(), 0x40);
  const std::int32_t good = std::exchange(entry(p, 0, 0), -1);
  copy_to_device(device.args.cache.block_table, p.cache->block_table);
  EXPECT_EQ(status_after_run(), 0x41);
  entry(p, 0, 0) = good;
  copy_to_device(device.args.cache.block_table, p.cache->block_table);
  EXPECT_EQ(status_after_run(), 0x41);
  entry(p, 0, 0) = -1;
  copy_to_device(device.args.cache.block_table, p.cache->block_table);
  device.args.status = TensorView{};
  device.run();
  (void)device.outputs();  // nothing failed
}

/// An entry that no query can see, because of the window, is dead as well.
TEST(DeviceTables, EntriesOutsideTheWindowAreDead) {
  AttentionCase row = decode_case("int8-head");
  row.mask = {.causal = true, .window_left = 20};
  const Problem p = make_problem(row);
  const Outputs expected = run_on_device(p);
  entry(p, 0, 0) = -1;
  entry(p, 2, 2) = INT_MAX;
  expect_same_bits(expected, run_on_device(p), "window");
}

TEST(DeviceTables, PagesSharedByTwoSequences) {
  for (const std::string& format : device_formats()) {
    AttentionCase row = decode_case(format);
    row.requests = {{1, 96}, {1, 96}};
    const Problem p = make_problem(row);
    // The twin: request 1 holds copies of the bytes of request 0's first four pages.
    const std::int64_t bytes = p.cache->pages.shape()[1];
    for (std::int64_t c = 0; c < 4; ++c) {
      std::copy_n(p.cache->pages.bytes().begin() + entry(p, 0, c) * bytes, bytes,
                  p.cache->pages.bytes().begin() + entry(p, 1, c) * bytes);
    }
    const Outputs copied = run_on_device(p);
    for (std::int64_t c = 0; c < 4; ++c) entry(p, 1, c) = entry(p, 0, c);
    expect_same_bits(copied, run_on_device(p), format);
  }
}

TEST(DeviceTables, TableChangedBetweenReplays) {
  for (const char* format : {"int8-g64", "bf16"}) {
    const Problem p = make_problem(decode_case(format));
    const DeviceRun device(p, plan_on_device(p));
    const CapturedGraph graph([&](cudaStream_t stream) {
      device.schedule(stream);
      device.run(stream);
    });
    graph.replay();
    const Outputs before = device.outputs();
    expect_same_bits(run_on_device(p), before, "before");
    std::swap(entry(p, 0, 0), entry(p, 2, 4));
    std::swap(entry(p, 1, 0), entry(p, 1, 1));
    copy_to_device(device.args.cache.block_table, p.cache->block_table);
    device.clear();
    check_cuda(cudaDeviceSynchronize());
    graph.replay();
    const Outputs after = device.outputs();
    expect_same_bits(run_on_device(p), after, "after");
    EXPECT_FALSE(same_bytes(before.out, after.out));
  }
}

/// A request without keys gives zeros, and its neighbours are as if it were not there.
TEST(DeviceLengths, EmptyRequestInsideAMixedBatch) {
  for (const std::string& format : device_formats()) {
    AttentionCase row = decode_case(format);
    row.cu_q = true;
    const Problem p = make_problem(with_empty_requests(row));
    const Outputs with = run_on_device(p);
    EXPECT_EQ(judge_device(p, with), "") << format;
    expect_empty_rows(p, with, 1, 4);
    expect_empty_rows(p, with, 6, 7);

    const Problem twin = without_empty_queries(p);
    const Outputs without = run_on_device(twin);
    EXPECT_EQ(row_bytes(with.out, 0, 1), row_bytes(without.out, 0, 1));
    EXPECT_EQ(row_bytes(with.out, 4, 6), row_bytes(without.out, 1, 3));
    EXPECT_EQ(row_bytes(with.out, 7, 8), row_bytes(without.out, 3, 4));
    EXPECT_EQ(row_bytes(with.lse, 4, 6), row_bytes(without.lse, 1, 3));
  }
}

TEST(DeviceLengths, NoRequestsNoQueriesAndNoKeys) {
  AttentionCase row = decode_case("int8-head");
  row.cu_q = true;
  row.requests = {};
  EXPECT_EQ(run_on_device(make_problem(row)).out.numel(), 0);
  row.requests = {{0, 50}, {0, 0}, {0, 200}};
  EXPECT_EQ(run_on_device(make_problem(row)).out.numel(), 0);
  for (const bool sinks : {false, true}) {
    row.requests = uniform_requests(5, 2, 0);
    row.sinks = sinks;
    const Problem p = make_problem(row);
    expect_empty_rows(p, run_on_device(p), 0, 10);
  }
}

TEST(DeviceLengths, MoreQueriesThanKeysCausal) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    AttentionCase row = decode_case(format);
    row.requests = {{20, 7}, {33, 1}, {5, 5}, {17, 0}, {100, 40}};
    row.mask.causal = true;
    const Problem p = make_problem(row);
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "") << format;
    expect_empty_rows(p, outputs, 0, 13);
    expect_empty_rows(p, outputs, 20, 52);
    expect_empty_rows(p, outputs, 58, 75);
    expect_empty_rows(p, outputs, 75, 135);
  }
}

/// Lengths that lie on the device cannot be refused: they are limited to the plan's bounds.
TEST(DeviceLengths, OutsideTheBounds) {
  const Problem p = make_problem(decode_case("int4-g32"));
  const Outputs expected = run_on_device(p);
  DeviceRun device(p, plan_on_device(p));
  const std::vector<std::int32_t> lengths = {70, 33, INT_MAX, -5};  // the bound is 129
  check_cuda(cudaMemcpy(device.args.lengths.kv_lengths.data, lengths.data(), 16, cudaMemcpyHostToDevice));
  device.schedule();
  device.run();
  expect_same_bits(expected, device.outputs(), "limited");
}

/// More units than any grid dimension but the first would hold.
TEST(DeviceLengths, BatchBeyondSixteenBits) {
  AttentionCase row = tiny_requests();
  row.out_dtype = DType::kFloat16;
  const Problem source = make_problem(row);
  const Outputs expected = run_on_device(source);
  ASSERT_EQ(judge_device(source, expected), "");
  for (const SplitPolicy policy : {SplitPolicy::kBatchInvariant, SplitPolicy::kReproducible}) {
    for (const int batch : {65536, 100000}) {
      Problem p = repeated(source, batch);
      p.problem.policy = policy;
      const Outputs actual = run_on_device(p);
      for (int i = 0; i < batch; ++i) {  // up to 16 keys are one split and one tile: never cut
        ASSERT_EQ(row_bytes(actual.out, i, i + 1), row_bytes(expected.out, i % 97, i % 97 + 1)) << i;
        ASSERT_EQ(row_bytes(actual.lse, i, i + 1), row_bytes(expected.lse, i % 97, i % 97 + 1)) << i;
      }
    }
  }
}

/// Pages far apart, appended and read there: byte offsets beyond 2^31 and 2^32 give the bits of near ones.
TEST(DeviceLengths, ByteOffsetsBeyond4GiB) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    AttentionCase row = decode_case(format);
    row.requests = {{1, 200}, {1, 100}};
    row.page_size = 64;
    const Problem p = make_problem(row);
    const Outputs near = run_on_device(p);
    const std::int64_t count = p.cache->pages.shape()[0], stride = std::int64_t{900} << 20;
    ASSERT_GT(stride * (count - 2), std::int64_t{1} << 32);
    std::optional<DeviceMemory> memory;
    try {
      memory.emplace(static_cast<std::size_t>(stride * count));
    } catch (const std::runtime_error&) {
      (void)cudaGetLastError();
      GTEST_SKIP() << "this GPU has no " << stride * count << " bytes free";
    }
    DeviceRun device(p, plan_on_device(p));
    device.args.cache.pages.data = memory->data();
    device.args.cache.pages.strides[0] = stride;
    Uploads uploads;
    const std::vector<std::int64_t> slots = p.cache->slots();
    const Tensor slot_mapping = Tensor::of({static_cast<std::int64_t>(slots.size())}, slots);
    AppendArgs args;
    args.k = uploads.add(p.k.view());
    args.v = uploads.add(p.v.view());
    args.slot_mapping = uploads.add(slot_mapping.view());
    args.status = device.args.status;
    append(device.args.cache, args);
    device.schedule();
    device.run();
    const Outputs far = device.outputs();
    EXPECT_EQ(far.status.as<std::int32_t>()[0], 0) << format;
    expect_same_bits(near, far, format);
    EXPECT_TRUE(memory->guards_intact());
  }
}

}  // namespace
}  // namespace halftone::testing
