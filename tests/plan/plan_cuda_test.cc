// plan() for a GPU: which kernel serves what, and what none does. None of it needs a GPU.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "halftone/attention.h"
#include "halftone/format.h"
#include "plan/backend.h"
#include "plan/plan.h"
#include "tests/expect_error.h"
#include "tests/plan/cuda_problem.h"

namespace halftone {
namespace {

using enum ErrorCode;

TEST(CudaPlan, NeedsABuildThatHasIt) {
  if (has_cuda()) GTEST_SKIP() << "this build has CUDA attention";
  expect_error(kUnsupported, {"device is cuda:0", "-DHALFTONE_CUDA=ON"}, [] { plan(cuda_problem()); });
}

TEST(CudaPlan, HasAKernelForEveryPagedProblem) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  for (const NamedFormat& k : named_formats()) {
    for (const NamedFormat& v : named_formats()) {
      for (const DType type : {DType::kFloat32, DType::kFloat16}) {
        for (const int v_head_dim : {0, 256}) {
          AttentionProblem p = cuda_problem();
          spec_of(p).k_format = k.format;
          spec_of(p).v_format = v.format;
          spec_of(p).v_head_dim = v_head_dim;
          p.q_dtype = p.out_dtype = type;
          const Plan made = plan(p);
          if (type == DType::kFloat32 || v_head_dim != 0) {
            EXPECT_EQ(made.info().config, "sm90-universal") << k.name << ":" << v.name;
          }
        }
      }
    }
  }
}

TEST(CudaPlan, RefusesAnArithmeticThatNoKernelHas) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  for (const bool paged : {true, false}) {
    AttentionProblem p = cuda_problem();
    if (!paged) p.kv = KvTensors{DType::kBFloat16, 8, 128};
    p.arithmetic = Arithmetic::kFullInt8;
    expect_error(
        kUnsupported,
        {"arithmetic is full_int8", "CUDA backend serves 16-bit, half_int8 and fp8: use one of these"},
        [&] { plan(p); });
  }
}

TEST(CudaPlan, TakesTheUniversalKernelWhereNoOtherServes) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto config = [](auto change) {
    AttentionProblem p = cuda_problem();
    change(p);
    return plan(p).info().config;
  };
  const std::string usual = config([](AttentionProblem&) {});
  if (usual == "sm90-universal") GTEST_SKIP() << "this build has other head_dims";
  EXPECT_EQ(usual, "sm90-decode-8");
  EXPECT_EQ(config([](auto& p) { p.max_q_len = 16; }), "sm90-decode-64");
  EXPECT_EQ(config([](auto& p) { p.max_q_len = 20; }), "sm90-prefill-128");
  // A pair has no units of more than 16 rows, but it has a kernel.
  EXPECT_EQ(config([](auto& p) {
              spec_of(p).k_format = parse_format("bf16");
              p.max_q_len = 20;
            }),
            "sm90-decode-16");
  EXPECT_EQ(config([](auto& p) { spec_of(p).v_format = parse_format("bf16"); }), "sm90-universal");
  EXPECT_EQ(config([](auto& p) { spec_of(p).k_format = parse_format("int8-token-head-f32"); }),
            "sm90-universal");
  EXPECT_EQ(config([](auto& p) { spec_of(p).v_head_dim = 64; }), "sm90-universal");
  EXPECT_EQ(config([](auto& p) { p.q_dtype = DType::kFloat32; }), "sm90-universal");
  EXPECT_EQ(config([](auto& p) {
              spec_of(p).k_format = parse_format("int8-token-head-f32");
              p.out_dtype = DType::kFloat32;
            }),
            "sm90-universal");
  // Decode writes no O in f32, but prefill does, which reads these codes in their pages.
  EXPECT_EQ(config([](auto& p) { p.out_dtype = DType::kFloat32; }), "sm90-prefill-128");

  AttentionProblem p = cuda_problem();
  spec_of(p).v_format = parse_format("bf16");
  p.max_q_len = 20;
  const Plan universal = plan(p);
  EXPECT_EQ(universal.info().row_block, 8);
  const std::string text = universal.describe();
  EXPECT_NE(text.find("several times slower than reading memory"), std::string::npos) << text;
  EXPECT_NE(text.find("8 at a time; no other kernel has these formats"), std::string::npos) << text;
}

