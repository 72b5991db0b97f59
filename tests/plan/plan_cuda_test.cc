// plan() for a GPU: which kernel serves what, and what none does. None of it needs a GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "halftone/attention.h"
#include "halftone/format.h"
#include "plan/backend.h"
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
    std::vector<std::string> names;
    for (const PassInfo& pass : plan(p).info().passes) names.push_back(pass.config);
    return names;
  };
  using Names = std::vector<std::string>;
  using enum SplitPolicy;
  if (configs(1, kFast) == Names{"sm90-universal"}) GTEST_SKIP() << "this build has other head_dims";
  const Names both = {"sm90-decode-8", "sm90-decode-64"};
  EXPECT_EQ(configs(2, kReproducible), Names{"sm90-decode-8"});
  EXPECT_EQ(configs(12, kReproducible), Names{"sm90-decode-48"});
  EXPECT_EQ(configs(13, kReproducible), both);
  EXPECT_EQ(configs(2, kBatchInvariant), Names{"sm90-decode-8"});
  EXPECT_EQ(configs(3, kBatchInvariant), both);
  EXPECT_EQ(configs(13, kBatchInvariant), both);
}

TEST(CudaPlan, AttendsToPagesOnly) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA attention";
  AttentionProblem p = cuda_problem();
  p.kv = KvTensors{DType::kBFloat16, 8, 128};
  expect_error(kUnsupported, {"kv is K and V tensors in bf16", "paged caches only", "use the CPU"},
               [&] { plan(p); });
}

}  // namespace
}  // namespace halftone
