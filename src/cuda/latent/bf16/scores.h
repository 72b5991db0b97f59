// Logits and probabilities of a step: S = Q K^T and its softmax, by the warpgroup whose step it is.
#pragma once

#include "cuda/attention/logits.h"
#include "cuda/device/reduce.h"
#include "cuda/device/wgmma.h"
#include "cuda/latent/bf16/traits.h"

namespace halftone::cuda::bf16 {

inline constexpr int kS = kBlockTokens / 2;  // registers of a lane
using Logits = float[kS];
/// P as A fragments, of 16 tokens each.
using Probabilities = std::uint32_t[kTiles][4];
// What logits are relative to, the offset, moves only where a logit is so much larger: most steps rescale
// nothing. The first one puts P near 1.
inline constexpr float kLargestLog2 = 15.0f;
inline constexpr float kEmpty = -3.402823466e38f;  // finite, so that masked logits give P = 0

/// Columns of Q as fragments, the last ones in the order that S takes them in.
using QueryFragments = std::uint32_t[kFragmentColumns][4][4];
inline constexpr int kFirstFragment = kAllColumns - kFragmentColumns;

/// By a warp: those of its rows.
__device__ inline void load_query_fragments(const Shared& s, int warp, int lane, QueryFragments& q) {
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kFragmentColumns; ++i) {
    const std::uint32_t column = shared_address(s.q[column_at(kFirstFragment + i)]);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_matrices(column + place_in_column(row, 2 * step + lane / 16), q[i][step]);
    }
  }
}

/// S of a step as its columns arrive. Returns which tokens are there.
template <LatentBf16Config C>
__device__ inline uint2 multiply(Shared& s, const StepPlace& at, const QueryFragments& fragments, Logits& x) {
  const int stage = at.stage();
  const std::uint64_t q = swizzled_matrix(uniform(shared_address(s.q)));
  const std::uint32_t k = uniform(shared_address(&s.kv[stage]));
  uint2 live;
#pragma unroll
  for (int i = 0; i < kAllColumns; ++i) {
    if (i == 0 || i == kHalfColumns) {
      barrier_wait(shared_address(&s.kv_full[stage][i / kHalfColumns]), at.parity());
      if (C.listed) fence_async_shared();                                 // no tensor copy brought them
      if (i == 0) live = *reinterpret_cast<const uint2*>(s.live[stage]);  // while shared memory answers soon
      wgmma_begin();
    }
    const int column = column_at(i);
    const std::uint64_t keys = swizzled_matrix(k, 16, group_stride(column)) + column_in_stage(column) / 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t rows = q + column * (kColumnBytes / 16) + step * 2;
      if (i == 0 && step == 0) {
        wgmma_first<C.dtype>(x, rows, keys);
      } else if (i < kFirstFragment) {
        wgmma_add<C.dtype>(x, rows, keys + step * 2);
      } else {
        wgmma_add<C.dtype>(x, fragments[i < kFirstFragment ? 0 : i - kFirstFragment][step], keys + step * 2);
      }
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  pin(x);
  return live;
}

/// Softcap, and a factor that is not positive, which the exponent does not take.
__device__ inline void cap(const AttentionParams& p, Logits& x) {
  cap_logits<RowsAsM>(
      p, Softcap(p), [&](int) { return p.scale_log2; }, x);
}
/// Tokens of a list, a bit each.
__device__ inline void mask_skipped(Logits& x, const uint2& live, int lane) {
  const std::uint32_t bits[2] = {live.x >> lane % 4 * 2, live.y >> lane % 4 * 2};
#pragma unroll
  for (int i = 0; i < kS; ++i) {
    if (!(bits[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1)) x[i] = kMinus;
  }
}
/// Raises the offsets of rows whose logits, times `factor`, ask for it.
__device__ inline void raise(const Logits& x, float factor, float (&offset)[2]) {
  float even[2] = {x[0], x[2]}, odd[2] = {x[1], x[3]};  // two chains of a row: shorter ones
#pragma unroll
  for (int i = 4; i < kS; i += 2) {
    const int r = i / 2 % 2;
    even[r] = fmaxf(even[r], x[i]), odd[r] = fmaxf(odd[r], x[i + 1]);
  }
  float most[2] = {fmaxf(even[0], odd[0]), fmaxf(even[1], odd[1])};
  const bool exceeds =
      fmaf(most[0], factor, -offset[0]) > kLargestLog2 || fmaf(most[1], factor, -offset[1]) > kLargestLog2;
  if (!__any_sync(~0u, exceeds)) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = largest_of_lanes<1, 4>(most[r]);
    if (fmaf(most[r], factor, -offset[r]) > kLargestLog2) offset[r] = most[r] * factor;
  }
}

/// P of a step, to shared memory and as fragments; adds it up.
__device__ inline void exponentiate(Logits& x, float factor, const float (&offset)[2], float (&sum)[2],
                                    std::uint32_t rows, int lane, Probabilities& prob) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 8 * tile; i < 8 * tile + 8; ++i) {
      x[i] = exp2_approx(fmaf(x[i], factor, -offset[i / 2 % 2]));
      sum[i / 2 % 2] += x[i];
    }
    const float* y = x + 8 * tile;
#pragma unroll
    for (int i = 0; i < 4; ++i) prob[tile][i] = pack_bf16x2(y[2 * i], y[2 * i + 1]);
    store_matrices(rows + ((2 * tile + lane / 16) ^ lane % 8) * 16, prob[tile][0], prob[tile][1],
                   prob[tile][2], prob[tile][3]);
  }
}

}  // namespace halftone::cuda::bf16