struct UnitShape {
  const char* format = "int8-head";
  int head_dim = 128, group = 16, max_q_len = 1, kv_heads = 1, batch = 16, keys = 8192;
  SplitPolicy policy = SplitPolicy::kReproducible;
};

/// The kernel of requests that are all of max_q_len queries.
std::string config_of(const UnitShape& s) {
  AttentionProblem p = cuda_problem();
  spec_of(p) = KvCacheSpec::separate(parse_format(s.format), parse_format(s.format), s.kv_heads, s.head_dim);
  p.q_heads = s.group * s.kv_heads;
  p.max_q_len = p.min_q_len = s.max_q_len;
  p.batch = s.batch;
  p.max_kv_len = s.keys;
  p.policy = s.policy;
  return plan(p).info().config;
}

TEST(CudaPlan, UpTo16RowsAreTwoUnitsOfFewKeys) {
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
TEST(CudaPlan, ManyRowsAreUnitsOfFewWhereTheseAreFaster) {
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

TEST(CudaPlan, ShortRequestsHaveAPassOfTheirOwn) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto configs = [](int max_q_len, SplitPolicy policy) {
    AttentionProblem p = cuda_problem();
    p.max_kv_len = 2048;  // too few for estimates to be compared
    p.max_q_len = max_q_len;
    p.policy = policy;
    return configs_of(p);
  };
  using Names = std::vector<std::string>;
  using enum SplitPolicy;
  if (configs(1, kFast) == Names{"sm90-universal"}) GTEST_SKIP() << "this build has other head_dims";
  const Names both = {"sm90-decode-8", "sm90-decode-64"};
  EXPECT_EQ(configs(2, kReproducible), Names{"sm90-decode-8"});
  EXPECT_EQ(configs(4, kReproducible), Names{"sm90-decode-8"}) << "few keys: two units";
  EXPECT_EQ(configs(5, kReproducible), Names{"sm90-decode-64"});
  EXPECT_EQ(configs(12, kReproducible), Names{"sm90-decode-64"});
  EXPECT_EQ(configs(16, kReproducible), Names{"sm90-decode-64"});
  EXPECT_EQ(configs(17, kReproducible), both);
  // Up to 160 packed rows: beyond, prefill's kernel reads the codes, or what they are dequantised to.
  EXPECT_EQ(configs(40, kReproducible), both);
  const Names staged = {"sm90-decode-8", "sm90-prefill-192"};
  EXPECT_EQ(configs(41, kReproducible), (Names{"sm90-decode-8", "sm90-prefill-128"}));
  EXPECT_EQ(configs(2000, kReproducible), staged);
  EXPECT_EQ(configs(2, kBatchInvariant), Names{"sm90-decode-8"});
  for (const int max_q_len : {3, 13, 40, 41, 1000}) {
    EXPECT_EQ(configs(max_q_len, kBatchInvariant), staged) << "the bound decides nothing";
  }
}

/// A step of chunks alone launches no kernel for single queries.
/// Where only prefill holds the rows of one query, and would stage the cache for it, decode takes them in
/// several units.
TEST(CudaPlan, SingleQueriesOfManyHeadsAreNotStaged) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  const auto configs = [](const UnitShape& s) {
    AttentionProblem p = cuda_problem();
    spec_of(p) =
        KvCacheSpec::separate(parse_format(s.format), parse_format(s.format), s.kv_heads, s.head_dim);
    p.q_heads = s.group * s.kv_heads;
    p.max_q_len = s.max_q_len;
    p.batch = s.batch;
    p.max_kv_len = s.keys;
    p.policy = s.policy;
    return configs_of(p);
  };
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
  const AttentionProblem p = [] {
    AttentionProblem q = cuda_problem();
    spec_of(q) = KvCacheSpec::separate(parse_format("int8-head"), parse_format("int8-head"), 1, 64);
    q.q_heads = 24, q.max_q_len = 4096, q.policy = SplitPolicy::kBatchInvariant;
    return q;
  }();
  const Plan made = plan(p);
  EXPECT_EQ(made.info().passes[0].max_rows, 24);
  EXPECT_EQ(made.info().passes[1].min_rows, 25);
  EXPECT_EQ(made.info().passes[0].staged_bytes, 0);
  EXPECT_GT(made.info().passes[1].staged_bytes, 0);
}

