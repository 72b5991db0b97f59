// plan() for a GPU over latent caches: which kernel serves what, and what none does. None of it needs a GPU.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "halftone/attention.h"
#include "halftone/error.h"
#include "halftone/format.h"
#include "plan/backend.h"
#include "plan/plan.h"
#include "testing/cases.h"
#include "tests/expect_error.h"
#include "tests/higher_bounds.h"
#include "tests/plan/cuda_problem.h"

namespace halftone {
namespace {

using enum ErrorCode;

/// Decode of 64 requests over a latent cache by `heads` query heads, with lists of 2,048 keys, after
/// `change`.
template <class Change>
AttentionProblem latent_problem(std::string_view format, int heads, Change change) {
  AttentionProblem p = cuda_problem();
  const KvFormat f = parse_format(format);
  const bool rotary_v = f.scale_dtype == DType::kFloat8E8M0;
  p.kv = KvCacheSpec::latent(f, rotary_v ? 448 : 512, 64, 64, rotary_v);
  p.q_heads = heads;
  p.batch = 64;
  p.listed.top_k = 2048;
  change(p);
  return p;
}

TEST(CudaLatentPlan, LatentCachesHaveKernelsByHeads) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  const auto same = [](AttentionProblem&) {};
  const auto dense = [](AttentionProblem& p) { p.listed = {}, p.mask.causal = true; };
  for (const auto& [heads, name] : {std::pair{1, "sm90-latent-8"},
                                    {8, "sm90-latent-8"},
                                    {9, "sm90-latent-16"},
                                    {16, "sm90-latent-16"},
                                    {17, "sm90-latent-32"},
                                    {32, "sm90-latent-32"},
                                    {33, "sm90-latent-64"},
                                    {64, "sm90-latent-64"},
                                    {65, "sm90-latent-128"},
                                    {128, "sm90-latent-128"},
                                    {200, "sm90-latent-128"}}) {
    for (const char* format : {"fp8-g128-f32", "bf16"}) {
      const bool padded = name == std::string("sm90-latent-32") && format == std::string("bf16");
      const Names expected{padded ? "sm90-latent-64" : name};
      EXPECT_EQ(configs_of(latent_problem(format, heads, same)), expected) << heads << ", " << format;
      EXPECT_EQ(configs_of(latent_problem(format, heads, dense)), expected) << heads << ", " << format;
    }
    const auto half = [](AttentionProblem& p) { p.q_dtype = DType::kFloat16, p.out_dtype = DType::kFloat32; };
    EXPECT_EQ(configs_of(latent_problem("fp8-g128-f32", heads, half)), Names{name}) << heads;
    const char* const few = heads > 32 ? "sm90-latent-32" : name;
    for (const char* format : {"int8-g64", "int4-g64", "fp8-g64-e8m0"}) {
      EXPECT_EQ(configs_of(latent_problem(format, heads, same)), Names{name}) << heads << " " << format;
      EXPECT_EQ(configs_of(latent_problem(format, heads, dense)), Names{name}) << heads << " " << format;
      // 32 rows at a time.
      EXPECT_EQ(configs_of(latent_problem(format, heads, half)), Names{few}) << heads << " " << format;
    }
  }
  // A listed query is a request of its own; without lists queries share units.
  const auto drafts = [&](int queries, bool listed) {
    return configs_of(latent_problem("fp8-g128-f32", 16, [&](AttentionProblem& p) {
      p.max_q_len = queries;
      if (!listed) dense(p);
    }));
  };
  EXPECT_EQ(drafts(4, true), Names{"sm90-latent-16"});
  EXPECT_EQ(drafts(2, false), Names{"sm90-latent-32"});
  EXPECT_EQ(drafts(4, false), Names{"sm90-latent-64"});
  EXPECT_EQ(drafts(16, false), (Names{"sm90-latent-16", "sm90-latent-128"}));
}

/// Over bf16 the kernel for 64 rows takes 17 to 32, too.
TEST(CudaLatentPlan, FewRowsOf16BitsHaveTheKernelForMore) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  const auto configs = [](int heads, int queries, auto change) {
    return configs_of(latent_problem("bf16", heads, [&](AttentionProblem& p) {
      p.listed = {};
      p.max_q_len = queries;
      p.mask.causal = true;
      change(p);
    }));
  };
  const auto same = [](AttentionProblem&) {};
  for (const auto& [heads, queries] : {std::pair{17, 1},
                                       {24, 1},
                                       {31, 1},
                                       {32, 1},
                                       {12, 2},
                                       {16, 2},
                                       {8, 3},
                                       {10, 3},
                                       {8, 4},
                                       {1, 17},
                                       {1, 32}}) {
    EXPECT_EQ(configs(heads, queries, same), Names{"sm90-latent-64"}) << heads << " x " << queries;
  }
  EXPECT_EQ(configs(16, 1, same), Names{"sm90-latent-16"});
  EXPECT_EQ(configs(8, 2, same), Names{"sm90-latent-16"});
  EXPECT_EQ(configs(1, 8, same), Names{"sm90-latent-8"});
  EXPECT_EQ(configs(32, 2, same), Names{"sm90-latent-64"});
  EXPECT_EQ(configs(21, 3, same), Names{"sm90-latent-64"});
  // Requests without lists may have more rows; with lists each query is one.
  EXPECT_EQ(configs(22, 3, same), (Names{"sm90-latent-32", "sm90-latent-128"}));
  EXPECT_EQ(configs(32, 16, same), (Names{"sm90-latent-32", "sm90-latent-128"}));
  EXPECT_EQ(configs(8, 16, same), (Names{"sm90-latent-8", "sm90-latent-128"}));
  const auto listed = [](auto& p) { p.mask = {}, p.listed.top_k = 2048; };
  for (const int heads : {17, 24, 32}) {
    EXPECT_EQ(configs(heads, 1, listed), Names{"sm90-latent-64"}) << heads;
    EXPECT_EQ(configs(heads, 16, listed), Names{"sm90-latent-64"}) << heads;
  }
  EXPECT_EQ(configs(16, 16, listed), Names{"sm90-latent-16"});
  // A request has the same kernel under every bound.
  const auto invariant = [](auto& p) { p.policy = SplitPolicy::kBatchInvariant; };
  EXPECT_EQ(configs(32, 1, invariant), Names{"sm90-latent-32"});
  EXPECT_EQ(configs(32, 16, invariant), (Names{"sm90-latent-32", "sm90-latent-128"}));
  EXPECT_EQ(configs(16, 2, invariant), (Names{"sm90-latent-16", "sm90-latent-128"}));
  EXPECT_EQ(configs(32, 1, [&](auto& p) { listed(p), invariant(p); }), Names{"sm90-latent-32"});
}

