// The computing role of the decode kernel, tile by tile: S = K Q^T, softmax, O += V^T P^T.
#pragma once

#include "cuda/decode_warp.h"

namespace halftone::cuda {

/// x = raw products of the tile's tokens g, g + 8 (x[0..1], x[2..3]) with columns 2t, 2t + 1.
template <DecodeConfig C>
__device__ inline void Warp<C>::scores(const DecodeParams& p, const std::uint8_t* tile,
                                       float (&x)[N][4]) const {
  const Part<C.k> part{p.k};
  const int groups = part.template groups<kBlocks>();
  const std::uint8_t* scales = tile + p.cache.k_param_offset;
  const std::uint8_t* mins = scales + kTileTokens * groups * 2;
  const std::uint32_t flip = part.asymmetric() ? 0u : 0x00800080u;
  constexpr bool kPerBlock = C.k.mode == ScaleMode::kBlock;
  K k;
  k.load(tile, lane);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = kPerBlock ? 0.0f : bias[n][i % 2];
  }
  // Scales of tokens g and g + 8: all groups at once for a fixed part, else (registers) block by block.
  constexpr int kScales = kPerBlock && C.k.fixed ? kBlocks : 1;
  float low[kScales], high[kScales];
  if constexpr (C.k.mode == ScaleMode::kToken || kScales > 1) {
#pragma unroll
    for (int b = 0; b < kScales; ++b) {
      low[b] = part.load(scales, g * groups + (kPerBlock ? part.group_of(b) : 0));
      high[b] = part.load(scales, (g + 8) * groups + (kPerBlock ? part.group_of(b) : 0));
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float dot[N][4];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kBlockBias) {
          dot[n][i] = bias[n][i % 2] * block_sums[(n * 8 + i % 2) * kBlocks + b];
        } else {
          dot[n][i] = kPerBlock ? 0.0f : x[n][i];
        }
      }
    }
    if constexpr (kPerBlock && kScales == 1) {
      low[0] = part.load(scales, g * groups + part.group_of(b));
      high[0] = part.load(scales, (g + 8) * groups + part.group_of(b));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      std::uint32_t a[4];
      k.fragment(b, step, flip, a);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (b < kHeldBlocks) {
          multiply_k(dot[n], a, q[b % kHeldBlocks][step][n][0], q[b % kHeldBlocks][step][n][1]);
        } else {
          const uint4 v = q_high[(n * kBlocks + b) * 32];
          multiply_k(dot[n], a, step == 0 ? v.x : v.z, step == 0 ? v.y : v.w);
        }
        if (q_low != nullptr) {
          const uint4 v = q_low[(n * kBlocks + b) * 32];
          multiply_k(dot[n], a, step == 0 ? v.x : v.z, step == 0 ? v.y : v.w);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] =
            kPerBlock ? fmaf(i < 2 ? low[b % kScales] : high[b % kScales], dot[n][i], x[n][i]) : dot[n][i];
      }
    }
  }
  if constexpr (C.k.mode == ScaleMode::kToken) {
    const float min_low = part.asymmetric() ? part.load(mins, g) * 0x1p-24f : 0.0f;
    const float min_high = part.asymmetric() ? part.load(mins, g + 8) * 0x1p-24f : 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] *= i < 2 ? low[0] : high[0];
        if (part.asymmetric()) x[n][i] = fmaf(i < 2 ? min_low : min_high, total[n][i % 2], x[n][i]);
      }
    }
  }
  if constexpr (kPerBlock) {
    if (part.asymmetric()) {  // S += mins * sums of Q: one k-step over groups, 4 (i / 2) + t in register i
      std::uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = 4 * (i / 2) + t, token = g + 8 * (i % 2);
        const bool never = C.k.fixed && 4 * (i / 2) >= kBlocks / C.k.group_blocks;
        a[i] = !never && group < groups ? part.load_twice(mins, token * groups + group) : 0u;
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float dot[4] = {};
        mma_f16(dot, a, q_sums[0][n], q_sums[1][n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = fmaf(dot[i], 0x1p-24f, x[n][i]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[n][i] *= kHoldsFactor ? factor[n % (kHoldsFactor ? N : 1)][i % 2] : factors[n * 8 + i % 2];
    }
  }
}

/// Softcap, ALiBi and mask of the base-2 logits of the tile that begins at `token`.
template <DecodeConfig C>
__device__ inline void Warp<C>::modify(const DecodeParams& p, const typename Traits::Queries& queries,
                                       int token, int end, float (&x)[N][4]) const {
  const float cap = p.softcap * kLog2e, inverse_cap = p.softcap > 0.0f ? 2.0f * kLog2e / cap : 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const RowPlace place = queries.places[first_row + n * 8 + 2 * t + c];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = token + g + 8 * half;
        float& logit = x[n][2 * half + c];
        if (p.softcap > 0.0f) {  // tanh(y) = 1 - 2 / (e^2y + 1)
          logit = cap - cap * __fdividef(2.0f, exp2_approx(logit * inverse_cap) + 1.0f);
        }
        const bool visible =
            key < end && key <= place.position + p.causal_right && key >= place.position - p.window_left;
        logit = visible ? logit - place.slope * abs(place.position - key) : kMinus;
      }
    }
  }
}

