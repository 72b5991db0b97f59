// Rotary position embedding (RoFormer, arXiv:2104.09864) in a fixed order of fp32 operations.
#pragma once

#include "format/codec.h"
#include "format/host_device.h"
#include "halftone/cache.h"

namespace halftone::rope {

/// The dims that share angle `i` of `half` = rotary_dim / 2 angles.
struct Pair {
  int first;
  int second;
};
HT_HOST_DEVICE constexpr Pair pair_of(RopePairing pairing, int i, int half) {
  return pairing == RopePairing::kInterleaved ? Pair{2 * i, 2 * i + 1} : Pair{i, i + half};
}

struct Rotated {
  float first;
  float second;
};
/// (x cos - y sin, y cos + x sin): two rounded products, then one rounded sum, never fused.
HT_HOST_DEVICE inline Rotated rotate_pair(float x, float y, float cos, float sin) {
  return {codec::ht_sub(codec::ht_mul(x, cos), codec::ht_mul(y, sin)),
          codec::ht_add(codec::ht_mul(y, cos), codec::ht_mul(x, sin))};
}

/// Rotates the first 2 * half values of `x` in place. cos, sin: f32 [half], the row of the token's position.
HT_HOST_DEVICE inline void rotate(RopePairing pairing, float* x, const float* cos, const float* sin,
                                  int half) {
  if (pairing == RopePairing::kNone) return;
  for (int i = 0; i < half; ++i) {
    const Pair p = pair_of(pairing, i, half);
    const Rotated r = rotate_pair(x[p.first], x[p.second], cos[i], sin[i]);
    x[p.first] = r.first;
    x[p.second] = r.second;
  }
}

}  // namespace halftone::rope