TEST(CudaPlan, NoPassForShortRequestsWhereNoneIsExpected) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  using enum SplitPolicy;
  for (const char* format : {"bf16", "fp8", "int8-head", "int4-g32"}) {
    AttentionProblem p = cuda_problem();
    spec_of(p).k_format = spec_of(p).v_format = parse_format(format);
    p.q_heads = 32;
    spec_of(p).kv_heads = 8;
    p.batch = 8;
    p.max_kv_len = 2048;
    p.max_q_len = 64;
    const std::vector<std::string> both = configs_of(p);
    ASSERT_EQ(both.size(), 2U) << format;
    p.min_q_len = 2;
    EXPECT_EQ(configs_of(p), both) << "8 rows, which the kernel for few holds: " << format;
    for (const int min_q_len : {3, 64}) {
      p.min_q_len = min_q_len;
      EXPECT_EQ(configs_of(p), std::vector{both.back()}) << format;
    }
    p.policy = kBatchInvariant;
    EXPECT_EQ(configs_of(p).size(), 2U) << format;
  }
}

/// The kernel of the longest requests: 32 query heads over 8, packed rows of a KV head.
std::string kernel_of(std::string_view format, int rows, int batch, int keys,
                      SplitPolicy policy = SplitPolicy::kReproducible) {
  AttentionProblem p = cuda_problem();
  spec_of(p).k_format = spec_of(p).v_format = parse_format(format);
  p.q_heads = 32;
  spec_of(p).kv_heads = 8;
  p.max_q_len = rows / 4;
  p.batch = batch;
  p.max_kv_len = keys;
  p.policy = policy;
  return configs_of(p).back();
}

