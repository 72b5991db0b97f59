// Lengths: empty requests, boundaries, lengths beyond bounds and tables, and addresses beyond 2^32.
#include <climits>
#include <memory>

#include "format/status.h"
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

AttentionCase mixed(const std::string& format = "int8-head") {
  AttentionCase row;
  row.requests = {{1, 70}, {2, 33}, {1, 129}};
  row.k_format = format;
  row.out_dtype = DType::kFloat32;
  row.cu_q = true;
  row.slack = 30;
  return row;
}

/// The requests of mixed() in fp32, and short pages and O in f16.
std::vector<AttentionCase> both_kinds(const std::string& format = "int8-head") {
  AttentionCase half = table_case(format, DType::kFloat16);
  half.cu_q = true;
  return {mixed(format), half};
}

class MixedLengths : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(MixedLengths);

/// A request without keys gives zeros, and its neighbours are as if it were not there.
TEST_P(MixedLengths, EmptyRequestInsideAMixedBatch) {
  for (const std::string& format : formats_of_runners()) {
    for (const AttentionCase& row : both_kinds(format)) {
      const Problem p = make_problem(with_empty_requests(row));
      const Outputs with = run(p);
      EXPECT_EQ(judge(p, with), "") << format;
      expect_empty_rows(p, with, 1, 4);
      expect_empty_rows(p, with, 6, 7);

      const Problem twin = without_empty_queries(p);
      const Outputs without = run(twin);
      EXPECT_EQ(row_bytes(with.out, 0, 1), row_bytes(without.out, 0, 1));
      EXPECT_EQ(row_bytes(with.out, 4, 6), row_bytes(without.out, 1, 3));
      EXPECT_EQ(row_bytes(with.out, 7, 8), row_bytes(without.out, 3, 4));
      EXPECT_EQ(row_bytes(with.lse, 4, 6), row_bytes(without.lse, 1, 3));
    }
  }
}

TEST_P(MixedLengths, EveryRequestEmpty) {
  for (AttentionCase row : both_kinds()) {
    for (const bool sinks : {false, true}) {
      for (const SplitPolicy policy :
           {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
        row.requests = uniform_requests(5, 2, 0);
        row.sinks = sinks;
        row.policy = policy;
        const Problem p = make_problem(row);
        expect_empty_rows(p, run(p), 0, 10);
      }
    }
  }
}

TEST_P(MixedLengths, NoRequestsAndNoQueries) {
  for (AttentionCase row : both_kinds()) {
    row.requests = {};
    EXPECT_EQ(run(make_problem(row)).out.numel(), 0);
    row.requests = {{0, 50}, {0, 0}, {0, 200}};
    EXPECT_EQ(run(make_problem(row)).out.numel(), 0);
  }
}

TEST_P(MixedLengths, MoreQueriesThanKeysCausal) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    for (AttentionCase row : both_kinds(format)) {
      row.requests = {{20, 7}, {33, 1}, {5, 5}, {17, 0}, {100, 40}};
      row.mask.causal = true;
      const Problem p = make_problem(row);
      const Outputs outputs = run(p);
      EXPECT_EQ(judge(p, outputs), "") << format;
      expect_empty_rows(p, outputs, 0, 13);
      expect_empty_rows(p, outputs, 20, 52);
      expect_empty_rows(p, outputs, 58, 75);
      expect_empty_rows(p, outputs, 75, 135);
    }
  }
}

/// More requests than a grid dimension of a device but the first would hold, and 32-bit products on any
/// backend.
TEST_P(MixedLengths, BatchBeyondSixteenBits) {
  for (const DType out : kOutTypes) {
    AttentionCase row = tiny_requests();
    row.out_dtype = out;
    const Problem source = make_problem(row);
    const Outputs expected = run(source);
    ASSERT_EQ(judge(source, expected), "");
    for (const SplitPolicy policy : {SplitPolicy::kBatchInvariant, SplitPolicy::kReproducible}) {
      for (const int batch : {65536, reference::kSanitized ? 65537 : 100000}) {
        Problem p = repeated(source, batch);
        p.problem.policy = policy;
        const Outputs actual = run(p);
        for (int i = 0; i < batch; ++i) {  // up to 16 keys are one split and one tile: never cut
          ASSERT_EQ(row_bytes(actual.out, i, i + 1), row_bytes(expected.out, i % 97, i % 97 + 1)) << i;
          ASSERT_EQ(row_bytes(actual.lse, i, i + 1), row_bytes(expected.lse, i % 97, i % 97 + 1)) << i;
        }
      }
    }
  }
}

