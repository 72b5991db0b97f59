// plan() for a GPU: which caches run() stages for the kernel of prompts, for which arithmetic, and where.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/expect_error.h"
#include "tests/plan/cuda_problem.h"

namespace halftone {
namespace {

/// Which caches run() dequantises for the kernel of prompts, and which ones it does not.
TEST(StagedPlan, StagesWhatPrefillCannotReadAsItIs) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const auto expect_staged = [](std::string_view k, std::string_view v, bool staged, auto change) {
    for (const DType q_dtype : {DType::kBFloat16, DType::kFloat16}) {
      AttentionProblem p = prompt_problem([&](AttentionProblem& x) {
        spec_of(x).k_format = parse_format(k);
        spec_of(x).v_format = parse_format(v);
        x.q_dtype = q_dtype;
        change(x);
      });
      SCOPED_TRACE(plan(p).describe());
      // What has the types of Q is read as it is.
      const bool as_q = spec_of(p).k_format.dtype == q_dtype && spec_of(p).v_format.dtype == q_dtype &&
                        !spec_of(p).rotate_k;
      EXPECT_EQ(configs_of(p).back() == "sm90-prefill-192", staged || as_q);
      EXPECT_EQ(staged_of(p).bytes > 0, staged && !as_q);
    }
  };
  const auto nothing = [](AttentionProblem&) {};
  for (const NamedFormat& named : named_formats()) {
    expect_staged(named.name, named.name, true, nothing);
  }
  for (const auto& [k, v] : {std::pair{"bf16", "int4-g32"},
                             {"fp8-token-head-f32", "int8-head"},
                             {"int8-token-asym-f32", "int4-static-head-sym"},
                             {"int4-g32", "int8-tensor-asym"},
                             {"bf16", "fp16"},
                             {"int8-head", "fp16"}}) {
    expect_staged(k, v, true, nothing);
  }
  // V that need not lie in f16's range.
  for (const char* v : {"bf16", "int8-token-head-f32", "int4-g64-f32"})
    expect_staged("int8-head", v, true, nothing);
  const auto rotate_k = [](auto& p) { spec_of(p).rotate_k = true; };
  const auto rotate_v = [](auto& p) { spec_of(p).rotate_v = true; };
  expect_staged("fp16", "fp16", true, rotate_k);
  expect_staged("fp16", "fp16", true, rotate_v);
  expect_staged("bf16", "bf16", true, rotate_k);
  expect_staged("bf16", "bf16", true, rotate_v);
  expect_staged("int8-head", "int4-g32", true, [](auto& p) { p.out_dtype = DType::kFloat32; });
  expect_staged("int8-head", "int8-head", false, [](auto& p) { p.q_dtype = DType::kFloat32; });
  expect_staged("int8-head", "int8-head", false, [](auto& p) { spec_of(p).v_head_dim = 64; });
}

/// O of 512 dims is shared by warpgroups, none of which can rotate it back: V is staged as it was.
TEST(StagedPlan, WidePagesWithRotatedVAreStaged) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  for (const int head_dim : {256, 512}) {
    for (const bool rotate_v : {false, true}) {
      const AttentionProblem p = prompt_problem([&](AttentionProblem& x) {
        spec_of(x).head_dim = head_dim;
        spec_of(x).k_format = spec_of(x).v_format = parse_format("bf16");
        spec_of(x).rotate_v = rotate_v;
        x.policy = SplitPolicy::kBatchInvariant;
      });
      if (configs_of(p).back() == "sm90-universal") continue;  // a build of other head_dims
      EXPECT_EQ(configs_of(p).back(), head_dim == 512 ? "sm90-prefill-64" : "sm90-prefill-128");
      EXPECT_EQ(staged_of(p).keys > 0, head_dim == 512 && rotate_v);
    }
  }
}

