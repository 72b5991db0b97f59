// The computing role of the decode kernel, tile by tile: S = K Q^T, softmax, O += V^T P^T.
#pragma once

#include "cuda/attention/logits.h"
#include "cuda/decode/mma/state.h"
#include "cuda/device/reduce.h"

namespace halftone::cuda {

/// x = raw products of the tile's tokens g, g + 8 (x[0..1], x[2..3]) with columns 2t, 2t + 1.
/// `low_part`: Q has one, needs_low_part().
template <DecodeConfig C>
__device__ inline void Warp<C>::scores(const AttentionParams& p, const std::uint8_t* tile, bool low_part,
                                       float (&x)[N][4]) const {
  using Side = Part<C.k>;
  const int groups = Side::template groups<kBlocks>();
  const std::uint8_t* scales = tile + p.cache.k_param_offset;
  const std::uint8_t* mins = scales + kTileTokens * groups * 2;
  const std::uint32_t flip = Side::kAsymmetric ? 0u : 0x00800080u;
  constexpr bool kPerBlock = C.k.mode == ScaleMode::kBlock;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = kPerBlock ? 0.0f : bias[n][i % 2];
  }
  // Without scales per block, odd blocks have a sum of their own: shorter chains of MMAs.
  constexpr bool kTwoSums = !kPerBlock;
  float odd[N][4] = {};
  // Scales of tokens g and g + 8: all groups at once if the registers allow it, else block by block.
  constexpr int kScales = kPerBlock && N == 1 && Traits::kDim <= 128 ? kBlocks : 1;
  float low[kScales], high[kScales];
  if constexpr (C.k.mode == ScaleMode::kToken) {
    low[0] = Side::load(scales, g);
    high[0] = Side::load(scales, g + 8);
  } else if constexpr (kScales > 1) {
    Side::load_blocks(scales, g, low);
    Side::load_blocks(scales, g + 8, high);
  }
  constexpr int kPartBlocks = kBlocks / kKeyParts;
  K k;
#pragma unroll 1
  for (int part = 0; part < kKeyParts; ++part) {
    k.load(tile + part * (kTileTokens * kPartBlocks * 4 * dtype_bits(C.k.dtype)), lane);
#pragma unroll
    for (int of_part = 0; of_part < kPartBlocks; ++of_part) {
      const int b = part * kPartBlocks + of_part;
      float dot[N][4];
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kBlockBias) {
            dot[n][i] = bias[n][i % 2] * block_sums[(n * 8 + i % 2) * kBlocks + b];
          } else {
            dot[n][i] = kPerBlock ? 0.0f : kTwoSums && b % 2 == 1 ? odd[n][i] : x[n][i];
          }
        }
      }
      if constexpr (kPerBlock && kScales == 1) {
        low[0] = Side::load(scales, g * groups + Side::group_of(b));
        high[0] = Side::load(scales, (g + 8) * groups + Side::group_of(b));
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        if (step == 1 && is_half_block(b, Traits::kDim)) continue;
        std::uint32_t a[4];
        k.template fragment<kFlipsWords>(of_part, step, flip, a);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (kHeldBlocks > 0 && b < kHeldBlocks) {
            constexpr int kHeld = kHeldBlocks > 0 ? kHeldBlocks : 1;
            multiply_k(dot[n], a, q[b % kHeld][step][n][0], q[b % kHeld][step][n][1]);
          } else {
            const uint4 v = q_high[(n * kBlocks + b) * 32];
            multiply_k(dot[n], a, step == 0 ? v.x : v.z, step == 0 ? v.y : v.w);
          }
          if (low_part) {
            const uint4 v = q_high[((Traits::kRows / 8 + n) * kBlocks + b) * 32];
            multiply_k(dot[n], a, step == 0 ? v.x : v.z, step == 0 ? v.y : v.w);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = kTwoSums && b % 2 == 1 ? odd[n][i] : x[n][i];
          sum = kPerBlock ? fmaf(i < 2 ? low[b % kScales] : high[b % kScales], dot[n][i], sum) : dot[n][i];
        }
      }
    }
  }
  if constexpr (kTwoSums) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] += odd[n][i];
    }
  }
  if constexpr (C.k.mode == ScaleMode::kToken) {
    const float min_low = Side::kAsymmetric ? Side::load(mins, g) * 0x1p-24f : 0.0f;
    const float min_high = Side::kAsymmetric ? Side::load(mins, g + 8) * 0x1p-24f : 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] *= i < 2 ? low[0] : high[0];
        if (Side::kAsymmetric) x[n][i] = fmaf(i < 2 ? min_low : min_high, total[n][i % 2], x[n][i]);
      }
    }
  }
  if constexpr (kPerBlock) {
    if (Side::kAsymmetric) {  // S += mins * sums of Q: one k-step over groups, 4 (i / 2) + t in register i
      constexpr int kSteps = (kBlocks / C.k.group_blocks + 3) / 4;  // of 4 groups
      static_assert(kSteps <= kSumSteps);
      std::uint32_t a[kSteps][2];
#pragma unroll
      for (int i = 0; i < 2 * kSteps;
           ++i) {  // groups that do not exist meet sums of zero: any finite value does
        const int group = min(4 * (i / 2) + t, groups - 1), token = g + 8 * (i % 2);
        a[i / 2][i % 2] = Side::load_twice(mins, token * groups + group);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float dot[4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) mma_f16_k8(dot, a[i], q_sums[i][n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = fmaf(dot[i], 0x1p-24f, x[n][i]);
      }
    }
  }
}

/// Raw products to base-2 logits, with softcap, ALiBi and mask, of the tile that begins at `token`.
template <DecodeConfig C>
__device__ inline void Warp<C>::modify(const AttentionParams& p, const typename Traits::Queries& queries,
                                       int token, int end, float (&x)[N][4]) const {
  using Layout = KeysAsM<N>;
  const auto place = [&](int row) -> const RowPlace& {
    return queries.places[first_row + 2 * t + Layout::offset(row)];
  };
  const auto own_factor = [&](int row) { return factor[row / 2][row % 2]; };
  modify_logits<Layout>(p, Softcap(p), own_factor, place, token + g, end, flat(x));
}

/// Raises the maxima if a probability would pass 2^kLargestLog2, then turns logits into probabilities.
/// x has raw products or, after modify(), base-2 logits.
template <DecodeConfig C>
__device__ inline void Warp<C>::rescale(float (&x)[Traits::kStepTiles][N][4], bool modified) {
  constexpr float kLargest = Traits::kLargestLog2, kFirst = Traits::kFirstLog2;
  bool exceeds = false;
  float top[N][2], unit[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top[n][c] = fmaxf(x[0][n][c], x[0][n][2 + c]);
#pragma unroll
      for (int i = 1; i < Traits::kStepTiles; ++i)
        top[n][c] = fmaxf(top[n][c], fmaxf(x[i][n][c], x[i][n][2 + c]));
      unit[n][c] = modified ? 1.0f : factor[n][c];
      top[n][c] *= unit[n][c];
      exceeds |= top[n][c] > max[n][c] + kLargest;
    }
  }
  if (__any_sync(~0u, exceeds)) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[n][c] = largest_of_lanes<4, 32>(top[n][c]);
        // Only where it is needed, so that a row never depends on the rows beside it.
        const float raised = top[n][c] > max[n][c] + kLargest ? top[n][c] - kFirst : max[n][c];
        const float weight = raised == kMinus ? 1.0f : exp2_approx(max[n][c] - raised);
        max[n][c] = raised;
        sum[n][c] *= weight;
#pragma unroll
        for (int i = 0; i < kExtraRows; ++i) extra[n][2 * i + c] *= weight;
#pragma unroll
        for (int group = 0; group < (kOffsetPerGroup ? kVGroups : 0); ++group) {
          offset[group][n][c] *= weight;
          offset[group][n][2 + c] *= weight;
        }
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
          value = exp2_approx(fmaf(value, unit[n][c], -base));
          sum[n][c] += value;
        }
      }
    }
  }
}