/// Tile, page and split boundaries, one below, on, and one above.
TEST_P(MixedLengths, Boundaries) {
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    for (const int page : {16, 32, 64, 128, 256}) {
      AttentionCase row;
      row.q_heads = 2;
      row.kv_heads = 1;
      row.head_dim = 64;
      row.k_format = "int4-g32";
      row.out_dtype = DType::kFloat32;
      row.page_size = page;
      row.policy = policy;
      row.workers = 5;
      AttentionProblem bounds;
      bounds.batch = 1;
      bounds.q_heads = 2;
      bounds.kv = KvCacheSpec::separate(parse_format("int4-g32"), parse_format("int4-g32"), 1, 64);
      bounds.max_kv_len = 5000;
      bounds.policy = policy;
      const PlanInfo info = runner().plan(bounds).info();
      for (const int boundary :
           {16, info.kv_tile, 2 * info.kv_tile, page, 3 * page, info.split_tokens, 2 * info.split_tokens}) {
        if (boundary == 0 || boundary > (reference::kSanitized ? 1024 : 5000)) continue;
        for (int d = -1; d <= 1; ++d) row.requests.push_back({1, boundary + d});
      }
      const Problem p = make_problem(row);
      EXPECT_EQ(judge(p, run(p)), "") << "page " << page;
    }
  }
}

/// Lengths beyond the block table's width are refused where they can be read. Elsewhere tokens there do not
/// exist, whoever's pages lie behind the row.
TEST_P(MixedLengths, BeyondTheTable) {
  for (const std::string& format : formats_of_runners()) {
    for (AttentionCase row : few_and_many_rows(format)) {
      for (const BlockTableMode mode : {BlockTableMode::kTrusted, BlockTableMode::kClamped}) {
        row.requests = {{1, 70}, {1, 33}, {1, 0}, {1, 129}};
        row.table_mode = mode;
        const Problem p = make_problem(row);
        const Plan plan = runner().plan(p);
        PlacedRun calls(runner(), p, plan);
        cache_of(calls.args).block_table.shape[1] = 3;  // of 16 tokens
        calls.schedule();
        if (runner().checks_values()) {
          expect_error(kOutOfRange, {"kv_lengths[0]", "70", "3"}, [&] { calls.run(); });
          EXPECT_TRUE(untouched(calls.outputs().out));
          continue;
        }
        calls.run();
        const Outputs outputs = calls.outputs();
        EXPECT_EQ(outputs.status.as<std::int32_t>()[0], kStatusBadPage) << format;

        const PlacedRun twin(runner(), p, plan);
        twin.write(twin.args.lengths.kv_lengths, Tensor::of({4}, std::vector<std::int32_t>{48, 33, 0, 48}));
        twin.schedule();
        twin.run();
        const Outputs expected = twin.outputs();
        for (std::int64_t i = 0; i < expected.out.numel(); ++i) {
          ASSERT_NEAR(outputs.out.get(i), expected.out.get(i), 1e-2F) << format << ", element " << i;
        }
        for (std::int64_t i = 0; i < expected.lse.numel(); ++i) {
          const float want = expected.lse.get(i), have = outputs.lse.get(i);
          ASSERT_TRUE(want == have || std::abs(want - have) < 1e-3F) << format << ", LSE " << i;
        }
      }
    }
  }
}

