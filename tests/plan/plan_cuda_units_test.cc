// The units that decode takes a query's packed rows in, by shape and bounds. None of it needs a GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "halftone/attention.h"
#include "halftone/format.h"
#include "plan/backend.h"
#include "plan/plan.h"
#include "tests/plan/cuda_problem.h"

namespace halftone {
namespace {

struct UnitShape {
  const char* format = "int8-head";
  int head_dim = 128, group = 16, max_q_len = 1, kv_heads = 1, batch = 16, keys = 8192;
  SplitPolicy policy = SplitPolicy::kReproducible;
};

AttentionProblem problem_of(const UnitShape& s) {
  AttentionProblem p = cuda_problem();
  spec_of(p) = KvCacheSpec::separate(parse_format(s.format), parse_format(s.format), s.kv_heads, s.head_dim);
  p.q_heads = s.group * s.kv_heads;
  p.max_q_len = s.max_q_len;
  p.batch = s.batch;
  p.max_kv_len = s.keys;
  p.policy = s.policy;
  return p;
}

/// The kernel of requests that are all of max_q_len queries.
std::string config_of(const UnitShape& s) {
  AttentionProblem p = problem_of(s);
  p.min_q_len = s.max_q_len;
  return plan(p).info().config;
}

TEST(CudaUnits, UpTo16RowsAreTwoUnitsOfFewKeys) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (config_of({}) == "sm90-universal") GTEST_SKIP() << "this build has other head_dims";
  const char *const eights = "sm90-decode-8", *const whole = "sm90-decode-16";
  EXPECT_EQ(config_of({}), eights);
  EXPECT_EQ(config_of({.group = 9}), eights);
  EXPECT_EQ(config_of({.group = 4, .max_q_len = 4}), eights);
  EXPECT_EQ(config_of({.policy = SplitPolicy::kFast}), eights);
  EXPECT_EQ(config_of({.kv_heads = 4, .batch = 16, .keys = 1024}), eights);
  EXPECT_EQ(config_of({.format = "int4-g32", .batch = 32}), eights);
  for (const char* format : {"bf16", "int8-head"}) {  // prefill could read either where it lies
    EXPECT_EQ(config_of({.format = format, .keys = 1024}), eights);
    EXPECT_EQ(
        config_of({.format = format, .group = 4, .max_q_len = 4, .kv_heads = 8, .batch = 4, .keys = 1024}),
        eights);
  }
  EXPECT_EQ(config_of({.batch = 32}), whole) << "more than 40 MiB";
  EXPECT_EQ(config_of({.kv_heads = 4, .batch = 17, .keys = 1024}), whole)
      << "more units than multiprocessors";
  EXPECT_EQ(config_of({.policy = SplitPolicy::kBatchInvariant}), whole) << "bounds decide nothing";
  EXPECT_EQ(config_of({.head_dim = 64, .batch = 8}), eights);
  EXPECT_EQ(config_of({.head_dim = 64, .batch = 11}), whole);
  EXPECT_EQ(config_of({.format = "fp8", .head_dim = 96, .batch = 4}), eights);
  EXPECT_EQ(config_of({.format = "fp8", .head_dim = 256, .batch = 4}), eights);
  EXPECT_EQ(config_of({.format = "int4-g32", .head_dim = 256, .batch = 4}), whole);
  EXPECT_EQ(config_of({.format = "bf16", .head_dim = 256, .batch = 4}), "sm90-prefill-128");
}

/// Units in which 17 to 64 rows of codes are taken.
TEST(CudaUnits, ManyRowsAreUnitsOfFewWhereTheseAreFaster) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (config_of({}) == "sm90-universal") GTEST_SKIP() << "this build has other head_dims";
  const std::string d8 = "sm90-decode-8", d16 = "sm90-decode-16", d32 = "sm90-decode-32",
                    d64 = "sm90-decode-64";
  struct Row {
    const char* format;
    int head_dim, rows, kv_heads, batch, keys;
    const std::string& config;
  };
  for (const Row& r : {Row{"fp8", 128, 20, 8, 1, 8192, d8},
                       {"fp8", 128, 32, 8, 1, 8192, d8},
                       {"fp8", 128, 36, 8, 1, 8192, d64},  // 72 MiB by units of 8
                       {"fp8", 128, 20, 8, 2, 8192, d64},
                       {"fp8", 128, 32, 8, 4, 1024, d8},
                       {"fp8", 128, 32, 8, 5, 1024, d64},  // more units than multiprocessors
                       {"int8-head", 128, 48, 1, 4, 8192, d8},
                       {"int8-head", 128, 48, 1, 8, 8192, d64},
                       {"int4-g32", 128, 32, 8, 1, 8192, d8},
                       {"int4-g32", 128, 20, 8, 2, 8192, d8},
                       {"int4-g32", 128, 32, 8, 2, 8192, d32},  // 80 MiB
                       {"int4-g32", 128, 20, 8, 8, 8192, d32},
                       {"int4-g32", 128, 48, 8, 8, 8192, d64},
                       {"int8-g32", 128, 20, 8, 1, 8192, d8},
                       {"int8-g32", 128, 20, 8, 16, 8192, d32},
                       {"int8-g32", 128, 48, 8, 16, 8192, d16},
                       {"int4-g32", 64, 20, 8, 16, 8192, d8},  // three units instead of two of 16
                       {"int4-g32", 64, 32, 8, 16, 8192, d16},
                       {"int8-head", 64, 20, 8, 16, 8192, d16},
                       {"fp8", 64, 20, 8, 16, 8192, d32},
                       {"fp8", 64, 48, 8, 16, 8192, d16},
                       {"fp8", 64, 20, 8, 1, 2048, d8},
                       {"fp8", 256, 20, 8, 4, 8192, d16},
                       {"fp8", 256, 20, 8, 16, 8192, d32},
                       {"fp8", 256, 48, 8, 16, 8192, d16},
                       {"fp8", 256, 64, 8, 16, 8192, d32},
                       {"int8-head", 256, 64, 8, 16, 8192, d16}}) {
    const UnitShape shape{r.format, r.head_dim, r.rows, 1, r.kv_heads, r.batch, r.keys};
    EXPECT_EQ(config_of(shape), r.config) << r.format << ", head_dim " << r.head_dim << ", " << r.rows
                                          << " rows, " << r.batch << " x " << r.keys;
  }
}

