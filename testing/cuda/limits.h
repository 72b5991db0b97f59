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
/// carry about 1e-5 more error than fp32 arithmetic, or 2^-19 of the largest one.
inline constexpr double kLseSlack = 1e-4;

/// The largest norm of rows of `dim` values.
inline double largest_norm(const Tensor& rows, int dim) {
  double largest = 0, sum = 0;
  std::int64_t i = 0;
  for (const float x : rows.to_floats()) {
    sum = (i++ % dim == 0 ? 0.0 : sum) + static_cast<double>(x) * static_cast<double>(x);
    largest = std::max(largest, sum);
  }
  return std::sqrt(largest);
}

/// What no logit exceeds in magnitude, of the second list's keys, too.
inline double largest_logit(const Problem& p) {
  const int dim = p.row.head_dim;
  const double scale = p.row.scale == 0 ? 1 / std::sqrt(dim) : std::abs(static_cast<double>(p.row.scale));
  double key = largest_norm(p.k, dim);
  if (p.extra != nullptr) key = std::max(key, largest_norm(dequantised(*p.extra).k, dim));
  return scale * largest_norm(p.q, dim) * key;
}

/// The largest |v|, of the second list's cache, too.
inline double largest_value(const Problem& p) {
  const double own = largest_norm(p.v, 1);
  return p.extra == nullptr ? own : std::max(own, largest_norm(dequantised(*p.extra).v, 1));
}

inline bool is_prefill(const PlanInfo& plan) { return plan.config.starts_with("sm90-prefill"); }

/// Kernels to which codes of 4 bits are values rounded to f16, as staged ones are.
inline bool rounds_values(const Problem& p, const PlanInfo& plan) {
  const auto* const spec = std::get_if<KvCacheSpec>(&p.problem.kv);
  return (plan.config == "sm90-decode-64" || is_prefill(plan)) && spec != nullptr &&
         spec->k_format.dtype == DType::kInt4;
}

/// Staged K, like values of 4 bits, is rounded to f16: of each product in a logit up to 2^-11 of it, which
/// add up to a quarter of 2^-11 |q| |k| at most, as they are independent. Of codes one may differ by one
/// where K is asymmetric, which takes two roundings to dequantise. Codes of E4M3 with a power of 2^8 for a
/// scale lose up to 2^-11 of a row's largest value where E4M3 is subnormal, and their sums keep some 13 bits:
/// where all products have one sign the sum is large, and later ones lose their low bits, most at 512 dims.
inline double logit_slack(const Problem& p, const PlanInfo& plan) {
  const bool fp8 = p.problem.arithmetic == Arithmetic::kFp8;
  if (plan.staged_bytes == 0 && !fp8 && !rounds_values(p, plan)) return 0;
  const int dim = p.row.head_dim;
  const double scale = p.row.scale == 0 ? 1 / std::sqrt(dim) : std::abs(static_cast<double>(p.row.scale));
  if (p.problem.arithmetic == Arithmetic::kHalfInt8) {
    const auto* const spec = std::get_if<KvCacheSpec>(&p.problem.kv);
    return spec != nullptr && spec->k_format.asymmetric
               ? scale * largest_norm(p.q, 1) * largest_norm(p.k, 1) / 127
               : 0;
  }
  const double most = largest_logit(p);
  if (fp8) {
    return std::ldexp(most, dim > 256 && p.row.data == Data::kConstant ? -8 : -12) +
           std::ldexp(scale * largest_norm(p.q, dim) * largest_norm(p.k, 1), -11);
  }
  return std::ldexp(most, -13);
}

/// The kernels of latent attention for many heads round scales, and products of codes with them, to f16:
/// logits by 2^-11 of what each group of dims adds, V likewise. So they do parts of cut units. The groups'
/// parts are independent: an eighth of 2^-11 of the largest logit, where that is more than usual.
inline bool rounds_codes(const PlanInfo& plan) {
  return plan.config == "sm90-latent-64" || plan.config == "sm90-latent-128";
}

/// Whether run() copies what lists name before the kernel reads it.
inline bool copies_lists(const AttentionProblem& p, const PlanInfo& plan) {
  return p.is_listed() && plan.staged_bytes > 0;
}

/// Copies are rounded to bf16: the products of a logit by up to 2^-9 each, which are independent, and V by as
/// much as P is.
inline double lse_slack(const Problem& p, const PlanInfo& plan) {
  if (copies_lists(p.problem, plan)) {
    return std::max(4e-3, std::ldexp(largest_logit(p), -12));
  }
  if (rounds_codes(plan)) return std::max(2e-3, std::ldexp(largest_logit(p), -14));
  return std::clamp(std::ldexp(largest_logit(p), -19), kLseSlack, 2e-3) + logit_slack(p, plan);
}

