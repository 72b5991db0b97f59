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
  EXPECT_EQ(plan(p).info().config, "sm90-prefill-192");  // staged once, where that would read it ten times
  p.max_kv_len = 64;
  const Plan universal = plan(p);
  EXPECT_EQ(universal.info().row_block, 8);
  const std::string text = universal.describe();
  EXPECT_NE(text.find("several times slower than reading memory"), std::string::npos) << text;
  EXPECT_NE(text.find("8 at a time; no other kernel reads these formats"), std::string::npos) << text;
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
  EXPECT_EQ(last([](auto& p) { p.q_dtype = DType::kFloat16; }), "sm90-prefill-192");  // staged
  // What prefill does not serve stays with the others.
  EXPECT_NE(last([](auto& p) { spec_of(p).v_head_dim = 64; }), "sm90-prefill-192");
}

}  // namespace
}  // namespace halftone