/// Of a key and head: K and V in 16 bits and a scale, or K as codes with theirs.
TEST(StagedPlan, StagedBytesOfAKey) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  int served = 0;
  for (const auto& [head_dim, bytes, code_bytes] : {std::array{64, 260, 0},
                                                    {80, 324, 0},
                                                    {96, 388, 0},
                                                    {128, 516, 388},
                                                    {192, 772, 580},
                                                    {256, 1028, 772},
                                                    {512, 2052, 1540}}) {
    AttentionProblem p = prompt_problem([](AttentionProblem&) {});
    spec_of(p).head_dim = head_dim;
    if (configs_of(p).back() == "sm90-universal") continue;  // a build of other head_dims
    ++served;
    EXPECT_EQ(staged_of(p).bytes, staged_of(p).keys * staged_of(p).heads * bytes);
    EXPECT_EQ(configs_of(p).back(), head_dim > 256   ? "sm90-prefill-64"
                                    : head_dim > 128 ? "sm90-prefill-128"
                                                     : "sm90-prefill-192");
    p.arithmetic = Arithmetic::kHalfInt8;
    if (code_bytes > 0) {
      EXPECT_EQ(staged_of(p).bytes, staged_of(p).keys * 8 * code_bytes);
    }
  }
  EXPECT_GT(served, 0);
}

/// The int8-head pages of cuda_problem() in half-INT8 arithmetic, after `change`.
AttentionProblem half_int8_problem(auto change) {
  AttentionProblem p = cuda_problem();
  p.arithmetic = Arithmetic::kHalfInt8;
  change(p);
  return p;
}

/// Half-INT8 has one kernel, which takes any number of rows, under every policy.
TEST(StagedPlan, HalfInt8HasThePrefillKernelForAnyRows) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  using Names = std::vector<std::string>;
  int served = 0;
  for (const auto& [head_dim, config] : {std::pair{128, "sm90-prefill-192"},
                                         {192, "sm90-prefill-128"},
                                         {256, "sm90-prefill-128"},
                                         {512, "sm90-prefill-64"}}) {
    AttentionProblem usual = cuda_problem();
    spec_of(usual).head_dim = head_dim;
    if (configs_of(usual).back() == "sm90-universal") continue;  // a build of other head_dims
    ++served;
    for (const SplitPolicy policy :
         {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      for (const int max_q_len : {1, 3, 40, 1000}) {
        for (const char* k : {"int8-head", "int8-tensor", "int4-g32", "fp8", "bf16", "int8-token-head-f32"}) {
          for (const char* v : {"int8-head", "int4-g32", "fp8-static-head", "fp16", "bf16", "int4-g32-f32"}) {
            const AttentionProblem p = half_int8_problem([&, dim = head_dim](AttentionProblem& x) {
              spec_of(x).head_dim = dim;
              spec_of(x).k_format = parse_format(k);
              spec_of(x).v_format = parse_format(v);
              spec_of(x).rotate_v = max_q_len == 40;
              x.q_dtype = max_q_len == 3 ? DType::kFloat16 : DType::kBFloat16;
              x.max_q_len = max_q_len;
              x.policy = policy;
            });
            EXPECT_EQ(configs_of(p), Names{config}) << k << ":" << v << ", " << max_q_len << " queries";
          }
        }
        for (const DType tensors : {DType::kBFloat16, DType::kFloat16}) {
          const AttentionProblem p = half_int8_problem([&, dim = head_dim](AttentionProblem& x) {
            x.kv = KvTensors{tensors, 8, dim};
            x.max_q_len = max_q_len;
            x.policy = policy;
          });
          EXPECT_EQ(configs_of(p), Names{config}) << dtype_name(tensors) << ", " << max_q_len << " queries";
        }
      }
    }
  }
  EXPECT_GT(served, 0);
}

