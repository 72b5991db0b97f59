// Attention that appends: the bytes of append(), the bits of append() and then run(), for rows of the case
// table, on every backend.
//
// ctest: 2 parts
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "reference/sanitizer.h"
#include "tests/append_steps.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

/// More keys in the bounds, so that kernels of attention have the time to write a draft's tokens.
constexpr int kKeysToAppendIn = 32768;

class AppendStep : public OnRunners {
 protected:
  /// Where the backend serves the row. What its plan decided, else nothing.
  PlanInfo expect_same(const AttentionCase& row) {
    SCOPED_TRACE(row.name);
    Problem p = make_problem(row);
    if (!serves(p)) return {};
    PlanInfo info = runner().plan(p).info();
    expect_same_step(runner(), std::move(p));
    return info;
  }
  bool is_cuda() const { return runner().device().type == DeviceType::kCuda; }
};
HALFTONE_ON_EVERY_RUNNER(AppendStep);

TEST_P(AppendStep, RowsOfTheTableEqualAppendAndRun) {
  int n = 0, fused = 0;
  for (AttentionCase row : attention_cases()) {
    if (row.plain || row.lists.top_k != 0) continue;
    ++n;
    if (n % (reference::kSanitized ? 8 : 2) != 0 && !row.step.appends) continue;
    if (row.step.appends || n % 8 < 6) row.key_slack = kKeysToAppendIn;
    if (!row.step.appends) row = appending(row, {.slots = n % 3 == 0});
    row.policy = kPoliciesOfSteps[static_cast<std::size_t>(n) % kPoliciesOfSteps.size()];
    fused += expect_same(row).fuses_append;
    if (HasFailure()) return;
  }
  EXPECT_GT(n, 300);
  if (is_cuda()) {
    EXPECT_GT(fused, n / 8);
  }
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
      const int bits = dtype_bits(parse_format(format).dtype);
      row.key_slack = bits == 16 ? 2000 : kKeysToAppendIn;  // more keys of 16 bits would be prefill's
      for (const SplitPolicy policy : kPoliciesOfSteps) {
        if (n++ % 2 != 0 && std::string(format) != "int8-head") continue;
        row.policy = policy;
        const PlanInfo info = expect_same(appending(row));
        // Of more tokens of 4 bits, in units of 64 rows, append's own kernel takes less.
        if (info.config.starts_with("sm90-decode-")) {
          EXPECT_EQ(info.fuses_append, bits > 4 || queries <= 8) << row.name;
        }
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
  for (const char* format :
       {"fp8", "int8-head", "int4-g32", "fp8-token-head", "int8-tensor", "int4-row", "int8-token"}) {
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
      row.policy = kPoliciesOfSteps[i % 2];  // batch-invariant ones are prefill's
      row.key_slack = kKeysToAppendIn;       // and so no units of 8
      row.seed = 300 + i;
      row = appending(row, {.rope = kRopesOfSteps[i % kRopesOfSteps.size()], .slots = n % 4 == 3});
      const PlanInfo info = expect_same(row);
      if (is_cuda()) {
        EXPECT_EQ(info.config, "sm90-decode-64") << row.name;
        // Of more than 8 tokens of int4-g32 and int4-row append's own kernel takes less.
        EXPECT_EQ(info.fuses_append, queries <= 8 || dtype_bits(parse_format(format).dtype) == 8) << row.name;
      }
      if (HasFailure()) return;
    }
  }
}

/// Heads with a last block of 16 dims, and those of which a lane has two chunks.
struct HeadCase {
  const char* format;
  int head_dim, queries, q_heads, kv_heads, unit;  // packed rows
};

/// Every format that decode has kernels for at these head_dims, in units of 8 and of 16 rows; one scale for
/// all KV heads at others, too.
std::vector<HeadCase> head_cases() {
  std::vector<HeadCase> cases;
  for (const int head_dim : {80, 512}) {
    for (const char* format :
         {"bf16", "fp16", "fp8", "fp8-static-head", "fp8-token-head", "int8-tensor", "int8-head", "int8-g32",
          "int8-g64", "int8-g128", "int4-row", "int4-g32", "int4-g64", "int4-g128", "int8-token"}) {
      const KvFormat f = parse_format(format);
      if (f.granularity == Granularity::kGroup && head_dim % f.group_size != 0) continue;
      cases.push_back({format, head_dim, 1, 4, 2, 8});
      cases.push_back({format, head_dim, 7, 2, 1, 8});
      if (head_dim == 512 && dtype_bits(f.dtype) == 16) continue;  // more than 8 rows are prefill's
      cases.push_back({format, head_dim, 1, 28, 2, 16});
      if (f.dynamic_scale()) cases.push_back({format, head_dim, 5, 42, 14, 16});
    }
  }
  for (const int head_dim : {64, 192, 256}) cases.push_back({"int8-token", head_dim, 2, 16, 8, 8});
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
    // Time to write the tokens, but no larger units.
    row.key_slack = c.head_dim != 512 ? 24000 : dtype_bits(parse_format(c.format).dtype) == 16 ? 1880 : 3750;
    row.policy = kPoliciesOfSteps[c.q_heads == 28 ? 2 : i % 2];  // batch-invariant: units of 16
    row.seed = 500 + i;
    const std::array rope_dims = {c.head_dim, 0, c.head_dim == 80 ? 32 : 384};
    row = appending(row, {.dtype = n % 2 == 0 ? DType::kBFloat16 : DType::kFloat16,
                          .rope = kRopesOfSteps[i % kRopesOfSteps.size()],
                          .slots = n % 7 == 3,
                          .rope_dims = rope_dims[i / 3 % rope_dims.size()]});
    const PlanInfo info = expect_same(row);
    if (is_cuda()) {
      EXPECT_EQ(info.config, "sm90-decode-" + std::to_string(c.unit)) << row.name;
      EXPECT_TRUE(info.fuses_append) << row.name;
    }
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
    const PlanInfo info = expect_same(row);
    if (is_cuda()) {
      ASSERT_EQ(info.passes.size(), 2U);
      EXPECT_EQ(info.passes[0].config, "sm90-decode-64");
      EXPECT_FALSE(info.fuses_append);
    }
  }
}

/// Prompts and single tokens in one batch, each in its pass.
TEST_P(AppendStep, TwoPasses) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    for (const SplitPolicy policy : kPoliciesOfSteps) {
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
    if (seed % 2 == 0) row.key_slack = kKeysToAppendIn;
    expect_same(row);
    if (HasFailure()) return;
  }
}

TEST_P(AppendStep, StepsOfAnEngine) {
  AttentionCase row;
  row.k_format = "int8-head";
  expect_steps_of_an_engine(runner(), row, 20);
}

}  // namespace
}  // namespace halftone::testing