/// Lengths outside the plan's bounds are refused where they can be read, else limited to them.
TEST_P(MixedLengths, BeyondThePlansBounds) {
  const Problem p = make_problem(table_case("int4-g32", DType::kFloat16));
  const Outputs expected = run(p);
  const PlacedRun calls(runner(), p);
  const int bound = p.problem.max_kv_len;
  const auto set = [&](int third, int fourth) {
    calls.write(calls.args.lengths.kv_lengths,
                Tensor::of({4}, std::vector<std::int32_t>{70, 33, third, fourth}));
  };
  if (runner().checks_values()) {
    for (const int length : {bound + 1, INT_MAX, -1, INT_MIN}) {
      set(length, 0);
      expect_error(kOutOfRange, {"kv_lengths[2]", std::to_string(length), std::to_string(bound)},
                   [&] { calls.schedule(); });
    }
    return;
  }
  set(INT_MAX, -5);
  calls.schedule();
  calls.run();
  expect_same_bits(expected, calls.outputs(), "limited");
}

/// As attention does.
TEST(Lengths, DequantizeBeyondTheTable) {
  const Problem p = make_problem(mixed());
  const std::int64_t columns = p.cache->block_table.shape()[1];
  const auto beyond = static_cast<std::int32_t>(columns * p.row.page_size + 1);
  p.cache->lengths.as<std::int32_t>()[1] = beyond;
  expect_error(kOutOfRange, {"lengths[1]", std::to_string(beyond)}, [&] { (void)dequantised(*p.cache); });
}

TEST(Lengths, CumulativeLengthsThatDecrease) {
  const Problem p = make_problem(mixed());
  const Prepared ready(p);
  for (const std::vector<std::int32_t>& bad : {std::vector<std::int32_t>{0, 3, 2, 4}, {0, 1, 3, -1}}) {
    const Tensor cu = Tensor::of({4}, bad);
    SequenceLengths lengths = p.lengths();
    lengths.cu_q = cu.view();
    expect_error(kInvalidArgument, {"cu_q["}, [&] { schedule(ready.plan, lengths, ready.workspace.view()); });
  }
  const Tensor shifted = Tensor::of({4}, std::vector<std::int32_t>{1, 2, 3, 4});
  SequenceLengths lengths = p.lengths();
  lengths.cu_q = shifted.view();
  expect_error(kInvalidArgument, {"cu_q[0]", "1", "0"},
               [&] { schedule(ready.plan, lengths, ready.workspace.view()); });
  const Tensor long_query = Tensor::of({4}, std::vector<std::int32_t>{0, 1, 3, 100});
  lengths.cu_q = long_query.view();
  expect_error(kOutOfRange, {"cu_q", "97", "max_q_len"},
               [&] { schedule(ready.plan, lengths, ready.workspace.view()); });

  AttentionCase plain = mixed();
  plain.plain = DType::kBFloat16;
  const Problem q = make_problem(plain);
  const Prepared plain_ready(q);
  lengths = q.lengths();
  const Tensor falling = Tensor::of({4}, std::vector<std::int32_t>{0, 70, 60, 232});
  lengths.cu_kv = falling.view();
  expect_error(kInvalidArgument, {"cu_kv[2]", "60", "70"},
               [&] { schedule(plain_ready.plan, lengths, plain_ready.workspace.view()); });
}

/// A schedule that failed leaves no schedule behind that run() would accept as the new one.
TEST(Lengths, QueriesThatDoNotMatchTheSchedule) {
  const Problem p = make_problem(mixed());
  const Prepared ready(p);
  const Tensor longer(p.row.q_dtype, {p.total_q() + 1, p.row.q_heads, p.row.head_dim});
  ready.refuses(kInvalidArgument,
                {"q.shape[0]", std::to_string(p.total_q() + 1), std::to_string(p.total_q())},
                [&](AttentionArgs& a) { a.q = longer.view(); });
  const Tensor short_out(p.row.out_dtype, {p.total_q() - 1, p.row.q_heads, p.row.head_dim});
  ready.refuses(kInvalidArgument, {"out"}, [&](AttentionArgs& a) { a.out = short_out.view(); });
}

