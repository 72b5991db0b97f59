// How much more than fp32 arithmetic the kernels of the GPU may err.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "testing/cases.h"

namespace halftone::testing {

inline constexpr const char* kUniversalConfig = "sm90-universal";

/// The tensor cores truncate as they accumulate, and signed codes enter with an offset of 128 or 8: logits
/// carry about 1e-5 more error than fp32 arithmetic.
inline constexpr double kLseSlack = 1e-4;

/// P is rounded to 16 bits before it weighs V: half a step of the largest |v|, which an output that averages
/// many values cannot show in its own magnitude. Decode rounds to f16, prefill to the dtype of V.
inline double out_slack(const Problem& p, const PlanInfo& plan) {
  double largest = 0;
  for (const float v : p.v.to_floats()) largest = std::max(largest, std::abs(static_cast<double>(v)));
  const bool bf16 = plan.config.starts_with("sm90-prefill") && p.problem.q_dtype == DType::kBFloat16;
  return std::ldexp(largest, bf16 ? -9 : -12);
}

/// The universal kernel computes in fp32 and converts between base 2 and e: a few roundings of the LSE.
inline constexpr double kUniversalLseSlack = 0x1p-22;

}  // namespace halftone::testing