/// What serves prompts does not serve single queries by staging all of their keys, whatever the bounds.
TEST(StagedPlan, SingleQueriesAreNeverStaged) {
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
    const auto expect_apart = [&](const char* single, const std::string& what, auto change) {
      const Names prompts{single, "sm90-prefill-192"};
      for (const SplitPolicy policy : {kBatchInvariant, kFast}) {
        EXPECT_EQ(configs(policy, change), max_q_len == 1 ? Names{single} : prompts) << what;
      }
    };
    for (const char* v : {"fp16", "bf16", "int8-token-head-f32", "int4-g64-asym-f32"}) {  // decode has none
      expect_apart("sm90-universal", v, [&](auto& p) { spec_of(p).v_format = parse_format(v); });
    }
    expect_apart("sm90-universal", "K of 192 dims, V of 128",
                 [](auto& p) { spec_of(p).head_dim = 192, spec_of(p).v_head_dim = 128; });
    for (const int heads : {65, 200}) {
      expect_apart("sm90-decode-64", "more rows than a unit has",
                   [&](auto& p) { p.q_heads = heads, spec_of(p).kv_heads = 1; });
    }
    // To read a cache once for every 8 rows costs more than to stage it: only where bounds must not decide.
    const auto many_heads = [](auto& p) { p.q_heads = 128, spec_of(p).v_format = parse_format("bf16"); };
    EXPECT_EQ(configs(kFast, many_heads), Names{"sm90-prefill-192"});
    const Names apart{"sm90-universal", "sm90-prefill-192"};
    EXPECT_EQ(configs(kBatchInvariant, many_heads), max_q_len == 1 ? Names{"sm90-universal"} : apart);
  }
}

/// Bounds of more keys than can be staged: what only prefill and the universal kernel serve is not refused.
TEST(StagedPlan, BoundsBeyondStagingKeepTheUniversalKernel) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  using Names = std::vector<std::string>;
  AttentionProblem p = prompt_problem([](AttentionProblem& x) {
    spec_of(x).v_format = parse_format("int8-token-head-f32");
    x.batch = 2048;
    x.max_kv_len = 1 << 21;
  });
  EXPECT_EQ(configs_of(p), Names{"sm90-universal"});
  const Names apart{"sm90-universal", "sm90-prefill-192"};
  p.max_prompt_kv = 1'000'000;
  EXPECT_EQ(configs_of(p), apart);
  p.max_total_kv = 1'000'000, p.max_prompt_kv = 0;
  EXPECT_EQ(configs_of(p), apart);
  p.max_total_kv = 0, p.policy = SplitPolicy::kBatchInvariant;  // bounds must not decide
  expect_error(ErrorCode::kResourceExhausted, {"at most 2147483647 staged keys"}, [&] { plan(p); });
}

/// As many KV heads at a time as divide them all and fit into 512 MiB, 516 bytes for a key and head.
TEST(StagedPlan, StagedHeadsFitIntoTheirShare) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  struct Row {
    int batch, kv_heads;
    std::int64_t max_total_kv;
    std::int64_t keys;
    int heads, rounds;
  };
  for (const Row& row :
       {Row{4, 8, 0, 32768, 8, 1}, Row{15, 8, 0, 122880, 8, 1}, Row{16, 8, 0, 131072, 4, 2},
        Row{32, 8, 0, 262144, 2, 4}, Row{64, 8, 260111, 260111, 4, 2}, Row{64, 8, 260112, 260112, 2, 4},
        Row{64, 8, 130055, 130055, 8, 1}, Row{64, 8, 1, 1, 8, 1}, Row{64, 8, 0, 524288, 1, 8},
        Row{1024, 8, 0, 8388608, 1, 8}, Row{1024, 8, 130056, 130056, 4, 2}, Row{32, 6, 0, 262144, 3, 2},
        Row{32, 7, 0, 262144, 1, 7}, Row{1 << 20, 2, INT32_MAX, INT32_MAX, 1, 2}}) {
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
    EXPECT_EQ(staged.bytes, row.keys * row.heads * 516);
    const Plan made = plan(p);
    EXPECT_GE(made.info().workspace_bytes, made.info().schedule_bytes + staged.bytes);
    EXPECT_LE(made.info().schedule_bytes, std::int64_t{100} * (row.batch + 10000))
        << "rows are no part of it";
    const std::int64_t blocks = (4000 + 191) / 192;
    EXPECT_EQ(made.info().max_units, row.batch * row.kv_heads * blocks) << "of all rounds";
  }
}