TEST(Lengths, AppendToAFullCacheLeavesEveryByte) {
  AttentionCase row = mixed();
  row.page_size = 16;
  row.requests = {{1, 32}, {1, 7}};
  const Problem p = make_problem(row);
  p.cache->lengths.as<std::int32_t>()[0] = static_cast<std::int32_t>(p.cache->block_table.shape()[1]) * 16;
  const Tensor before = p.cache->pages.clone();
  const Tensor k(DType::kFloat32, {2, row.kv_heads, row.head_dim}), v = k.clone();
  for (const Tensor* t : {&k, &v}) {
    for (float& x : t->as<float>()) x = 1;
  }
  expect_error(kOutOfRange, {"lengths[0]"}, [&] {
    const Tensor cu = Tensor::of({3}, std::vector<std::int32_t>{0, 1, 2});
    AppendArgs args;
    args.k = k.view();
    args.v = v.view();
    args.cu_seqlens = cu.view();
    append(p.cache->view(), args);
  });
  EXPECT_TRUE(same_bytes(before, p.cache->pages));
  EXPECT_TRUE(p.cache->guards_intact());
}

/// One plan and workspace at length 1, at 128K and at length 1 again: the bits of a workspace used once.
TEST(Lengths, OneWorkspaceFromOneTokenTo128K) {
  AttentionCase row;
  row.q_heads = 4;
  row.kv_heads = 1;
  row.head_dim = 64;
  row.k_format = "int8-head";
  row.workers = 9;
  row.requests = {{1, reference::kSanitized ? 8192 : 131072}, {1, 300}};
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    row.policy = policy;
    const Problem p = make_problem(row);
    const Prepared ready(p);
    const auto lengths = p.cache->lengths.as<std::int32_t>();
    for (const std::int32_t length : {1, row.requests[0].kv_len, 1}) {
      lengths[0] = length;
      schedule(ready.plan, p.lengths(), ready.workspace.view());
      run(ready.plan, ready.args, ready.workspace.view());
      expect_same_bits(run_problem(p), ready.outputs, "length " + std::to_string(length));
    }
  }
}

/// Pages far apart, appended, read and read back there: byte offsets beyond 2^31 and 2^32 give what near ones
/// do.
TEST_P(MixedLengths, ByteOffsetsBeyond4GiB) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    for (AttentionCase row : both_kinds(format)) {
      row.requests = {{1, 200}, {1, 100}};
      row.page_size = 64;
      const Problem p = make_problem(row);
      const Outputs near = run(p);
      const std::int64_t count = p.cache->pages.shape()[0], stride = std::int64_t{900} << 20;
      ASSERT_GT(stride * (count - 2), std::int64_t{1} << 32);
      const std::unique_ptr<Place> place = runner().place();
      void* const memory = place->reserve(static_cast<std::size_t>(stride * count));
      if (memory == nullptr) GTEST_SKIP() << runner().name() << " has no " << stride * count << " bytes";
      PlacedRun calls(runner(), p);
      PagedKv& far = cache_of(calls.args);
      far.pages.data = memory;
      far.pages.strides[0] = stride;

      const std::vector<std::int64_t> slots = p.cache->slots();
      const Tensor slot_mapping = Tensor::of({static_cast<std::int64_t>(slots.size())}, slots);
      AppendArgs tokens;
      tokens.k = p.k.view();
      tokens.v = p.v.view();
      tokens.slot_mapping = slot_mapping.view();
      tokens = place->add(tokens);
      tokens.status = calls.args.status;
      append(far, tokens);
      calls.schedule();
      calls.run();
      const Outputs outputs = calls.outputs();
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0) << format;
      expect_same_bits(near, outputs, format);

      const reference::Dequantised expected = dequantised(*p.cache);
      const Tensor k(DType::kFloat32, expected.k.shape()), v(DType::kFloat32, expected.v.shape());
      const TensorView far_k = place->add(k.view()), far_v = place->add(v.view());
      dequantize(far, far_k, far_v);
      place->finish();
      place->read(far_k, k);
      place->read(far_v, v);
      EXPECT_TRUE(same_bytes(expected.k, k) && same_bytes(expected.v, v)) << format;
    }
  }
}

}  // namespace
}  // namespace halftone::testing