/// All kernels of decode's table, but that one scale for all heads takes append's own at head_dim 96.
TEST(CudaUnits, KernelsWriteNewTokens) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  int served = 0;
  for (const NamedFormat& named : named_formats()) {
    const KvFormat& format = named.format;
    for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
      if (format.granularity == Granularity::kGroup && head_dim % format.group_size != 0) continue;
      for (const int group : {8, 16, 40}) {
        const std::string name(named.name);
        AttentionProblem p = problem_of({.format = name.c_str(), .head_dim = head_dim, .group = group});
        p.appends = true;
        const Plan made = plan(p);
        if (made.info().config.find("sm90-decode-") != 0) continue;
        ++served;
        EXPECT_EQ(made.info().fuses_append, format.granularity != Granularity::kToken || head_dim != 96)
            << name << ", head_dim " << head_dim << ", " << group << " rows";
      }
    }
  }
  EXPECT_GT(served, 0);
}

/// The new tokens of a draft are written in the kernel where its warps have the time.
TEST(CudaUnits, DraftsAreWrittenByWhomeverTheyCostLess) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (config_of({}) == "sm90-universal") GTEST_SKIP() << "this build has other head_dims";
  const char *const d8 = "sm90-decode-8", *const d64 = "sm90-decode-64";
  struct Case {
    const char* format;
    int group, tokens, kv_heads, batch, keys;
    const char* config;
    bool fuses;
    int head_dim = 128;
    std::int64_t max_total_kv = 0;
  };
  for (const Case& c : {
           Case{"int8-head", 4, 16, 8, 1, 8192, d64, false},
           Case{"int8-head", 4, 16, 8, 2, 8192, d64, false},
           Case{"int8-head", 4, 16, 8, 4, 8192, d64, true},
           Case{"int8-head", 4, 16, 8, 4, 8192, d64, false, 128, 16384},  // of all requests
           Case{"int8-head", 8, 8, 8, 1, 8192, d64, false},
           Case{"int8-head", 8, 8, 8, 2, 8192, d64, true},
           Case{"int8-head", 16, 3, 1, 8, 8192, d64, true},
           Case{"int8-head", 16, 3, 1, 512, 512, d64, false},  // short requests
           Case{"int8-head", 32, 1, 1, 512, 512, d64, true},
           Case{"int8-head", 32, 2, 1, 64, 512, d64, true},
           Case{"int8-head", 16, 8, 8, 1, 6000, d64, true},  // each of two units reads the keys
           Case{"int8-head", 16, 8, 8, 1, 2048, d64, false},
           Case{"int4-g32", 8, 8, 8, 4, 8192, d64, true},
           Case{"int4-g32", 6, 9, 8, 16, 8192, d64, false},
           Case{"int8-head", 1, 16, 8, 1, 8192, d8, false},
           Case{"int8-head", 1, 10, 8, 2, 8192, d8, true},  // likewise two units
           Case{"int8-head", 1, 8, 8, 1, 2048, d8, false},
           Case{"int8-head", 1, 8, 8, 2, 8192, d8, false},
           Case{"int8-head", 1, 8, 8, 3, 8192, d8, true},
           Case{"int8-head", 4, 1, 8, 1, 64, d8, true},
           Case{"int8-head", 4, 2, 8, 1, 8192, d8, true},
           Case{"int8-head", 4, 2, 8, 1, 8192, d8, false, 64},
           Case{"int8-head", 4, 2, 8, 1, 4096, d8, true, 256},
           Case{"bf16", 4, 2, 8, 8, 512, d8, true},
           Case{"fp8", 4, 2, 8, 1, 2048, d8, false},
           Case{"fp8", 4, 2, 8, 8, 512, d8, false},
           Case{"int8-head", 4, 4, 8, 0, 8192, d8, false},  // no requests
       }) {
    AttentionProblem p = problem_of({.format = c.format,
                                     .head_dim = c.head_dim,
                                     .group = c.group,
                                     .max_q_len = c.tokens,
                                     .kv_heads = c.kv_heads,
                                     .batch = c.batch,
                                     .keys = c.keys});
    p.min_q_len = c.tokens;
    p.max_total_kv = c.max_total_kv;
    p.appends = true;
    const PlanInfo info = plan(p).info();
    const std::string name = std::to_string(c.batch) + " x " + std::to_string(c.keys) + ", " +
                             std::to_string(c.tokens) + " tokens of " + std::to_string(c.group) + "/" +
                             std::to_string(c.kv_heads) + " heads, " + c.format + ", " +
                             std::to_string(c.head_dim);
    EXPECT_EQ(info.config, c.config) << name;
    EXPECT_EQ(info.fuses_append, c.fuses) << name;
  }
  AttentionProblem large = problem_of(
      {.format = "bf16", .group = 4, .max_q_len = 1 << 22, .kv_heads = 8, .batch = 256, .keys = 1 << 30});
  large.appends = true;
  EXPECT_FALSE(plan(large).info().fuses_append) << "beyond 64 bits";
}