/// What run() alone works with is no part of what schedule() fills: sums of O beside products of E4M3, in
/// fp32, of the 192 rows of each worker. Three quarters of them are in shared memory.
TEST(StagedPlan, SumsAreNoPartOfTheSchedule) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const AttentionProblem p = prompt_problem([](AttentionProblem& x) {
    x.arithmetic = Arithmetic::kFp8;
    x.policy = SplitPolicy::kBatchInvariant;  // no partial results
    x.workers = 100;
    spec_of(x).k_format = spec_of(x).v_format = parse_format("fp8");
  });
  const PlanInfo info = plan(p).info();
  constexpr std::int64_t kSums = std::int64_t{100} * 192 * 128 * 4 / 4;
  EXPECT_LE(info.schedule_bytes, std::int64_t{100} * (p.batch + 10000));
  const std::int64_t others = info.workspace_bytes - info.schedule_bytes - info.staged_bytes;
  EXPECT_GE(others, kSums);
  EXPECT_LE(others, kSums + kSums / 100);
}

/// 8 prompts of 2,048 tokens beside 64 single queries over 8,192 keys: as much room as all of their keys
/// would take, unless the caller says how many the prompts have. Then it is one round of all heads, as of the
/// prompts alone, in less of a workspace.
TEST(StagedPlan, PromptsBesideSingleQueries) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  constexpr std::int64_t kPrompts = 8 * 2048, kAll = kPrompts + 64 * 8192;
  for (const char* format : {"fp8", "int8-head", "int4-g32"}) {
    for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      const auto step = [&](std::int64_t max_total_kv, std::int64_t max_prompt_kv) {
        return prompt_problem([&](AttentionProblem& x) {
          spec_of(x).k_format = spec_of(x).v_format = parse_format(format);
          x.batch = 72, x.max_q_len = 2048, x.max_kv_len = 8192;
          x.policy = policy;
          x.max_total_kv = max_total_kv, x.max_prompt_kv = max_prompt_kv;
        });
      };
      SCOPED_TRACE(format);
      const auto expect_staged = [&](const AttentionProblem& p, std::int64_t keys, int heads) {
        const planning::Staged staged = staged_of(p);
        EXPECT_EQ(staged.keys, keys);
        EXPECT_EQ(staged.heads, heads);
        EXPECT_EQ(staged.rounds, 8 / heads);
        EXPECT_EQ(staged.bytes, keys * heads * 516);
      };
      ASSERT_EQ(configs_of(step(0, 0)).size(), 2U);
      expect_staged(step(0, 0), 72 * 8192, 1);
      expect_staged(step(kAll, 0), kAll, 1);
      expect_staged(step(kAll, kPrompts), kPrompts, 8);
      expect_staged(step(0, kPrompts), kPrompts, 8);
      expect_staged(step(0, 1), 1, 8);
      EXPECT_LT(plan(step(kAll, kPrompts)).info().workspace_bytes,
                plan(step(kAll, 0)).info().workspace_bytes / 3);
      // That no single queries are expected is a hint: it must not take the prompts' bound away.
      AttentionProblem prompts = step(kAll, kPrompts);
      prompts.min_q_len = 64;
      EXPECT_EQ(configs_of(prompts).size(), 2U);
      const bool said =
          plan(prompts).describe().find("max_prompt_kv counts prompts alone") != std::string::npos;
      EXPECT_EQ(said, policy == SplitPolicy::kReproducible);
      expect_staged(prompts, kPrompts, 8);
      prompts = step(kPrompts, kPrompts);
      prompts.min_q_len = 64;
      EXPECT_EQ(configs_of(prompts).size(), policy == SplitPolicy::kBatchInvariant ? 2U : 1U);
      expect_staged(prompts, kPrompts, 8);
    }
  }
}

/// Where the pass that stages serves single queries, too, their keys take room whatever the prompts have;
/// else they take none.
TEST(StagedPlan, SingleQueriesThatAreStagedHaveRoom) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const auto expect_all = [](const AttentionProblem& p) {
    SCOPED_TRACE(plan(p).describe());
    EXPECT_EQ(configs_of(p), std::vector<std::string>{"sm90-prefill-192"});
    EXPECT_EQ(staged_of(p).keys, p.max_total_kv != 0 ? p.max_total_kv : 4 * 8192);
  };
  for (const std::int64_t max_total_kv : {0, 20000}) {
    const auto bounded = [&](AttentionProblem& p) {
      p.max_total_kv = max_total_kv, p.max_prompt_kv = 700, p.max_q_len = 1000;
    };
    expect_all(half_int8_problem(bounded));
    const AttentionProblem pair = prompt_problem([&](AttentionProblem& p) {
      bounded(p);
      spec_of(p).v_format = parse_format("fp16");  // decode has none
    });
    EXPECT_EQ(configs_of(pair), (std::vector<std::string>{"sm90-universal", "sm90-prefill-192"}));
    EXPECT_EQ(staged_of(pair).keys, 700);
    const AttentionProblem many = prompt_problem([&](AttentionProblem& p) {
      bounded(p);
      p.q_heads = 65, spec_of(p).kv_heads = 1;  // of which decode has two units
    });
    EXPECT_EQ(configs_of(many), (std::vector<std::string>{"sm90-decode-64", "sm90-prefill-192"}));
    EXPECT_EQ(staged_of(many).keys, 700);
  }
}

