// plan() for a GPU: which kernel serves what, and what none does. None of it needs a GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "halftone/attention.h"
#include "halftone/format.h"
#include "plan/backend.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/expect_error.h"
#include "tests/plan/decode_problem.h"

namespace halftone {
namespace {

using enum ErrorCode;

/// A plan for a GPU needs none where the number of workers is given.
AttentionProblem cuda_problem() {
  AttentionProblem p = decode_problem();
  p.device = {DeviceType::kCuda, 0};
  p.workers = 132;
  return p;
}

/// Names of the kernels of a problem's passes.
std::vector<std::string> configs_of(const AttentionProblem& p) {
  std::vector<std::string> names;
  const Plan made = plan(p);
  for (const PassInfo& pass : made.info().passes) names.push_back(pass.config);
  return names;
}

bool has_cuda() { return planning::find_backend(DeviceType::kCuda) != nullptr; }

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
    p.arithmetic = Arithmetic::kHalfInt8;
    expect_error(kUnsupported, {"arithmetic is half_int8", "serves 16-bit", "CPU"}, [&] { plan(p); });
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
  EXPECT_EQ(config([](auto& p) { p.max_q_len = 20; }), "sm90-decode-64");
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
  EXPECT_EQ(config([](auto& p) { p.out_dtype = DType::kFloat32; }), "sm90-universal");

