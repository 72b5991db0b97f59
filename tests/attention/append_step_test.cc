// Attention that appends: the bytes of append(), the bits of append() and then run(), for rows of the case
// table, on every backend.
//
// ctest: 2 parts
#include <array>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "reference/sanitizer.h"
#include "testing/step.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

constexpr std::array kPolicies = {SplitPolicy::kReproducible, SplitPolicy::kFast,
                                  SplitPolicy::kBatchInvariant};

constexpr std::array kRopes = {RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved};

/// What a step leaves behind.
struct After {
  Outputs outputs;
  Tensor pages, lengths;
};

/// append(), then run() of a plan that does not.
After in_two_calls(const Runner& runner, Problem p) {
  const Tensor cu = cumulative_queries(p.row);
  Tensor status(DType::kInt32, {1});
  status.fill_bytes(0);
  runner.append(*p.cache, append_args(p, cu, status), status);
  for (std::size_t i = 0; i < p.row.requests.size(); ++i) {
    p.cache->lengths.as<std::int32_t>()[i] = p.row.requests[i].kv_len;
  }
  p.row.step = {};
  p.problem.appends = false;
  After after{runner.run(p), p.cache->pages.clone(), p.cache->lengths.clone()};
  after.outputs.status.as<std::int32_t>()[0] |= status.as<std::int32_t>()[0];
  return after;
}

After in_one_call(const Runner& runner, const Problem& p, bool advance) {
  PlacedRun placed(runner, p);
  placed.args.append.advance = advance;
  placed.schedule();
  placed.run();
  After after{placed.outputs(), p.cache->pages.clone(), p.cache->lengths.clone()};
  const auto& cache = std::get<PagedKv>(placed.args.kv);
  placed.read(cache.pages, after.pages);
  placed.read(cache.lengths, after.lengths);
  return after;
}

class AppendStep : public OnRunners {
 protected:
  /// Where the backend serves the row.
  void expect_same(const AttentionCase& row) {
    SCOPED_TRACE(row.name);
    Problem p = make_problem(row);
    if (!serves(p)) return;
    auto before = std::make_unique<Cache>(p.cache->clone());
    const After one = in_one_call(runner(), p, true);
    p.cache = std::move(before);
    const After two = in_two_calls(runner(), std::move(p));
    EXPECT_TRUE(same_bytes(two.pages, one.pages));
    EXPECT_TRUE(same_bytes(two.lengths, one.lengths));
    EXPECT_TRUE(same_bytes(two.outputs.out, one.outputs.out));
    EXPECT_TRUE(!row.lse || same_bytes(two.outputs.lse, one.outputs.lse));
    EXPECT_TRUE(same_bytes(two.outputs.status, one.outputs.status));
  }
};
HALFTONE_ON_EVERY_RUNNER(AppendStep);

TEST_P(AppendStep, RowsOfTheTableEqualAppendAndRun) {
  int n = 0;
  for (AttentionCase row : attention_cases()) {
    if (row.plain || row.lists.top_k != 0) continue;
    ++n;
    if (n % (reference::kSanitized ? 8 : 2) != 0 && !row.step.appends) continue;
    if (!row.step.appends) row = appending(row, {.slots = n % 3 == 0});
    row.policy = kPolicies[static_cast<std::size_t>(n) % kPolicies.size()];
    expect_same(row);
    if (HasFailure()) return;
  }
  EXPECT_GT(n, 300);
}

/// Formats whose bytes are written by different code, with every number of queries that one launch is for.
TEST_P(AppendStep, EveryNumberOfQueriesAndPolicy) {
  int n = 0;
  for (const char* format : {"bf16", "fp8", "int8-head", "int8-token", "int4-g32", "int4-row"}) {
    for (int queries = 1; queries <= 16; ++queries) {
      AttentionCase row;
      row.name = std::string(format) + ", " + std::to_string(queries) + " queries";
      // New tokens in one tile, across tiles, across pages and across the splits of a long request.
      row.requests = {{queries, 16}, {queries, 21}, {queries, 64 + (queries + 1) / 2}, {queries, 1030}};
      row.k_format = format;
      row.mask.causal = queries % 2 == 0;
      row.workers = runner().device().type == DeviceType::kCpu ? 6 : 0;
      row.seed = static_cast<std::uint64_t>(queries);
      for (const SplitPolicy policy : kPolicies) {
        if (n++ % 2 != 0 && std::string(format) != "int8-head") continue;
        row.policy = policy;
        expect_same(appending(row));
        if (HasFailure()) return;
      }
    }
  }
}

