// Listed keys beyond the case table: what is refused, what is skipped, and which bits a query gets.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>

#include "format/status.h"
#include "plan/listed.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

AttentionCase listed_row() {
  AttentionCase row = latent_case({}, "fp8-g128-f32");
  row.name = "listed";
  row.q_heads = 16;
  row.page_size = 16;
  row.requests = {{2, 90}, {1, 40}};
  row.lists = {.top_k = 40, .counts = true, .extra_top_k = 30};
  row.out_dtype = DType::kFloat32;
  row.seed = 11;
  return row;
}

/// The problem without lists that keys are added to.
void refuses(ErrorCode code, std::initializer_list<std::string_view> words,
             const std::function<void(AttentionProblem&)>& change) {
  AttentionProblem p = attention_problem(listed_row());
  change(p);
  expect_error(code, words, [&] { (void)halftone::plan(p); });
}

TEST(Listed, PlanRefuses) {
  using enum ErrorCode;
  refuses(kInvalidArgument, {"listed.top_k is 65537", "0 to 65536"}, [](auto& p) { p.listed.top_k = 65537; });
  refuses(kInvalidArgument, {"listed.top_k is -1"}, [](auto& p) { p.listed.top_k = -1; });
  refuses(kInvalidArgument, {"listed.extra_top_k is 30", "top_k is 0"}, [](auto& p) { p.listed.top_k = 0; });
  refuses(kInvalidArgument, {"listed.extra is given", "extra_top_k is 0"},
          [](auto& p) { p.listed.extra_top_k = 0; });
  refuses(kInvalidArgument, {"listed.extra.head_dim is 544", "kv.head_dim is 576"},
          [](auto& p) { p.listed.extra = KvCacheSpec::latent(p.listed.extra.k_format, 512, 32); });
  refuses(kInvalidArgument, {"mask.causal", "listed.top_k"}, [](auto& p) { p.mask.causal = true; });
  refuses(kInvalidArgument, {"mask.window_left"}, [](auto& p) { p.mask.window_left = 0; });
  refuses(kInvalidArgument, {"mask.window_right"}, [](auto& p) { p.mask.window_right = 3; });
  refuses(kInvalidArgument, {"alibi"}, [](auto& p) { p.alibi = true; });
  refuses(kInvalidArgument, {"batch 65536", "max_q_len 16385"}, [](auto& p) {
    p.batch = 65536;
    p.max_q_len = 16385;
  });
  refuses(kUnsupported, {"listed.top_k is 40", "append"}, [](auto& p) {
    p.listed.extra_top_k = 0;
    p.listed.extra = {};
    p.kv = KvTensors{.kv_heads = 1, .head_dim = 64};
  });
  refuses(kUnsupported, {"arithmetic is half_int8", "listed keys", "serves 16-bit"},
          [](auto& p) { p.arithmetic = Arithmetic::kHalfInt8; });
  refuses(kUnsupported, {"arithmetic is full_int8", "listed keys", "serves 16-bit"},
          [](auto& p) { p.arithmetic = Arithmetic::kFullInt8; });
  refuses(kUnsupported, {"arithmetic is fp8", "a latent cache", "serves 16-bit"}, [](auto& p) {
    p.listed = {};
    p.arithmetic = Arithmetic::kFp8;
  });
  refuses(kUnsupported, {"arithmetic is half_int8", "a latent cache"}, [](auto& p) {
    p.listed = {};
    p.arithmetic = Arithmetic::kHalfInt8;
  });
}

TEST(Listed, PlanSaysWhichKeysAndInWhatArithmetic) {
  const std::string text = halftone::plan(attention_problem(listed_row())).describe();
  for (const char* line : {"arithmetic", "16-bit", "keys", "list of up to 40 slots", "up to 30 slots"})
    EXPECT_NE(text.find(line), std::string::npos) << line << '\n' << text;
  EXPECT_EQ(text.find("\nmask"), std::string::npos) << text;
}

/// A bound of all requests' keys says nothing of lists.
TEST(Listed, MaxTotalKvDoesNotBoundLists) {
  Problem p = make_problem(listed_row());
  const Outputs expected = run_problem(p);
  expect_same_bits(expected, run_problem(p, [](auto& problem) { problem.max_total_kv = 1; }), "bounded");
}

