// plan() for a GPU: what run() stages for prompts in FP8 arithmetic, and what keeps them off the GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/expect_error.h"
#include "tests/plan/cuda_problem.h"

namespace halftone {
namespace {

/// The pages of cuda_problem() in fp8, in that arithmetic, after `change`.
AttentionProblem fp8_problem(auto change) {
  AttentionProblem p = cuda_problem();
  p.arithmetic = Arithmetic::kFp8;
  spec_of(p).k_format = spec_of(p).v_format = parse_format("fp8");
  change(p);
  return p;
}

/// K and V in any format and any number of rows; V lies in tiles of 16 keys, which begin with those of a
/// request.
TEST(StagedPlan, Fp8StagesTilesOfKeys) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  for (const char* k : {"fp8", "fp8-token-head", "int8-head", "int4-g32", "bf16"}) {
    for (const std::string v :
         {"fp8", "fp8-static-head", "fp8-token-head", "int8-tensor", "int4-g32", "fp16"}) {
      for (const int max_q_len : {1, 1000}) {
        for (const std::int64_t max_total_kv : {0, 20001}) {
          const AttentionProblem p = fp8_problem([&](AttentionProblem& x) {
            x.policy = SplitPolicy::kBatchInvariant;  // V is turned over beforehand, whatever the bounds
            spec_of(x).k_format = parse_format(k);
            spec_of(x).v_format = parse_format(v);
            spec_of(x).rotate_v = max_q_len == 1;
            x.max_q_len = max_q_len, x.max_total_kv = max_total_kv;
          });
          SCOPED_TRACE(std::string(k) + ":" + v);
          EXPECT_EQ(configs_of(p), std::vector<std::string>{"sm90-prefill-192"});
          // Each of four requests may leave 15 places.
          const std::int64_t keys = ((max_total_kv != 0 ? max_total_kv : 4 * 8192) + 4 * 15 + 15) / 16 * 16;
          EXPECT_EQ(staged_of(p).keys, keys);
          // Codes of E4M3 are K where they lie: what is staged of it are scales, unless one is static.
          const std::string format = k;
          const int of_k = format == "fp8" ? 0 : format == "fp8-token-head" ? 4 : 128 + 4;
          // A power of two of each request, and room for one more, where V becomes codes.
          const int units = v == "fp8" || v == "fp8-static-head" ? 0 : 4 * (4 + 1);
          EXPECT_EQ(staged_of(p).bytes, staged_of(p).heads * (keys * (of_k + 128) + units));
        }
      }
    }
  }
}

/// Keys of the heads that run at a time, in the pass of the longest requests.
std::int32_t queue_tokens_of(const AttentionProblem& p) {
  const Plan plan = halftone::plan(p);
  return planning::require_plan(plan).passes().back().schedule.queue_tokens;
}

/// Few rows leave V to a kernel that turns it over itself, where K's codes are multiplied as they are:
/// nothing is staged but stored scales. Long prompts do not.
TEST(StagedPlan, Fp8ReadsVInItsPages) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  if (configs_of(cuda_problem()).back() == "sm90-universal") GTEST_SKIP() << "a build of other head_dims";
  const auto problem = [](const char* k, int max_q_len) {
    return fp8_problem([&](AttentionProblem& x) {
      spec_of(x).k_format = parse_format(k);
      x.max_q_len = max_q_len;
    });
  };
  for (const int max_q_len : {1, 16, 64}) {
    for (const char* k : {"fp8", "fp8-static-head", "fp8-token-head"}) {
      const AttentionProblem p = problem(k, max_q_len);
      SCOPED_TRACE(std::string(k) + " " + std::to_string(max_q_len));
      EXPECT_EQ(configs_of(p), std::vector<std::string>{"sm90-prefill-128"});
      const std::int64_t each = std::string_view(k) == "fp8-token-head" ? 4 : 0;
      EXPECT_EQ(staged_of(p).bytes, staged_of(p).keys * staged_of(p).heads * each);
      EXPECT_EQ(staged_of(p).keys > 0, each > 0);
      if (each > 0) {  // a key is as much to read, whoever turns V over
        AttentionProblem before = p;
        before.policy = SplitPolicy::kBatchInvariant;
        EXPECT_EQ(queue_tokens_of(p), queue_tokens_of(before));
      }
    }
    EXPECT_GT(staged_of(problem("int8-head", max_q_len)).bytes, 128) << "K's codes are made";
  }
  EXPECT_EQ(configs_of(problem("fp8", 8192)), std::vector<std::string>{"sm90-prefill-192"});
  for (const int head_dim : {192, 256}) {
    const AttentionProblem wide = fp8_problem([&](AttentionProblem& x) { spec_of(x).head_dim = head_dim; });
    EXPECT_EQ(configs_of(wide), std::vector<std::string>{"sm90-prefill-128"});
    EXPECT_GT(staged_of(wide).keys, 0) << "no kernel of so many dims does";
  }
  const AttentionProblem widest = fp8_problem([](AttentionProblem& x) { spec_of(x).head_dim = 512; });
  EXPECT_EQ(configs_of(widest), std::vector<std::string>{"sm90-prefill-64"});
}

TEST(StagedPlan, SaysWhatKeepsFp8OffTheGpu) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  const auto refused = [](std::string_view is, auto change) {
    expect_error(
        ErrorCode::kUnsupported,
        {"arithmetic is fp8 and kv is", is,
         "over tensors in bf16 and f16 and caches, head_dim 64, 128, 192, 256 or, without rotate_v, 512",
         "or 192 and 128 of V, Q in bf16 or f16: use 16-bit, or the CPU"},
        [&] { plan(fp8_problem(change)); });
  };
  refused("tensors in f32 with head_dim 128", [](auto& p) { p.kv = KvTensors{DType::kFloat32, 8, 128}; });
  refused("tensors in bf16 with head_dim 96", [](auto& p) { p.kv = KvTensors{DType::kBFloat16, 8, 96}; });
  refused("head_dim 96 and 96 of V", [](auto& p) { spec_of(p).head_dim = 96; });
  refused("head_dim 128 and 64 of V", [](auto& p) { spec_of(p).v_head_dim = 64; });
  refused("V in fp8 with rotate_v with head_dim 512",
          [](auto& p) { spec_of(p).head_dim = 512, spec_of(p).rotate_v = true; });
  refused("q_dtype is f32", [](auto& p) { p.q_dtype = DType::kFloat32; });
}

}  // namespace
}  // namespace halftone