/// Few units of fewer rows: their kernel takes the rows of those for more, since it begins sooner.
TEST(CudaLatentPlan, SmallLatentProblemsHaveTheKernelForFewerRows) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  const auto configs = [](std::string_view format, int heads, int batch, int keys, auto change) {
    return configs_of(latent_problem(format, heads, [&](AttentionProblem& p) {
      p.batch = batch;
      p.listed.top_k = keys;
      change(p);
    }));
  };
  const auto listed = [](AttentionProblem&) {};
  const auto dense = [](AttentionProblem& p) {
    p.max_kv_len = p.listed.top_k;
    p.listed = {};
    p.mask.causal = true;
  };
  const Names l16{"sm90-latent-16"}, l32{"sm90-latent-32"}, l64{"sm90-latent-64"}, l128{"sm90-latent-128"};
  struct Row {
    int heads, batch, keys;
    const Names &names, &copied;  // of lists over codes that are copied
  };
  for (const char* format : {"fp8-g128-f32", "int8-g64", "int4-g64", "fp8-g64-e8m0"}) {
    const bool copies = format != std::string("fp8-g64-e8m0");
    for (const auto& [heads, batch, keys, names, copied] :
         {Row{32, 8, 2048, l16, l16}, {32, 8, 1, l16, l16},      {32, 9, 2048, l32, l32},
          {64, 4, 2048, l16, l16},    {64, 5, 2048, l32, l32},   {64, 6, 2048, l32, l32},
          {64, 8, 2048, l32, l32},    {64, 9, 2048, l64, l64},   {64, 2, 8192, l16, l16},
          {64, 2, 8193, l64, l64},    {64, 4, 100, l16, l16},    {64, 8, 100, l32, l32},
          {64, 9, 100, l64, l64},     {128, 1, 8192, l16, l16},  {128, 2, 2048, l16, l16},
          {128, 2, 1, l16, l16},      {128, 3, 2048, l32, l128}, {128, 4, 2048, l32, l128},
          {128, 4, 1, l32, l128},     {128, 5, 2048, l128, l128}}) {
      const std::string of =
          std::string(format) + ", " + std::to_string(heads) + " heads, " + std::to_string(batch) + " x ";
      EXPECT_EQ(configs(format, heads, batch, keys, listed), copies ? copied : names) << of << keys;
      EXPECT_EQ(configs(format, heads, batch, keys, dense), names) << of << keys;
    }
  }
  EXPECT_EQ(configs("fp8-g128-f32", 64, 2, 2048, [](auto& p) { p.max_q_len = 2; }), l16);
  EXPECT_EQ(configs("fp8-g128-f32", 64, 2, 2048, [](auto& p) { p.max_q_len = 3; }), l32);
  EXPECT_EQ(configs("fp8-g128-f32", 64, 2, 2048, [](auto& p) { p.max_q_len = 4; }), l32);
  EXPECT_EQ(configs("fp8-g128-f32", 64, 2, 2048, [](auto& p) { p.max_q_len = 5; }), l64);
  EXPECT_EQ(configs("fp8-g128-f32", 64, 1, 2048, [](auto& p) { p.policy = SplitPolicy::kBatchInvariant; }),
            l64);
  for (const auto& [heads, batch, keys, by_list, by_table] : {std::tuple{64, 2, 2048, l16, l16},
                                                              {64, 2, 100, l16, l16},
                                                              {64, 3, 2048, l64, l64},
                                                              {64, 2, 8192, l64, l64},
                                                              {40, 2, 2048, l16, l16},
                                                              {40, 4, 2048, l64, l32},
                                                              {40, 4, 100, l64, l32},
                                                              {40, 5, 2048, l64, l64},
                                                              {32, 4, 4096, l16, l16},
                                                              {32, 4, 4097, l64, l64},
                                                              {32, 5, 2048, l64, l64},
                                                              {31, 8, 8192, l64, l16},
                                                              {31, 8, 8193, l64, l64},
                                                              {31, 9, 100, l64, l64},
                                                              {17, 8, 8192, l64, l16}}) {
    const std::string of = std::to_string(heads) + " heads, " + std::to_string(batch) + " x ";
    EXPECT_EQ(configs("bf16", heads, batch, keys, listed), by_list) << of << keys;
    EXPECT_EQ(configs("bf16", heads, batch, keys, dense), by_table) << of << keys;
  }
  EXPECT_EQ(configs("fp8-g128-f32", 16, 1, 2048, [&](auto& p) { dense(p), p.max_q_len = 4; }), l64);
}