/// Units of 64 packed rows, the kernels with rows as M: less than one and several of them for a KV head,
/// which then read the same tiles; few workers, which have more items than a queue holds.
TEST_P(AppendStep, UnitsOfManyRows) {
  struct Shape {
    int q_heads, kv_heads, queries, workers;
  };
  int n = 0;
  for (const char* format : {"fp8", "int8-head", "int4-g32", "fp8-token-head", "int8-tensor", "int4-row"}) {
    for (const Shape& shape : {Shape{16, 1, 3, 3}, Shape{32, 8, 9, 2}, Shape{32, 8, 16, 0},
                               Shape{16, 1, 9, 5}, Shape{24, 1, 2, 1}}) {
      ++n;
      const auto i = static_cast<std::size_t>(n);
      const int queries = shape.queries;
      AttentionCase row;
      row.name = std::string(format) + ", " + std::to_string(queries) + " queries of " +
                 std::to_string(shape.q_heads) + " heads";
      row.requests = {
          {queries, queries}, {queries, 21}, {1, 300},      {queries, 64 + (queries + 1) / 2}, {0, 70},
          {queries - 1, 530}, {2, 2},        {queries, 129}};
      row.q_heads = shape.q_heads;
      row.kv_heads = shape.kv_heads;
      row.k_format = format;
      row.page_size = n % 2 == 0 ? 64 : 16;
      row.mask.causal = n % 4 != 0;
      row.mask.window_left = n % 5 == 4 ? 150 : -1;
      row.rotate_k = n % 6 == 5;
      row.workers = shape.workers;
      row.policy = kPolicies[i % 2];  // batch-invariant ones are prefill's
      row.key_slack = 8192;           // no units of 8
      row.seed = 300 + i;
      row = appending(row, {.rope = kRopes[i % kRopes.size()], .slots = n % 4 == 3});
      if (runner().device().type == DeviceType::kCuda) {
        const Plan plan = runner().plan(attention_problem(row));
        EXPECT_EQ(plan.info().config, "sm90-decode-64") << row.name;
        EXPECT_TRUE(plan.info().fuses_append);
      }
      expect_same(row);
      if (HasFailure()) return;
    }
  }
}

/// Heads with a last block of 16 dims, and those of which a lane has two chunks.
struct HeadCase {
  const char* format;
  int head_dim, queries, q_heads, kv_heads, unit;  // packed rows
};

/// Every format that decode has kernels for at these head_dims, in units of 8 and of 16 rows.
std::vector<HeadCase> head_cases() {
  std::vector<HeadCase> cases;
  for (const int head_dim : {80, 512}) {
    for (const char* format :
         {"bf16", "fp16", "fp8", "fp8-static-head", "fp8-token-head", "int8-tensor", "int8-head", "int8-g32",
          "int8-g64", "int8-g128", "int4-row", "int4-g32", "int4-g64", "int4-g128"}) {
      const KvFormat f = parse_format(format);
      if (f.granularity == Granularity::kGroup && head_dim % f.group_size != 0) continue;
      cases.push_back({format, head_dim, 1, 4, 2, 8});
      cases.push_back({format, head_dim, 7, 2, 1, 8});
      if (head_dim == 512 && dtype_bits(f.dtype) == 16) continue;  // more than 8 rows are prefill's
      cases.push_back({format, head_dim, 1, 28, 2, 16});
      if (f.dynamic_scale()) cases.push_back({format, head_dim, 5, 42, 14, 16});
    }
  }
  return cases;
}