/// Where only prefill holds the rows of one query, and would stage the cache for it, decode takes them in
/// several units.
TEST(CudaUnits, SingleQueriesOfManyHeadsAreNotStaged) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  const auto configs = [](const UnitShape& s) { return configs_of(problem_of(s)); };
  if (config_of({}) == "sm90-universal") GTEST_SKIP() << "this build has other head_dims";
  const Names d16{"sm90-decode-16"}, d64{"sm90-decode-64"};
  const Names d16_prefill{"sm90-decode-16", "sm90-prefill-192"},
      d64_prefill{"sm90-decode-64", "sm90-prefill-192"};
  for (const SplitPolicy policy : {SplitPolicy::kBatchInvariant, SplitPolicy::kReproducible}) {
    const bool invariant = policy == SplitPolicy::kBatchInvariant;
    SCOPED_TRACE(invariant ? "batch_invariant" : "reproducible");
    UnitShape narrow{.format = "int8-head", .head_dim = 64, .group = 24, .max_q_len = 4096, .batch = 64};
    narrow.policy = policy;
    EXPECT_EQ(configs(narrow), d16_prefill);
    UnitShape wide{.format = "int4-g32", .group = 80, .max_q_len = 4096, .batch = 64};
    wide.policy = policy;
    EXPECT_EQ(configs(wide), d64_prefill);
    UnitShape plain{.format = "bf16", .group = 24, .max_q_len = 4096, .batch = 64};
    plain.policy = policy;
    EXPECT_EQ(configs(plain), Names{"sm90-prefill-192"}) << "read where it lies";
    narrow.max_q_len = wide.max_q_len = 1;
    EXPECT_EQ(configs(narrow), d16);
    EXPECT_EQ(configs(wide), invariant ? d64 : Names{"sm90-prefill-128"})
        << "without bounds none read in its pages";
  }
  const Plan made = plan(problem_of({.format = "int8-head",
                                     .head_dim = 64,
                                     .group = 24,
                                     .max_q_len = 4096,
                                     .policy = SplitPolicy::kBatchInvariant}));
  EXPECT_EQ(made.info().passes[0].max_rows, 24);
  EXPECT_EQ(made.info().passes[1].min_rows, 25);
  EXPECT_EQ(made.info().passes[0].staged_bytes, 0);
  EXPECT_GT(made.info().passes[1].staged_bytes, 0);
}

}  // namespace
}  // namespace halftone