/// Lists over codes that have few places together are copied to bf16 in the workspace where tensor copies can
/// bring Q, unless few units of fewer rows are done sooner.
TEST(CudaLatentPlan, FewPlacesOfManyHeadsAreCopied) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto plan_of = [](std::string_view format, int heads, int batch, int top_k, auto change) {
    return plan(latent_problem(format, heads, [&](AttentionProblem& p) {
      p.batch = batch;
      p.listed.top_k = top_k;
      change(p);
    }));
  };
  const auto copied_bytes = [](const Plan& made) { return made.info().staged_bytes; };
  const auto same = [](AttentionProblem&) {};
  struct Row {
    int heads, batch, top_k;
    bool copied;
  };
  int compared = 0;
  for (const char* format : {"fp8-g128-f32", "int8-g64", "int4-g64"}) {
    for (const auto& [heads, batch, top_k, copied] :
         {Row{128, 8, 2048, true}, {128, 8, 2049, false}, {128, 16384, 1, true},  {128, 16385, 1, false},
          {128, 1, 8192, false},  // sm90-latent-16
          {128, 1, 8193, true},    {128, 1, 16384, true}, {128, 1, 16385, false}, {128, 2, 4096, false},
          {128, 3, 100, true},     {192, 5, 3276, true},  {192, 5, 3277, false},  {256, 5, 3276, true},
          {65, 5, 100, false},     {96, 5, 100, false},   {200, 5, 100, false},   {64, 16, 512, true},
          {64, 16, 513, false},    {64, 8, 100, false},  // sm90-latent-32
          {64, 9, 100, true},      {33, 16, 100, false},  {40, 16, 100, false},   {32, 64, 1, false}}) {
      const Plan made = plan_of(format, heads, batch, top_k, same);
      SCOPED_TRACE(std::string(format) + ", " + std::to_string(heads) + " heads, " + std::to_string(batch) +
                   " x " + std::to_string(top_k));
      const std::int64_t bytes = std::int64_t{batch} * top_k * 1156;
      EXPECT_EQ(copied_bytes(made), copied ? bytes : 0);
      // Codes with scales in e8m0 are read where they are, else by kernels with as many rows.
      const Plan other = plan_of("fp8-g64-e8m0", heads, batch, top_k, same);
      EXPECT_EQ(copied_bytes(other), 0);
      const auto shape_of = [](const Plan& x) { return std::pair(x.info().config, x.info().max_partials); };
      if (shape_of(made) != shape_of(other)) continue;
      ++compared;
      const std::int64_t more = made.info().workspace_bytes - other.info().workspace_bytes;
      EXPECT_GE(more, copied ? bytes : 0);
      EXPECT_LT(more, copied ? bytes + 256 : 1);
    }
  }
  EXPECT_GE(compared, 30);
  const auto copied = [&](auto change) {
    return copied_bytes(plan_of("fp8-g128-f32", 128, 4, 1024, change)) != 0;
  };
  EXPECT_TRUE(copied(same));
  EXPECT_TRUE(copied([](auto& p) { p.max_q_len = 4; }));
  EXPECT_FALSE(copied([](auto& p) { p.max_q_len = 5; }));
  EXPECT_FALSE(copied([](auto& p) { p.policy = SplitPolicy::kBatchInvariant; }));
  EXPECT_FALSE(copied([](auto& p) { p.q_dtype = DType::kFloat16; }));
  EXPECT_FALSE(copied([](auto& p) { p.listed.extra_top_k = 7, p.listed.extra = spec_of(p); }));
  EXPECT_FALSE(copied([](auto& p) { p.max_kv_len = 1024, p.listed = {}; }));
  EXPECT_EQ(copied_bytes(plan_of("bf16", 128, 4, 1024, same)), 0);
}