  AttentionProblem p = cuda_problem();
  spec_of(p).v_format = parse_format("bf16");
  p.max_q_len = 20;
  const Plan universal = plan(p);
  EXPECT_EQ(universal.info().row_block, 8);
  const std::string text = universal.describe();
  EXPECT_NE(text.find("several times slower than reading memory"), std::string::npos) << text;
  EXPECT_NE(text.find("8 at a time; no other kernel has these formats"), std::string::npos) << text;
}

TEST(CudaPlan, ShortRequestsHaveAPassOfTheirOwn) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto configs = [](int max_q_len, SplitPolicy policy) {
    AttentionProblem p = cuda_problem();
    p.max_q_len = max_q_len;
    p.policy = policy;
    return configs_of(p);
  };
  using Names = std::vector<std::string>;
  using enum SplitPolicy;
  if (configs(1, kFast) == Names{"sm90-universal"}) GTEST_SKIP() << "this build has other head_dims";
  const Names both = {"sm90-decode-8", "sm90-decode-64"};
  EXPECT_EQ(configs(2, kReproducible), Names{"sm90-decode-8"});
  EXPECT_EQ(configs(12, kReproducible), Names{"sm90-decode-48"});
  EXPECT_EQ(configs(13, kReproducible), Names{"sm90-decode-64"});
  EXPECT_EQ(configs(16, kReproducible), Names{"sm90-decode-64"});
  EXPECT_EQ(configs(17, kReproducible), both);
  // Up to 160 packed rows: beyond, keys and values are dequantised for prefill's kernel.
  EXPECT_EQ(configs(40, kReproducible), both);
  const Names staged = {"sm90-decode-8", "sm90-prefill-192"};
  EXPECT_EQ(configs(41, kReproducible), staged);
  EXPECT_EQ(configs(2, kBatchInvariant), Names{"sm90-decode-8"});
  for (const int max_q_len : {3, 13, 40, 41, 1000}) {
    EXPECT_EQ(configs(max_q_len, kBatchInvariant), staged) << "the bound decides nothing";
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
    for (const int head_dim : {64, 128, 256}) {
      for (const DType out : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        for (const int max_q_len : {1, 100}) {
          const AttentionProblem p = plain_problem([&](AttentionProblem& x, KvTensors& kv) {
            x.q_dtype = kv.dtype = dtype;
            x.out_dtype = out;
            x.max_q_len = max_q_len;
            kv.head_dim = head_dim;
          });
          try {
            const std::vector<std::string> names = configs_of(p);
            ASSERT_EQ(names.size(), 1U) << "plain tensors have no kernel for few rows";
            EXPECT_EQ(names[0], head_dim == 256 ? "sm90-prefill-128" : "sm90-prefill-192");
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
                  "head_dim 64, 128 or 256 and V of as many dims", "append them to a cache or use the CPU"},
                 [&] { plan(plain_problem(change)); });
  };
  refused("tensors in f32 with head_dim 128 and 128 of V, q_dtype is bf16",
          [](AttentionProblem&, KvTensors& kv) { kv.dtype = DType::kFloat32; });
  refused("tensors in f32 with head_dim 128 and 128 of V, q_dtype is f32",
          [](AttentionProblem& p, KvTensors& kv) { p.q_dtype = kv.dtype = DType::kFloat32; });
  refused("tensors in bf16 with head_dim 96 and 96 of V",
          [](AttentionProblem&, KvTensors& kv) { kv.head_dim = 96; });
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

/// A prompt of a thousand queries over the quantised pages of cuda_problem(), after `change`.
AttentionProblem prompt_problem(auto change) {
  AttentionProblem p = cuda_problem();
  p.max_q_len = 1000;
  change(p);
  return p;
}

/// Of the pass of the longest requests.
planning::Staged staged_of(const AttentionProblem& p) {
  const Plan made = plan(p);
  const planning::Staged staged = planning::require_plan(made).passes().back().staged;
  EXPECT_EQ(made.info().passes.back().staged_bytes, staged.bytes);
  EXPECT_EQ(made.info().staged_bytes, staged.bytes);
  if (made.info().passes.size() > 1) {
    EXPECT_EQ(made.info().passes.front().staged_bytes, 0);
  }
  return staged;
}

/// Which caches run() dequantises for the kernel of prompts, and which ones it does not.
TEST(CudaPlan, StagesWhatPrefillCannotReadAsItIs) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const auto formats = [](std::string_view k, std::string_view v) {
    return [k, v](AttentionProblem& p) {
      spec_of(p).k_format = parse_format(k);
      spec_of(p).v_format = parse_format(v);
    };
  };
  const auto expect_staged = [](const AttentionProblem& p, bool staged, std::string_view what) {
    EXPECT_EQ(configs_of(p).back(), "sm90-prefill-192") << what;
    EXPECT_EQ(staged_of(p).bytes > 0, staged) << what;
  };
  for (const NamedFormat& named : named_formats()) {
    expect_staged(prompt_problem(formats(named.name, named.name)), named.name != "bf16", named.name);
  }
  expect_staged(prompt_problem(formats("bf16", "int4-g32")), true, "V of 4 bits");
  expect_staged(prompt_problem(formats("int4-g32", "bf16")), true, "no kernel of decode has these");
  const auto bf16 = [&](auto change) {
    return prompt_problem([&](AttentionProblem& p) {
      formats("bf16", "bf16")(p);
      change(p);
    });
  };
  expect_staged(bf16([](auto& p) { spec_of(p).rotate_v = true; }), false, "V rotated");
  expect_staged(bf16([](auto& p) { spec_of(p).rotate_k = true; }), true, "K rotated");
  expect_staged(bf16([](auto& p) { spec_of(p).v_format = parse_format("fp16"); }), true, "V in f16");
  expect_staged(prompt_problem([&](auto& p) { formats("fp16", "fp16")(p), p.q_dtype = DType::kFloat16; }),
                false, "f16 throughout");
  expect_staged(prompt_problem([](auto& p) { p.out_dtype = DType::kFloat32; }), true, "O in f32");
  // What a cache stands for need not fit into f16; V of other dims and Q in f32 have the universal kernel.
  const auto not_staged = [](const AttentionProblem& p, std::string_view config) {
    EXPECT_EQ(configs_of(p).back(), config);
    EXPECT_EQ(staged_of(p).bytes, 0);
  };
  not_staged(prompt_problem([](auto& p) { p.q_dtype = DType::kFloat16; }), "sm90-decode-64");
  not_staged(prompt_problem([](auto& p) { p.q_dtype = DType::kFloat32; }), "sm90-universal");
  not_staged(prompt_problem([](auto& p) { spec_of(p).v_head_dim = 64; }), "sm90-universal");
}

/// Where the bounds decide nothing, what serves prompts must not serve single queries by staging all keys.
TEST(CudaPlan, BatchInvariantSingleQueriesAreNeverStaged) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  using Names = std::vector<std::string>;
  for (const int max_q_len : {1, 1000}) {
    const auto configs = [&](SplitPolicy policy, auto change) {
      return configs_of(prompt_problem([&](AttentionProblem& p) {
        p.max_q_len = max_q_len;
        p.policy = policy;
        change(p);
      }));
    };
    using enum SplitPolicy;
    const auto pair = [](auto& p) { spec_of(p).v_format = parse_format("bf16"); };  // decode has none
    const auto wide = [](auto& p) { p.q_heads = 65, spec_of(p).kv_heads = 1; };     // nor such units
    EXPECT_EQ(configs(kBatchInvariant, pair), Names{"sm90-universal"});
    EXPECT_EQ(configs(kBatchInvariant, wide), Names{"sm90-decode-64"});
    EXPECT_EQ(configs(kFast, pair), Names{max_q_len == 1 ? "sm90-universal" : "sm90-prefill-192"});
    EXPECT_EQ(configs(kFast, wide), Names{max_q_len == 1 ? "sm90-decode-64" : "sm90-prefill-192"});
  }
}

/// As many KV heads at a time as divide them all and fit into 512 MiB, 512 bytes for a key and head.
TEST(CudaPlan, StagedHeadsFitIntoTheirShare) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  struct Row {
    int batch, kv_heads;
    std::int64_t max_total_kv;
    std::int64_t keys;
    int heads, rounds;
  };
  for (const Row& row :
       {Row{4, 8, 0, 32768, 8, 1}, Row{16, 8, 0, 131072, 8, 1}, Row{17, 8, 0, 139264, 4, 2},
        Row{64, 8, 0, 524288, 2, 4}, Row{64, 8, 524287, 524287, 2, 4}, Row{64, 8, 131072, 131072, 8, 1},
        Row{64, 8, 1, 1, 8, 1}, Row{65, 8, 0, 532480, 1, 8}, Row{1024, 8, 0, 8388608, 1, 8},
        Row{1024, 8, 131073, 131073, 4, 2}, Row{32, 6, 0, 262144, 3, 2}, Row{32, 7, 0, 262144, 1, 7},
        Row{1 << 20, 2, 0, INT32_MAX, 1, 2}}) {
    const AttentionProblem p = prompt_problem([&](AttentionProblem& x) {
      x.batch = row.batch;
      x.q_heads = 4 * row.kv_heads;
      spec_of(x).kv_heads = row.kv_heads;
      x.max_total_kv = row.max_total_kv;
    });
    const planning::Staged staged = staged_of(p);
    SCOPED_TRACE(std::to_string(row.batch) + " requests of " + std::to_string(row.max_total_kv));
    EXPECT_EQ(staged.keys, row.keys);
    EXPECT_EQ(staged.heads, row.heads);
    EXPECT_EQ(staged.rounds, row.rounds);
    EXPECT_EQ(staged.bytes, row.keys * row.heads * 512);
    const Plan made = plan(p);
    EXPECT_GE(made.info().workspace_bytes, made.info().schedule_bytes + staged.bytes);
    EXPECT_LE(made.info().schedule_bytes, std::int64_t{100} * (row.batch + 10000))
        << "rows are no part of it";
    const std::int64_t blocks = (4000 + 191) / 192;
    EXPECT_EQ(made.info().max_units, row.batch * row.kv_heads * blocks) << "of all rounds";
  }
}

TEST(CudaPlan, DescribesWhatItStages) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const auto text = [](int batch) {
    return plan(prompt_problem([&](AttentionProblem& p) { p.batch = batch; })).describe();
  };
  const auto has = [](const std::string& all, std::string_view part) {
    EXPECT_NE(all.find(part), std::string::npos) << part << " is not in\n" << all;
  };
  has(text(64),
      "\nstaged     K and V of 2 KV heads at a time, up to 524288 keys: 536870912 bytes of workspace\n");
  has(text(65),
      "\nstaged     K and V of 1 KV head at a time, up to 532480 keys: 272629760 bytes of workspace\n");
  EXPECT_EQ(plan(cuda_problem()).describe().find("\nstaged"), std::string::npos);
}

}  // namespace
}  // namespace halftone