/// O^T += V^T P^T over one tile. Tokens from `dead_from` on (16: none) are not live: nothing of theirs may be
/// used.
template <DecodeConfig C>
__device__ inline void Warp<C>::accumulate(const AttentionParams& p, const std::uint8_t* tile, int dead_from,
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
  using Side = Part<C.v>;
  const int groups = Side::template groups<kBlocks>();
  const std::uint32_t flip = Side::kAsymmetric ? 0u : 0x00800080u;
  const std::uint8_t* scales = tile + p.cache.v_param_offset;
  const std::uint8_t* mins = scales + kTileTokens * groups * 2;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    std::uint32_t weighted[N][2];
    const int group = C.v.mode == ScaleMode::kBlock ? Side::group_of(b) : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (C.v.mode == ScaleMode::kStatic) {
#pragma unroll
        for (int n = 0; n < N; ++n) weighted[n][half] = prob[n][half];
      } else {
        const std::uint32_t pair = Side::load_pair(scales, group * kTileTokens + 2 * t + 8 * half);
#pragma unroll
        for (int n = 0; n < N; ++n) weighted[n][half] = mul_f16x2(prob[n][half], pair);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (j == 1 && is_half_block(b, Traits::kDim)) continue;
      std::uint32_t a[4];
      v.template fragment<kFlipsWords>(b, j, flip, a);
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
      const bool first_of_group = b == 0 || (C.v.mode == ScaleMode::kBlock && Side::group_of(b - 1) != group);
      if (first_of_group) {
        const std::uint32_t minus_c = kOffsetPerGroup || g == group ? kMinusOffset : 0u;
        const std::uint32_t a[4] = {minus_c, minus_c, minus_c, minus_c};
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if constexpr (kOffsetPerGroup) {
            mma_f16(offset[group][n], a, weighted[n][0], weighted[n][1]);
          } else if constexpr (kExtraRows == 2) {
            const std::uint32_t behind = g + 8 == group ? kMinusOffset : 0u;
            const std::uint32_t rows[4] = {minus_c, behind, minus_c, behind};
            mma_f16(extra[n], rows, weighted[n][0], weighted[n][1]);
          } else {
            mma_f16_upper(extra[n], minus_c, minus_c, weighted[n][0], weighted[n][1]);
          }
        }
      }
    }
  }
  if constexpr (kVBias && C.v.mode != ScaleMode::kStatic) {
    if (Side::kAsymmetric) {  // and what a token adds to all dims of a group is min + c * scale
      std::uint32_t a[2 * kExtraRows];
#pragma unroll
      for (int i = 0; i < 2 * kExtraRows; ++i) {  // rows beyond the groups repeat the last one, unread
        const int half = i / kExtraRows, row = g + i % kExtraRows * 8;
        const int at = min(row, groups - 1) * kTileTokens + 2 * t + 8 * half;
        a[i] = fma_f16x2(Side::load_pair(scales, at), kMinusOffset ^ 0x80008000u, Side::load_pair(mins, at));
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (kExtraRows == 2) {
          mma_f16(extra[n], a, prob[n][0], prob[n][1]);
        } else {
          mma_f16_upper(extra[n], a[0], a[1], prob[n][0], prob[n][1]);
        }
      }
    }
  }
}

}  // namespace halftone::cuda