/// A worker of the pair's kernel is two multiprocessors: its schedule has half as many.
TEST(CudaLatentPlan, PairsOfWorkersShareUnits) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto workers = [](int heads, int given) {
    const Plan made =
        plan(latent_problem("fp8-g128-f32", heads, [&](AttentionProblem& p) { p.workers = given; }));
    EXPECT_EQ(made.info().workers, given);
    return made.impl()->passes()[0].schedule.workers;
  };
  EXPECT_EQ(workers(64, 132), 132);
  EXPECT_EQ(workers(128, 132), 66);
  EXPECT_EQ(workers(128, 7), 3);
  EXPECT_EQ(workers(128, 1), 1);
}

/// A second list is for the kernels for few heads, whatever the number of heads.
TEST(CudaLatentPlan, SecondListsAreForTheKernelsForFewHeads) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  const auto second = [](AttentionProblem& p) { p.listed.extra_top_k = 7, p.listed.extra = spec_of(p); };
  EXPECT_EQ(configs_of(latent_problem("fp8-g128-f32", 8, second)), Names{"sm90-latent-8"});
  EXPECT_EQ(configs_of(latent_problem("fp8-g128-f32", 16, second)), Names{"sm90-latent-16"});
  for (const int heads : {32, 64, 128}) {
    EXPECT_EQ(configs_of(latent_problem("fp8-g128-f32", heads, second)), Names{"sm90-latent-32"}) << heads;
    EXPECT_EQ(configs_of(latent_problem("bf16", heads, second)), Names{"sm90-latent-32"}) << heads;
    EXPECT_EQ(configs_of(latent_problem("fp8-g64-e8m0", heads, second)), Names{"sm90-latent-32"}) << heads;
  }
}