/// With RoPE that leaves no dims, those beyond a half or others as they are, rotations, skipped tokens, and
/// few workers, which cut units.
TEST_P(AppendStep, HalfBlocksAndWideRows) {
  int n = 0;
  for (const HeadCase& c : head_cases()) {
    ++n;
    const auto i = static_cast<std::size_t>(n);
    AttentionCase row;
    row.name = std::string(c.format) + ", head_dim " + std::to_string(c.head_dim) + ", " +
               std::to_string(c.queries) + " queries of " + std::to_string(c.q_heads) + " heads";
    row.requests = {
        {c.queries, c.queries}, {1, 70}, {c.queries, 21}, {0, 30}, {c.queries, 64 + c.queries / 2}};
    row.q_heads = c.q_heads;
    row.kv_heads = c.kv_heads;
    row.head_dim = c.head_dim;
    row.k_format = c.format;
    row.page_size = n % 2 == 0 ? 64 : 16;
    row.mask.causal = n % 4 != 0;
    row.rotate_k = n % 4 == 1;
    row.rotate_v = n % 5 == 1;
    row.scale_k = row.offset_k = dtype_bits(parse_format(c.format).dtype) != 16 && n % 5 == 3;
    row.workers = 3 + n % 3;
    row.policy = kPolicies[c.q_heads == 28 ? 2 : i % 2];  // batch-invariant: units of 16
    row.seed = 500 + i;
    const std::array rope_dims = {c.head_dim, 0, c.head_dim == 80 ? 32 : 384};
    row = appending(row, {.dtype = n % 2 == 0 ? DType::kBFloat16 : DType::kFloat16,
                          .rope = kRopes[i % kRopes.size()],
                          .slots = n % 7 == 3,
                          .rope_dims = rope_dims[i / 3 % rope_dims.size()]});
    if (runner().device().type == DeviceType::kCuda) {
      const PlanInfo info = runner().plan(attention_problem(row)).info();
      EXPECT_EQ(info.config, "sm90-decode-" + std::to_string(c.unit)) << row.name;
      EXPECT_TRUE(info.fuses_append) << row.name;
    }
    expect_same(row);
    if (HasFailure()) return;
  }
}

/// Prompts beside single tokens whose units the kernels with rows as M take: append's own kernel comes before
/// both, and the first pass advances the lengths.
TEST_P(AppendStep, PromptsBesideManyRows) {
  for (const char* format : {"fp8", "int8-head", "int8-tensor"}) {
    AttentionCase row;
    row.name = std::string("24 rows of ") + format;
    row.requests = {{1, 700}, {300, 500}, {1, 1}, {16, 16}, {0, 9}, {2, 65}};
    row.q_heads = 24;
    row.kv_heads = 1;
    row.k_format = format;
    row.mask.causal = true;
    row.key_slack = 8192;  // no units of 8
    row = appending(row);
    if (runner().device().type == DeviceType::kCuda) {
      const PlanInfo info = runner().plan(attention_problem(row)).info();
      ASSERT_EQ(info.passes.size(), 2U);
      EXPECT_EQ(info.passes[0].config, "sm90-decode-64");
      EXPECT_FALSE(info.fuses_append);
    }
    expect_same(row);
  }
}

/// Prompts and single tokens in one batch, each in its pass.
TEST_P(AppendStep, TwoPasses) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    for (const SplitPolicy policy : kPolicies) {
      AttentionCase row;
      row.name = std::string("passes of ") + format;
      row.requests = {{1, 700}, {300, 500}, {1, 1}, {16, 16}, {0, 9}, {2, 65}};
      row.k_format = format;
      row.mask.causal = true;
      row.policy = policy;
      row = appending(row);
      ASSERT_EQ(runner().plan(attention_problem(row)).info().passes.size(), 2U);
      expect_same(row);
    }
  }
}