TEST(Listed, ScheduleRefusesCountsBeyondTheLists) {
  Problem p = make_problem(listed_row());
  const Plan plan = halftone::plan(p.problem);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  const auto refuses = [&](std::initializer_list<std::string_view> words, ErrorCode code) {
    expect_error(code, words, [&] { schedule(plan, p.lengths(), workspace.view()); });
  };
  p.counts.as<std::int32_t>()[1] = 41;
  refuses({"counts[1] is 41", "0 to top_k 40"}, ErrorCode::kOutOfRange);
  p.counts.as<std::int32_t>()[1] = -1;
  refuses({"counts[1] is -1", "use 0"}, ErrorCode::kOutOfRange);
  p.counts.as<std::int32_t>()[1] = 40;
  p.extra_counts.as<std::int32_t>()[2] = 31;
  refuses({"extra_counts[2] is 31", "extra_top_k 30"}, ErrorCode::kOutOfRange);
  p.extra_counts = Tensor(DType::kInt32, {4});
  refuses({"extra_counts.shape[0] is 4", "3 queries"}, ErrorCode::kInvalidArgument);
  p.extra_counts = {};
  SequenceLengths lengths = p.lengths();
  lengths.kv_lengths = p.cache->lengths.view();
  expect_error(ErrorCode::kInvalidArgument, {"kv_lengths", "counts"},
               [&] { schedule(plan, lengths, workspace.view()); });

  AttentionCase dense = listed_row();
  dense.lists = {};
  const Problem all = make_problem(dense);
  lengths = all.lengths();
  lengths.counts = p.counts.view();
  const Plan other = halftone::plan(all.problem);
  const Tensor own(DType::kUInt8, {static_cast<std::int64_t>(other.workspace_bytes())});
  expect_error(ErrorCode::kInvalidArgument, {"counts", "top_k is 0"},
               [&] { schedule(other, lengths, own.view()); });
}

TEST(Listed, RunRefuses) {
  const Problem p = make_problem(listed_row());
  const Prepared ready(p);
  const Tensor wide(DType::kInt32, {3, 41});
  using enum ErrorCode;
  ready.refuses(kInvalidArgument, {"indices", "absent", "top_k is 40"}, [](auto& a) { a.indices = {}; });
  ready.refuses(kInvalidArgument, {"indices", "[3, 40]"}, [&](auto& a) { a.indices = wide.view(); });
  ready.refuses(kInvalidArgument, {"extra_indices", "absent"}, [](auto& a) { a.extra_indices = {}; });
  ready.refuses(kInvalidArgument, {"extra_kv.spec"}, [](auto& a) { a.extra_kv.spec.page_size = 32; });
  ready.refuses(kInvalidArgument, {"overlap", "indices"}, [](auto& a) {
    a.status = a.indices;
    a.status.rank = 1, a.status.shape[0] = 1, a.status.strides[0] = 1;
  });
  const std::int64_t slots = p.cache->pages.shape()[0] * 16;
  p.indices.as<std::int32_t>()[40] = static_cast<std::int32_t>(slots);
  p.counts.as<std::int32_t>()[1] = 1;
  const Prepared again(p);
  again.refuses(kOutOfRange, {"indices[1, 0] is " + std::to_string(slots), "kClamped"}, [](auto&) {});
}

/// A cache without block table and lengths is enough.
TEST(Listed, NeedsNoBlockTable) {
  const Problem p = make_problem(listed_row());
  const Outputs expected = run_problem(p);
  const Prepared ready(p);
  AttentionArgs args = ready.args;
  for (PagedKv* cache : {&std::get<PagedKv>(args.kv), &args.extra_kv})
    cache->block_table = cache->lengths = {};
  run(ready.plan, args, ready.workspace.view());
  expect_same_bits(expected, ready.outputs, "without table");
}