/// All kernels that take pages, of few queries a request; with lists nothing is appended.
TEST(CudaLatentPlan, KernelsWriteNewTokens) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  for (const char* format : {"fp8-g128-f32", "bf16", "int8-g64", "int4-g64", "fp8-g64-e8m0"}) {
    for (const int heads : {8, 16, 32, 64, 128}) {
      for (const int queries : {1, 2, 4, 16, 17}) {
        const Plan made = plan(latent_problem(format, heads, [&](AttentionProblem& p) {
          p.listed = {};
          p.mask.causal = true;
          p.max_q_len = queries;
          p.appends = true;
        }));
        SCOPED_TRACE(made.describe());
        const bool fuses = queries <= 16;
        EXPECT_EQ(made.info().fuses_append, fuses);
        EXPECT_EQ(made.describe().find("by the attention kernels") != std::string::npos, fuses);
      }
    }
  }
}

TEST(CudaLatentPlan, SaysWhatKeepsLatentCachesOffTheGpu) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto refused = [](std::string_view format, std::initializer_list<std::string_view> words,
                          auto change) {
    expect_error(kUnsupported, words, [&] { plan(latent_problem(format, 16, change)); });
  };
  constexpr std::string_view kFp8 = "fp8-g128-f32";
  const auto same = [](AttentionProblem&) {};
  refused(kFp8,
          {"listed.extra.k_format is bf16", "the first one, fp8-g128-f32", "merge() the two", "the CPU"},
          [](AttentionProblem& p) {
            p.listed.extra_top_k = 7, p.listed.extra = KvCacheSpec::latent(parse_format("bf16"));
          });
  refused(kFp8, {"alibi is set", "latent caches", "use the CPU"},
          [](AttentionProblem& p) { p.listed = {}, p.alibi = true; });
  refused(kFp8, {"q_dtype is f32", "latent caches in fp8-g128-f32", "Q in bf16 and f16", "convert Q"},
          [](AttentionProblem& p) { p.q_dtype = DType::kFloat32; });
  refused("bf16", {"q_dtype is f16", "latent caches in bf16", "Q in bf16:", "convert Q"},
          [](AttentionProblem& p) { p.q_dtype = DType::kFloat16; });
  refused("int8-head",
          {"kv.k_format is int8-head with 512 latent dims, 64 rotary ones and V of 512",
           "fp8-g128-f32, int8-g64, int4-g64 and bf16 with 512 latent dims", "fp8-g64-e8m0 with 448 and 64",
           "or the CPU"},
          same);
  refused("fp8-g64-e8m0", {"kv.k_format is fp8-g64-e8m0 with 512 latent dims, 64 rotary ones and V of 512"},
          [](AttentionProblem& p) { p.kv = KvCacheSpec::latent(parse_format("fp8-g64-e8m0")); });
  refused("int8-g64", {"listed.extra.k_format is int4-g64", "the first one, int8-g64"},
          [](AttentionProblem& p) {
            p.listed.extra_top_k = 7, p.listed.extra = KvCacheSpec::latent(parse_format("int4-g64"));
          });
  refused("int4-g64", {"q_dtype is f32", "latent caches in int4-g64", "Q in bf16 and f16"},
          [](AttentionProblem& p) { p.q_dtype = DType::kFloat32; });
  refused(kFp8, {"kv.k_format is fp8-g128-f32 with 256 latent dims, 32 rotary ones and V of 256"},
          [](AttentionProblem& p) { p.kv = KvCacheSpec::latent(parse_format("fp8-g128-f32"), 256, 32); });
  refused("bf16", {"kv.k_format is bf16 with 448 latent dims, 64 rotary ones and V of 512"},
          [](AttentionProblem& p) { p.kv = KvCacheSpec::latent(parse_format("bf16"), 448, 64, 64, true); });
  expect_error(kUnsupported, {"listed.top_k is 2048", "caches that store K and V apart", "or the CPU"}, [] {
    AttentionProblem p = cuda_problem();
    p.listed.top_k = 2048;
    plan(p);
  });
}