/// Whether V beside staged K is bf16: as it is given, or because f16 might not hold it.
inline bool takes_bf16(const Problem& p) {
  const auto* const spec = std::get_if<KvCacheSpec>(&p.problem.kv);
  const DType v = spec != nullptr ? spec->v_format.dtype : *p.row.plain;
  if (dtype_bits(v) == 16) return v == DType::kBFloat16;
  return !spec->v_format.static_scale() && spec->v_format.scale_dtype != DType::kFloat16;
}

/// Twice as far as weights of many keys are off, in the mean, are those of few, which have all of the weight
/// where logits are larger than those of rows of normal numbers.
inline double weight_steps(const Problem& p) {
  return largest_logit(p) > 2 * std::sqrt(p.row.head_dim) ? 2 : 1;
}

/// P is rounded to 16 bits before it weighs V: half a step of the largest |v|, which an output that averages
/// many values cannot show in its own magnitude, or the whole step. Decode rounds to f16, prefill to the
/// dtype of V, the kernels of latent attention to bf16 over bf16 and over rotary dims that are V; their lists
/// may be of a few keys, which leave the whole step; P times V's scale is a second one, the scale a third if
/// it has more bits than f16; of codes with a min a code times its scale is up to twice the largest value.
/// Staged V is rounded to f16 or bf16, or to E4M3 down to 2^-11 of the largest, and weights are as far off as
/// their logits.
inline double out_slack(const Problem& p, const PlanInfo& plan) {
  const double largest = largest_value(p);
  if (p.problem.arithmetic == Arithmetic::kFp8) return largest * (0x1p-10 + logit_slack(p, plan));
  if (copies_lists(p.problem, plan)) {  // K is rounded, too: weights are off by half of lse_slack()
    return largest * std::max(0x1p-8, std::ldexp(largest_logit(p), -13));
  }
  const auto* const spec = std::get_if<KvCacheSpec>(&p.problem.kv);
  if (plan.staged_bytes > 0) {
    const bool bf16 = takes_bf16(p);
    const bool rounds_v = spec != nullptr && (dtype_bits(spec->v_format.dtype) < 16 || spec->rotate_v);
    return largest * (weight_steps(p) * (bf16 ? 0x1p-9 : 0x1p-12) +
                      (rounds_v ? bf16 ? 0x1p-9 : 0x1p-11 : 0.0) + logit_slack(p, plan));
  }
  if (spec != nullptr && spec->is_latent()) {
    const bool bf16 = spec->k_format.dtype == DType::kBFloat16 || spec->v_dim() > spec->latent_dim();
    const DType scales = spec->k_format.scale_dtype;         // e8m0: powers of two, whose products are exact
    const double terms = spec->k_format.asymmetric ? 2 : 1;  // a code times its scale, beside the min
    const double steps = scales == DType::kFloat8E8M0 ? 1 : scales == DType::kFloat32 ? 3 : 2;
    return largest * (bf16 ? 0x1p-8 : rounds_codes(plan) ? 0x1p-9 : terms * steps * 0x1p-11);
  }
  const bool codes = spec != nullptr && dtype_bits(spec->v_format.dtype) < 16;  // read in their pages, as f16
  const bool bf16 = is_prefill(plan) && p.problem.q_dtype == DType::kBFloat16 && !codes;
  return weight_steps(p) * std::ldexp(largest, bf16 ? -9 : -12) +
         (rounds_values(p, plan) ? largest * (0x1p-12 + logit_slack(p, plan)) : 0);
}

/// The universal kernel computes in fp32, in base 2, in which a logit is rounded once more: by up to 2^-24 of
/// the largest, of which largest_logit() is a bound.
inline double universal_logit_slack(const Problem& p, double most) {
  return std::min(std::ldexp(largest_logit(p), -24), most);
}
/// Converting the LSE back takes a few roundings of it. It may be small where logits are not.
inline double universal_lse_slack(const Problem& p) { return 0x1p-22 + universal_logit_slack(p, 0x1p-18); }
inline double universal_out_slack(const Problem& p) {
  const double value = largest_value(p);
  return std::isfinite(value) ? universal_logit_slack(p, 0x1p-16) * value : 0;
}

}  // namespace halftone::testing