TEST(CudaPlan, ChunksOverManyKeysHaveTheKernelThatReadsThemSooner) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const std::string prefill = "sm90-prefill-192";
  // 16 bits: decode up to 16 rows, and where units of 8 find K and V in L2.
  EXPECT_EQ(kernel_of("bf16", 32, 1, 2048), "sm90-decode-8");
  EXPECT_EQ(kernel_of("bf16", 20, 1, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 32, 1, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 48, 1, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 64, 1, 4096), prefill);
  EXPECT_EQ(kernel_of("bf16", 64, 1, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 128, 1, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 48, 1, 32768), prefill);
  EXPECT_EQ(kernel_of("bf16", 96, 1, 32768), prefill);
  EXPECT_EQ(kernel_of("bf16", 128, 1, 32768), prefill);
  EXPECT_EQ(kernel_of("bf16", 192, 1, 32768), prefill);
  EXPECT_EQ(kernel_of("bf16", 64, 8, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 64, 1, 131072), prefill);
  EXPECT_EQ(kernel_of("bf16", 64, 8, 131072), prefill);
  // The unit of which there are as many as SMs are kept busy by, and whose rows are not padding.
  const std::string chunks = "sm90-prefill-128";
  EXPECT_EQ(kernel_of("bf16", 192, 1, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 256, 1, 8192), prefill);
  EXPECT_EQ(kernel_of("bf16", 256, 8, 2048), prefill);
  EXPECT_EQ(kernel_of("bf16", 512, 4, 2048), chunks);
  EXPECT_EQ(kernel_of("bf16", 1024, 1, 8192), chunks);
  for (const int rows : {256, 512, 1024}) EXPECT_EQ(kernel_of("bf16", rows, 4, 32768), chunks) << rows;
  for (const int rows : {192, 384, 768, 1536, 8192}) {
    EXPECT_EQ(kernel_of("bf16", rows, 4, 32768), prefill) << rows;
  }
  // Codes: decode reads them once for 64 rows, prefill for 128, and staging them takes as long as prefill
  // takes for about a thousand.
  const std::string packed = "sm90-prefill-128";
  for (const char* format : {"int8-head", "fp8", "int4-g32"}) {
    for (const int batch : {1, 8}) {
      for (const int keys : {8192, 131072}) {
        SCOPED_TRACE(std::string(format) + " " + std::to_string(batch) + " x " + std::to_string(keys));
        EXPECT_EQ(kernel_of(format, 64, batch, keys), "sm90-decode-64");
        EXPECT_NE(kernel_of(format, 192, batch, keys), prefill);
        if (batch * keys > 8192) {
          EXPECT_EQ(kernel_of(format, 512, batch, keys), packed);
        }
        EXPECT_EQ(kernel_of(format, 8192, batch, keys), prefill);
        EXPECT_EQ(kernel_of(format, 512, batch, keys, SplitPolicy::kBatchInvariant), prefill);
      }
    }
    EXPECT_EQ(kernel_of(format, 128, 8, 131072), packed);
    EXPECT_EQ(kernel_of(format, 256, 8, 131072), packed);
  }
  // Of units of which there are as many, the smallest.
  EXPECT_EQ(kernel_of("int4-g32", 32, 8, 8192), "sm90-decode-32");
  for (const int rows : {96, 128}) {
    EXPECT_EQ(kernel_of("int4-g32", rows, 1, 8192), packed) << rows;
    EXPECT_EQ(kernel_of("int8-head", rows, 1, 8192), "sm90-decode-64") << rows;
    EXPECT_EQ(kernel_of("fp8", rows, 1, 8192), "sm90-decode-64") << rows;
  }
  // Bounds decide nothing where bits may not depend on them.
  for (const int keys : {2048, 8192, 131072}) {
    EXPECT_EQ(kernel_of("int8-head", 192, 1, keys, SplitPolicy::kBatchInvariant), prefill);
    EXPECT_EQ(kernel_of("bf16", 64, 1, keys, SplitPolicy::kBatchInvariant), prefill);
    EXPECT_EQ(kernel_of("bf16", 512, 4, keys, SplitPolicy::kBatchInvariant), prefill);
  }
}

/// Plain K and V with head_dim 128 and Q in bf16, after `change`.
AttentionProblem plain_problem(auto change) {
  AttentionProblem p = cuda_problem();
  p.kv = KvTensors{DType::kBFloat16, 8, 128};
  change(p, std::get<KvTensors>(p.kv));
  return p;
}

TEST(CudaPlan, AttendsToPlainTensorsOf16Bits) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  int served = 0;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const auto& [head_dim, v_head_dim] :
         {std::pair{64, 0}, {80, 0}, {96, 96}, {128, 0}, {192, 128}, {192, 0}, {256, 256}, {512, 0}}) {
      for (const DType out : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        for (const int max_q_len : {1, 100}) {
          const AttentionProblem p =
              plain_problem([&, dim = head_dim, v_dim = v_head_dim](AttentionProblem& x, KvTensors& kv) {
                x.q_dtype = kv.dtype = dtype;
                x.out_dtype = out;
                x.max_q_len = max_q_len;
                kv.head_dim = dim;
                kv.v_head_dim = v_dim;
              });
          try {
            const std::vector<std::string> names = configs_of(p);
            ASSERT_EQ(names.size(), 1U) << "plain tensors have no kernel for few rows";
            const bool chunks = head_dim == 128 && max_q_len == 100;  // the smaller of two shapes
            EXPECT_EQ(names[0], p.v_dim() > 256             ? "sm90-prefill-64"
                                : p.v_dim() > 128 || chunks ? "sm90-prefill-128"
                                                            : "sm90-prefill-192")
                << head_dim << ", " << max_q_len;
            ++served;
          } catch (const Error& error) {  // a build of one head_dim
            EXPECT_EQ(error.code(), kUnsupported);
          }
        }
      }
    }
  }
  EXPECT_EQ(served % 12, 0);
  EXPECT_GE(served, 12);
}