AttentionProblem problem_on_gpu(const testing::AttentionCase& row) {
  AttentionProblem p = testing::attention_problem(row);
  p.device = {DeviceType::kCuda, 0};
  if (p.workers == 0) p.workers = 132;
  return p;
}
Plan plan_on_gpu(const testing::AttentionCase& row) { return plan(problem_on_gpu(row)); }

/// Names of the kernels of a row of the case table.
std::vector<std::string> configs_on_gpu(const testing::AttentionCase& row) {
  return configs_of(problem_on_gpu(row));
}

/// So that the rows of the case table that have FlashMLA's shapes are tests of its kernels' counterparts.
TEST(CudaLatentPlan, ShapesOfFlashMlaHaveKernels) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  int rows = 0;
  for (const testing::AttentionCase& row : testing::attention_cases()) {
    if (!row.name.starts_with("flashmla-")) continue;
    ++rows;
    for (const std::string& config : configs_on_gpu(row))
      EXPECT_TRUE(config.starts_with("sm90-latent-")) << row.name << ": " << config;
  }
  EXPECT_GT(rows, 100);
}

/// So that the rows of the case table with every order of lists are tests of the kernels for many heads,
/// under bounds for large problems, and of copies under their own, and the one with the longest list is one
/// of a kernel.
TEST(CudaLatentPlan, OrdersOfListsHaveKernelsForManyHeads) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  std::map<std::string, int> rows, copied;
  for (const testing::AttentionCase& row : testing::attention_cases()) {
    const bool one = row.name.find("-h64-") != std::string::npos;
    if (!row.name.starts_with("listed-") || (!one && row.name.find("-h128-") == std::string::npos)) continue;
    const std::string config = one ? "sm90-latent-64" : "sm90-latent-128";
    const Plan large = plan_on_gpu(testing::under_higher_bounds(row));
    EXPECT_EQ(large.info().config, config) << row.name;
    EXPECT_EQ(large.info().passes.size(), 1U) << row.name;
    EXPECT_EQ(large.info().staged_bytes, 0) << row.name;
    ++rows[row.k_format + ", " + config];
    if (plan_on_gpu(row).info().staged_bytes > 0) ++copied[row.k_format];
  }
  EXPECT_EQ(rows.size(), 10U);
  for (const auto& [what, count] : rows) EXPECT_GE(count, 6) << what;
  EXPECT_GE(copied.size(), 2U);  // others have rows that are batch-invariant
  for (const auto& [format, count] : copied) EXPECT_GE(count, 6) << format;
  EXPECT_EQ(configs_on_gpu(testing::find_case("listed-65536-places")),
            std::vector<std::string>{"sm90-latent-8"});
}

/// Half of the random rows over latent caches are such that the GPU has kernels for them.
TEST(CudaLatentPlan, RandomRowsHaveKernels) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  std::map<std::string, int> formats;
  for (std::uint64_t begin = 0; begin < 2000; begin += 250) {
    int latent = 0, served = 0;
    for (std::uint64_t seed = begin; seed < begin + 250; ++seed) {
      const testing::AttentionCase row = testing::random_case(seed);
      if (row.rope_dim == 0) continue;
      ++latent;
      try {
        for (const std::string& config : configs_on_gpu(row)) EXPECT_TRUE(config.starts_with("sm90-latent-"));
        ++served;
        ++formats[row.k_format];
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), kUnsupported) << error.what();
      }
    }
    EXPECT_GE(served, 5) << "of " << latent << " from seed " << begin << " on";
    EXPECT_LT(served, latent) << "others are refused";
  }
  EXPECT_EQ(formats.size(), 5U);
}

}  // namespace
}  // namespace halftone