TEST_P(AppendStep, RandomProblems) {
  for (std::uint64_t seed = 60000; seed < (reference::kSanitized ? 60010 : 60150); ++seed) {
    AttentionCase row = random_case(seed);
    if (row.plain || row.lists.top_k != 0) continue;
    if (!row.step.appends) row = appending(row);
    expect_same(row);
    if (HasFailure()) return;
  }
}

/// Steps of an engine: one schedule, layers that share their lengths, of which the first, the last or every
/// one advances; the next step counts on.
class EngineSteps {
 public:
  static constexpr int kLayers = 3, kSteps = 20;

  explicit EngineSteps(const Runner& runner) : runner_(runner) {
    AttentionCase row;
    row.requests = {{1, 16}, {2, 60}, {3, 126}};
    row.k_format = "int8-head";
    row.page_size = 16;
    row.mask.causal = true;
    row.slack = 200;
    row = appending(row);
    for (int layer = 0; layer < kLayers; ++layer) {
      row.seed = static_cast<std::uint64_t>(layer) + 1;
      Problem p = make_problem(row);
      Random random(row.seed);
      Cache roomy(p.cache->spec, std::array{100, 200, 300}, random);
      roomy.lengths = p.cache->lengths.clone();
      roomy.pages.fill_bytes(0);  // stored zeros
      p.cache = std::make_unique<Cache>(std::move(roomy));
      layers_.push_back(std::move(p));
    }
  }

  /// `advancing`: the layer that does it, kLayers: all.
  void expect_each_token_in_its_place(int advancing) {
    const Plan plan = runner_.plan(layers_[0]);
    std::vector<Cache> expected;
    for (const Problem& p : layers_) expected.push_back(p.cache->clone());
    std::vector<std::unique_ptr<PlacedRun>> runs;
    for (const Problem& p : layers_) {
      runs.push_back(std::make_unique<PlacedRun>(runner_, p, plan));
      const TensorView& lengths = std::get<PagedKv>(runs[0]->args.kv).lengths;
      std::get<PagedKv>(runs.back()->args.kv).lengths = runs.back()->args.lengths.kv_lengths = lengths;
      runs.back()->args.append.advance = advancing == kLayers || advancing + 1U == runs.size();
    }
    for (int step = 0; step < kSteps; ++step) {
      runs[0]->schedule();
      for (const auto& run : runs) halftone::run(plan, run->args, runs[0]->space());
    }
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      expect_layer(layers_[layer], expected[layer], *runs[layer]);
    }
  }

 private:
  /// The same steps of a layer by append(), and attention after the last one.
  void expect_layer(const Problem& p, Cache& expected, const PlacedRun& run) const {
    Tensor status(DType::kInt32, {1});
    status.fill_bytes(0);
    const Tensor cu = cumulative_queries(p.row);
    AppendArgs args = append_args(p, cu, status);
    args.advance = true;
    for (int step = 0; step < kSteps; ++step) runner_.append(expected, args, status);
    Problem twin = make_problem(p.row);
    twin.row.step = {};
    twin.problem.appends = false;
    twin.cache = std::make_unique<Cache>(std::move(expected));
    const Outputs want = runner_.run(twin), got = run.outputs();
    EXPECT_TRUE(same_bytes(want.out, got.out));
    EXPECT_TRUE(same_bytes(want.lse, got.lse));
    const Tensor pages = p.cache->pages.clone(), lengths = p.cache->lengths.clone();
    run.read(std::get<PagedKv>(run.args.kv).pages, pages);
    run.read(std::get<PagedKv>(run.args.kv).lengths, lengths);
    EXPECT_TRUE(same_bytes(twin.cache->pages, pages));
    EXPECT_TRUE(same_bytes(twin.cache->lengths, lengths));
  }

  const Runner& runner_;
  std::vector<Problem> layers_;
};

TEST_P(AppendStep, StepsOfAnEngine) {
  for (const int advancing : {0, EngineSteps::kLayers - 1, EngineSteps::kLayers}) {
    SCOPED_TRACE("advanced by " + std::to_string(advancing));
    EngineSteps(runner()).expect_each_token_in_its_place(advancing);
  }
}

}  // namespace
}  // namespace halftone::testing