TEST(CudaPlan, SaysWhatKeepsPlainTensorsOffTheGpu) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto refused = [](std::string_view is, auto change) {
    expect_error(kUnsupported,
                 {"kv is K and V tensors in", is, "takes tensors in bf16 and f16 with Q alike",
                  "V of as many dims as K or 128 beside 192", "append them to a cache or use the CPU"},
                 [&] { plan(plain_problem(change)); });
  };
  refused("tensors in f32 with head_dim 128 and 128 of V, q_dtype is bf16",
          [](AttentionProblem&, KvTensors& kv) { kv.dtype = DType::kFloat32; });
  refused("tensors in f32 with head_dim 128 and 128 of V, q_dtype is f32",
          [](AttentionProblem& p, KvTensors& kv) { p.q_dtype = kv.dtype = DType::kFloat32; });
  refused("tensors in f32 with head_dim 96 and 96 of V",
          [](AttentionProblem&, KvTensors& kv) { kv.head_dim = 96, kv.dtype = DType::kFloat32; });
  refused("tensors in bf16 with head_dim 192 and 96 of V",
          [](AttentionProblem&, KvTensors& kv) { kv.head_dim = 192, kv.v_head_dim = 96; });
  refused("tensors in bf16 with head_dim 128 and 192 of V",
          [](AttentionProblem&, KvTensors& kv) { kv.v_head_dim = 192; });
  refused("tensors in bf16 with head_dim 128 and 64 of V",
          [](AttentionProblem&, KvTensors& kv) { kv.v_head_dim = 64; });
  refused("head_dim 128 and 128 of V, q_dtype is f16",
          [](AttentionProblem& p, KvTensors&) { p.q_dtype = DType::kFloat16; });
  refused("tensors in f16 with head_dim 128 and 128 of V, q_dtype is bf16",
          [](AttentionProblem&, KvTensors& kv) { kv.dtype = DType::kFloat16; });
}

/// Pages of 16 bits: few rows for decode's kernels, the rest for prefill's.
TEST(CudaPlan, PromptsOverPagesOf16BitsHavePrefill) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  const auto configs = [](auto change) {
    AttentionProblem p = cuda_problem();
    spec_of(p).k_format = spec_of(p).v_format = parse_format("bf16");
    p.max_q_len = 1000;
    change(p);
    return configs_of(p);
  };
  const Names both = configs([](AttentionProblem&) {});
  if (both == Names{"sm90-universal"}) GTEST_SKIP() << "this build has other head_dims";
  const Names expected = {"sm90-decode-8", "sm90-prefill-192"};
  EXPECT_EQ(both, expected);
  EXPECT_EQ(configs([](auto& p) { p.policy = SplitPolicy::kBatchInvariant; }), expected);
  EXPECT_EQ(configs([](auto& p) { spec_of(p).rotate_v = true; }), expected);
  EXPECT_EQ(configs([](auto& p) { p.softcap = 20, p.alibi = p.sinks = true; }), expected);
  EXPECT_EQ(configs([](auto& p) { p.max_q_len = 1; }), Names{"sm90-decode-8"});
  const auto last = [&](auto change) { return configs(change).back(); };
  // What prefill does not serve stays with the others.
  EXPECT_NE(last([](auto& p) { p.q_dtype = DType::kFloat16; }), "sm90-prefill-192");
  EXPECT_NE(last([](auto& p) { spec_of(p).v_head_dim = 64; }), "sm90-prefill-192");
}

}  // namespace
}  // namespace halftone
