// Tests on every instruction set that this machine has, not only the best one: Highway's dispatch is forced
// from outside. Include it first, so that HWY_TARGETS are those of the kernels.
#pragma once

#include "cpu/targets.h"
// Before any Highway header.
#include <hwy/highway.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/misuse/adversarial.h"

namespace halftone::testing {

/// The kernels run on `target` as long as this lives.
class ForcedTarget {
 public:
  explicit ForcedTarget(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~ForcedTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
};

/// Bits of the targets that were compiled and that this machine has, best first.
inline std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> result;
  for (std::int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1)
    result.push_back(left & -left);
  return result;
}

inline std::string target_name(const ::testing::TestParamInfo<std::int64_t>& info) {
  return hwy::TargetName(info.param);
}

/// Which have fused multiply-adds, so that half_int8 has the same bits on all of them.
inline bool has_fma(std::int64_t target) {
  return (target & (HWY_NEON | HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL)) != 0;
}

/// Whether its vectors are as long as those of the best one.
inline bool has_lanes_of_the_best(std::int64_t target) {
  constexpr std::int64_t kLong = HWY_AVX3 | HWY_AVX3_DL;
  return ((target & kLong) != 0) == ((targets().front() & kLong) != 0);
}

/// Equal bits, or NaN in both.
inline void expect_same_values(const Tensor& a, const Tensor& b, const std::string& what) {
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const float x = a.get(i), y = b.get(i);
    const bool same = std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y);
    different += same ? 0 : 1;
  }
  EXPECT_EQ(different, 0) << what;
}

inline Outputs run_on(std::int64_t target, const Problem& p) {
  const ForcedTarget forced(target);
  return run_problem(p);
}

/// The outputs on `target`, which are those of the best one.
inline Outputs expect_bits_of_the_best(std::int64_t target, const Problem& p, const std::string& what) {
  const Outputs best = run_problem(p);
  Outputs here = run_on(target, p);
  expect_same_values(best.out, here.out, what + ": out");
  expect_same_values(best.lse, here.lse, what + ": lse");
  return here;
}

inline AttentionCase half_int8_case() {
  AttentionCase row;
  row.arithmetic = "half_int8";
  row.out_dtype = DType::kFloat32;
  row.requests = {{20, 200}, {70, 70}, {1, 129}, {5, 64}};
  return row;
}

/// Requests of more rows than the direct path takes.
inline AttentionCase key_pairs_case() {
  AttentionCase row;
  row.out_dtype = DType::kFloat32;
  row.q_heads = 4;
  row.kv_heads = 1;
  row.requests = {{20, 130}, {70, 70}};
  return row;
}

class Targets : public ::testing::TestWithParam<std::int64_t> {};

}  // namespace halftone::testing
