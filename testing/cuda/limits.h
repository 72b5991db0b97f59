// How much more than fp32 arithmetic the kernels of the GPU may err.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <variant>

#include "testing/cases.h"

namespace halftone::testing {

inline constexpr const char* kUniversalConfig = "sm90-universal";

/// The tensor cores truncate as they accumulate, and signed codes enter with an offset of 128 or 8: logits
/// carry about 1e-5 more error than fp32 arithmetic.
inline constexpr double kLseSlack = 1e-4;

/// The kernels of latent attention for many heads round scales, and products of codes with them, to f16:
/// logits by 2^-11 of what each group of dims adds, V likewise.
inline bool rounds_codes(const PlanInfo& plan) {
  return plan.config == "sm90-latent-64" || plan.config == "sm90-latent-128";
}
inline double lse_slack(const PlanInfo& plan) { return rounds_codes(plan) ? 2e-3 : kLseSlack; }

/// P is rounded to 16 bits before it weighs V: half a step of the largest |v|, which an output that averages
/// many values cannot show in its own magnitude. Decode rounds to f16, prefill to the dtype of V, the kernels
/// of latent attention to bf16 over bf16.
inline double out_slack(const Problem& p, const PlanInfo& plan) {
  double largest = 0;
  for (const float v : p.v.to_floats()) largest = std::max(largest, std::abs(static_cast<double>(v)));
  const auto* const spec = std::get_if<KvCacheSpec>(&p.problem.kv);
  const bool bf16 = (plan.config.starts_with("sm90-prefill") && p.problem.q_dtype == DType::kBFloat16) ||
                    (spec != nullptr && spec->is_latent() && spec->k_format.dtype == DType::kBFloat16);
  return std::ldexp(largest, bf16 || rounds_codes(plan) ? -9 : -12);
}

/// The universal kernel computes in fp32 and converts between base 2 and e: a few roundings of the LSE.
inline constexpr double kUniversalLseSlack = 0x1p-22;

}  // namespace halftone::testing