/// Keys that a pass cannot count are refused, not left out of the result.
TEST(StagedPlan, RefusesMoreKeysThanItCounts) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  for (const std::int64_t max_total_kv : {std::int64_t{0}, std::int64_t{1} << 31}) {
    const std::string given = fmt::format("max_total_kv is {} and", max_total_kv);
    expect_error(ErrorCode::kResourceExhausted,
                 {given, "max_prompt_kv 0 with", "batch * max_kv_len = 8589934592",
                  "sm90-prefill-192 reads at most 2147483647", "the largest sum of a batch's lengths"},
                 [&] {
                   plan(prompt_problem([&](AttentionProblem& p) {
                     p.batch = 1 << 20;
                     p.max_total_kv = max_total_kv;
                   }));
                 });
  }
}

TEST(StagedPlan, DescribesWhatItStages) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const auto text = [](int batch) {
    return plan(prompt_problem([&](AttentionProblem& p) { p.batch = batch; })).describe();
  };
  const auto has = [](const std::string& all, std::string_view part) {
    EXPECT_NE(all.find(part), std::string::npos) << part << " is not in\n" << all;
  };
  has(text(32),
      "\nstaged     K and V of 2 KV heads at a time, up to 262144 keys: 270532608 bytes of workspace\n");
  has(text(65),
      "\nstaged     K and V of 1 KV head at a time, up to 532480 keys: 274759680 bytes of workspace\n");
  EXPECT_EQ(plan(cuda_problem()).describe().find("\nstaged"), std::string::npos);
  AttentionProblem tensors = cuda_problem();
  tensors.kv = KvTensors{DType::kBFloat16, 8, 128};
  tensors.arithmetic = Arithmetic::kHalfInt8;
  tensors.batch = 2;
  tensors.max_kv_len = 1000;
  has(plan(tensors).describe(),
      "\nstaged     K of 8 KV heads at a time, up to 2000 keys: 2112000 bytes of workspace\n");
  tensors.arithmetic = Arithmetic::kFp8;  // requests begin at multiples of 16 keys
  has(plan(tensors).describe(),
      "\nstaged     K and V of 8 KV heads at a time, up to 2032 keys: 4243296 bytes of workspace\n");
}

TEST(StagedPlan, SaysWhatKeepsHalfInt8OffTheGpu) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto refused = [](std::string_view is, auto change) {
    expect_error(ErrorCode::kUnsupported,
                 {"arithmetic is half_int8 and kv is", is, "over tensors in bf16 and f16 and caches,",
                  "head_dim 128, 192, 256 or 512 and V of as many dims, or 192 and 128 of V",
                  "Q in bf16 or f16: use 16-bit, or the CPU"},
                 [&] { plan(half_int8_problem(change)); });
  };
  refused("tensors in f32 with head_dim 128", [](auto& p) { p.kv = KvTensors{DType::kFloat32, 8, 128}; });
  refused("tensors in bf16 with head_dim 64", [](auto& p) { p.kv = KvTensors{DType::kBFloat16, 8, 64}; });
  refused("a cache of K in int8-head with rotate_k and V in int8-head with head_dim 64 and 64 of V",
          [](auto& p) { spec_of(p).rotate_k = true, spec_of(p).head_dim = 64; });
  refused("head_dim 128 and 64 of V", [](auto& p) { spec_of(p).v_head_dim = 64; });
  refused("q_dtype is f32", [](auto& p) { p.q_dtype = DType::kFloat32; });
}

}  // namespace
}  // namespace halftone