/// Raises the maxima if a logit exceeds one by more than kLazyRescale, then turns logits into probabilities.
template <DecodeConfig C>
__device__ inline void Warp<C>::rescale(float (&x)[Traits::kStepTiles][N][4]) {
  bool exceeds = false;
  float top[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top[n][c] = fmaxf(x[0][n][c], x[0][n][2 + c]);
#pragma unroll
      for (int i = 1; i < Traits::kStepTiles; ++i)
        top[n][c] = fmaxf(top[n][c], fmaxf(x[i][n][c], x[i][n][2 + c]));
      exceeds |= top[n][c] > max[n][c] + kLazyRescale;
    }
  }
  if (__any_sync(~0u, exceeds)) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int i = 4; i < 32; i *= 2) top[n][c] = fmaxf(top[n][c], __shfl_xor_sync(~0u, top[n][c], i));
        // Only where it is needed, so that a row never depends on the rows beside it.
        const float raised = top[n][c] > max[n][c] + kLazyRescale ? top[n][c] : max[n][c];
        const float weight = raised == kMinus ? 1.0f : exp2_approx(max[n][c] - raised);
        max[n][c] = raised;
        sum[n][c] *= weight;
        extra[n][c] *= weight;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            out[b][j][n][c] *= weight;
            out[b][j][n][2 + c] *= weight;
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float base = max[n][c] == kMinus ? 0.0f : max[n][c];
#pragma unroll
      for (int i = 0; i < Traits::kStepTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& value = x[i][n][2 * half + c];
          value = exp2_approx(value - base);
          sum[n][c] += value;
        }
      }
    }
  }
}

/// O^T += V^T P^T over one tile. Tokens from `dead_from` on (16: none) are not live: nothing of theirs may be
/// used.
template <DecodeConfig C>
__device__ inline void Warp<C>::accumulate(const DecodeParams& p, const std::uint8_t* tile, int dead_from,
                                           float (&x)[N][4]) {
  constexpr bool kBf16 = C.v.dtype == DType::kBFloat16;
  std::uint32_t prob[N][2], prob_low[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float first = x[n][2 * half], second = x[n][2 * half + 1];
      prob[n][half] = transpose8x8(kBf16 ? pack_bf16x2(first, second) : pack_f16x2(first, second));
      if constexpr (kSplitP) {
        prob_low[n][half] = transpose8x8(pack_bf16x2(first - __bfloat162float(__float2bfloat16_rn(first)),
                                                     second - __bfloat162float(__float2bfloat16_rn(second))));
      }
    }
  }
  V v;
  v.load(tile + p.cache.v_data_offset, lane);
  if constexpr (C.v.dtype == DType::kFloat8E4M3) {
    if (dead_from < kTileTokens) {  // word 2j + p of a block pairs tokens A = 2t + 8p (even bytes) and A + 1
#pragma unroll
      for (int w = 0; w < V::kWords; ++w) {
        const int token = 2 * t + w % 2 * 8;
        v.words[w] &= (token < dead_from ? 0x00ff00ffu : 0u) | (token + 1 < dead_from ? 0xff00ff00u : 0u);
      }
    }
  }
  const Part<C.v> part{p.v};
  const int groups = part.template groups<kBlocks>();
  const std::uint32_t flip = part.asymmetric() ? 0u : 0x00800080u;
  const std::uint8_t* scales = tile + p.cache.v_param_offset;
  const std::uint8_t* mins = scales + kTileTokens * groups * 2;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    std::uint32_t weighted[N][2];
    const int group = C.v.mode == ScaleMode::kBlock ? part.group_of(b) : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (C.v.mode == ScaleMode::kStatic) {
#pragma unroll
        for (int n = 0; n < N; ++n) weighted[n][half] = prob[n][half];
      } else {
        const std::uint32_t pair = part.load_pair(scales, group * kTileTokens + 2 * t + 8 * half);
#pragma unroll
        for (int n = 0; n < N; ++n) weighted[n][half] = mul_f16x2(prob[n][half], pair);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      std::uint32_t a[4];
      v.fragment(b, j, flip, a);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (kBf16) {
          mma_bf16(out[b][j][n], a, prob[n][0], prob[n][1]);
          mma_bf16(out[b][j][n], a, prob_low[n][0], prob_low[n][1]);
        } else {
          mma_f16(out[b][j][n], a, weighted[n][0], weighted[n][1]);
        }
      }
    }
    // Codes stand as q + c. Taking c (P * scale) off again with the same rounded products leaves their
    // rounding errors multiplied by q, not by q + c; row `group` of `extra` collects it.
    if constexpr (kVBias) {
      const bool first_of_group = b == 0 || (C.v.mode == ScaleMode::kBlock && part.group_of(b - 1) != group);
      if (first_of_group) {
        const std::uint32_t minus_c = g == group ? kMinusOffset : 0u;
#pragma unroll
        for (int n = 0; n < N; ++n) mma_f16_upper(extra[n], minus_c, minus_c, weighted[n][0], weighted[n][1]);
      }
    }
  }
  if constexpr (kVBias && C.v.mode != ScaleMode::kStatic) {
    if (part.asymmetric()) {  // and what a token adds to all dims of a group is min + c * scale
      std::uint32_t a[2] = {0u, 0u};
      if (g < groups) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = g * kTileTokens + 2 * t + 8 * half;
          a[half] =
              fma_f16x2(part.load_pair(scales, at), kMinusOffset ^ 0x80008000u, part.load_pair(mins, at));
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) mma_f16_upper(extra[n], a[0], a[1], prob[n][0], prob[n][1]);
    }
  }
}

}  // namespace halftone::cuda
