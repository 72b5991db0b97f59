// From a scaled product to a base-2 logit: softcap, ALiBi, mask, in this order.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {

/// Whether logits are more than scaled products, wherever their keys are.
__device__ inline bool caps_or_biases(const AttentionParams& p) {
  return p.softcap > 0.0f || p.alibi_slopes != nullptr;
}

/// softcap * tanh(x / softcap) for base-2 logits; only where p.softcap > 0.
struct Softcap {
  float cap, inverse;  // cap in base 2; 2 log2(e) / cap

  __device__ explicit Softcap(const AttentionParams& p)
      : cap(p.softcap * kLog2e), inverse(p.softcap > 0.0f ? 2.0f * kLog2e / cap : 0.0f) {}

  /// By tanh(y) = 1 - 2 / (e^2y + 1): about 2^-20 of the cap off.
  __device__ float operator()(float x) const {
    return cap - cap * __fdividef(2.0f, exp2_approx(x * inverse) + 1.0f);
  }
  /// To fp32's precision.
  static __device__ float exact(const AttentionParams& p, float x) {
    return p.softcap * kLog2e * tanhf(x * kLn2 / p.softcap);
  }
};

/// The keys before `end` that a row sees.
struct VisibleKeys {
  int from, last;
  unsigned count;

  __device__ VisibleKeys(const AttentionParams& p, int position, int end)
      : from(position - p.window_left), last(min(end - 1, position + p.causal_right)) {
    count = last < from ? 0u : last - from + 1u;
  }
  __device__ bool has(int key) const { return static_cast<unsigned>(key - from) < count; }
};

/// A logit of a key `away` from the row's position, with ALiBi's share; `slope` in base 2.
__device__ inline float biased(float logit, float slope, int away) { return logit - slope * abs(away); }
__device__ inline float biased(const RowPlace& place, float logit, int key) {
  return biased(logit, place.slope, place.position - key);
}

}  // namespace halftone::cuda