/// Clamped: a slot that the cache lacks is skipped like -1, and the status says so.
TEST(Listed, ClampedSkipsSlotsBeyondTheCache) {
  AttentionCase row = listed_row();
  row.table_mode = BlockTableMode::kClamped;
  row.lists.counts = false;
  for (const bool second : {false, true}) {
    const Problem p = make_problem(row);
    const Tensor& list = second ? p.extra_indices : p.indices;
    const Cache& cache = second ? *p.extra : *p.cache;
    list.as<std::int32_t>()[3] = -1;
    list.as<std::int32_t>()[4] = INT_MIN;
    const Outputs expected = run_problem(p);
    EXPECT_EQ(expected.status.as<std::int32_t>()[0], 0);
    list.as<std::int32_t>()[3] = INT_MAX;
    list.as<std::int32_t>()[4] = static_cast<std::int32_t>(cache.pages.shape()[0]) * cache.spec.page_size;
    const Outputs actual = run_problem(p);
    EXPECT_EQ(actual.status.as<std::int32_t>()[0], kStatusBadPage);
    expect_same_bits(expected, actual, second ? "second list" : "first list");
  }
}

/// Every key in the order of the cache is what a query without a list sees, bit for bit.
TEST(Listed, AllKeysInOrderEqualNoList) {
  AttentionCase row = listed_row();
  row.requests = {{1, 300}, {1, 300}};
  row.lists = {};
  const Problem dense = make_problem(row);
  row.lists.top_k = 300;
  const Problem listed = make_problem(row);
  const std::vector<std::int64_t> slots = listed.cache->slots();
  std::copy(slots.begin(), slots.end(), listed.indices.as<std::int32_t>().begin());
  expect_same_bits(run_problem(dense), run_problem(listed), "all keys");
}

/// A query's bits come from its lists alone: not from its neighbours, its place or the bounds.
TEST(Listed, BatchInvariantQueriesDoNotDependOnOthers) {
  AttentionCase row = listed_row();
  row.policy = SplitPolicy::kBatchInvariant;
  row.requests = {{1, 2000}, {1, 2000}, {1, 60}};
  row.lists = {.top_k = 1500, .counts = true, .extra_top_k = 100};
  const Problem p = make_problem(row);
  const Outputs all = run_problem(p);
  for (std::int64_t i = 0; i < 3; ++i) {
    AttentionProblem one = p.problem;
    one.batch = 1;
    one.workers = 3;
    const auto row_of = [&](const TensorView& t) {
      TensorView view = t;
      view.shape[0] = 1;
      view.data = static_cast<std::uint8_t*>(t.data) + i * t.strides[0] * (dtype_bits(t.dtype) / 8);
      return view;
    };
    const Outputs out = make_outputs(p);
    AttentionArgs args = arguments(p, out);
    for (TensorView* t : {&args.q, &args.out, &args.lse, &args.indices, &args.extra_indices,
                          &args.lengths.counts, &args.lengths.extra_counts}) {
      *t = row_of(*t);
    }
    attend(one, args);
    EXPECT_EQ(row_bytes(all.out, i, i + 1), row_bytes(out.out, i, i + 1)) << i;
    EXPECT_EQ(row_bytes(all.lse, i, i + 1), row_bytes(out.lse, i, i + 1)) << i;
  }
}

/// Places of the second list begin at a multiple of 64, and a query without one has none of those between.
TEST(Listed, LengthsOfTwoLists) {
  using planning::listed_length;
  EXPECT_EQ(listed_length(0, 0), 0);
  EXPECT_EQ(listed_length(5, 0), 5);
  EXPECT_EQ(listed_length(0, 7), 7);
  EXPECT_EQ(listed_length(5, 7), 71);
  EXPECT_EQ(listed_length(64, 1), 65);
  EXPECT_EQ(listed_length(65536, 65536), 131072);
}

/// More queries than fit the bound's batch get their own units, however many cu_q leaves out.
TEST(Listed, FewerQueriesThanTheBound) {
  AttentionCase row = listed_row();
  row.requests = {{0, 50}, {3, 50}, {0, 10}, {1, 64}};
  row.slack = 5;
  row.cu_q = true;
  const Problem p = make_problem(row);
  EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "");
}

}  // namespace
}  // namespace halftone::testing
