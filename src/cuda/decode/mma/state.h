// What a compute warp of the decode kernel holds, and how an item begins and ends for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/side.h"
#include "cuda/decode/traits.h"
#include "cuda/device/fragments.h"
#include "cuda/device/ptx.h"
#include "cuda/device/reduce.h"

namespace halftone::cuda {

/// What a warp holds of the current item: Q fragments, softmax state and accumulators.
template <DecodeConfig C>
struct Warp {
  using Traits = DecodeTraits<C>;
  // Packed K of many dims is read in parts of 128, one after the other: all of it would take the registers.
  static constexpr int kKeyParts = Traits::kDim > 256 && dtype_bits(C.k.dtype) < 16 ? Traits::kDim / 128 : 1;
  // Where registers suffice (split_bytes()): 8 rows of int8-head take 0.5 to 2% less.
  static constexpr bool kFlipsWords =
      C.row_tiles == 1 && C.k.mode != ScaleMode::kBlock && C.v.mode != ScaleMode::kBlock;
  using K = KReader<C.k.dtype, Traits::kDim / kKeyParts>;
  using V = VReader<C.v.dtype, Traits::kDim>;
  static constexpr int kBlocks = Traits::kBlocks;
  static constexpr int N = C.row_tiles;
  static constexpr bool kSplitP = C.v.dtype == DType::kBFloat16;  // P as bf16 high + low
  static constexpr bool kVBias = is_integer(C.v.dtype);
  static constexpr std::uint32_t kMinusOffset =
      C.v.dtype == DType::kInt8 ? 0xd800d800u : 0xc800c800u;  // -128, -8
  // Signed integers stand with an offset.
  static constexpr bool kHasBias = is_integer(C.k.dtype) && !C.k.asymmetric;
  // Block scales of signed integers: every block has its own bias, read from shared memory to save registers.
  static constexpr bool kBlockBias = C.k.mode == ScaleMode::kBlock && kHasBias;

  // B fragments of S^T: of the first blocks in registers, of the others in shared memory.
  static constexpr bool kHoldsHalf =
      (N == 2 && (kSplitP || (C.k.dtype == DType::kInt8 && C.v.dtype == DType::kFloat8E4M3))) ||
      (kBlocks == 8 && C.k.dtype == DType::kInt8);
  static constexpr bool kHoldsNone = Traits::kDim > 256 || (kBlocks == 8 && kBlockBias);
  static constexpr int kHeldBlocks = kHoldsNone ? 0 : kHoldsHalf ? kBlocks / 2 : kBlocks;
  std::uint32_t q[kHeldBlocks > 0 ? kHeldBlocks : 1][2][N][2];
  const uint4* q_high;  // [row tile][block][32]; the low parts are kRows / 8 row tiles further
  float bias[N][2];     // what an accumulator of K starts from; with kBlockBias, per unit of the sums of Q
  const float* block_sums;                               // q_sums of column 2t
  static constexpr int kSumSteps = kBlocks > 8 ? 4 : 2;  // of 4 groups
  std::uint32_t q_sums[kSumSteps][N];                    // B fragments of the product with K's mins
  float total[N][2];                                     // sum of Q over all dims
  float factor[N][2];                                    // raw product -> base-2 logit; not negative
  float max[N][2];                                       // of columns 2t, 2t + 1
  float sum[N][2];                                       // this lane's share
  float out[kBlocks][2][N][4];                           // O^T
  // What V's codes stand too high by, P * scale * offset: per group on its own where registers allow it
  // (every row of a product with constant A), else row g of `extra` has group g, and row g + 8, where there
  // are so many, group g + 8. And that row: P * min of the group.
  static constexpr int kVGroups = C.v.mode == ScaleMode::kBlock ? kBlocks / C.v.group_blocks : 1;
  static constexpr bool kOffsetPerGroup = kVBias && N == 1 && Traits::kDim <= 128;
  float offset[kOffsetPerGroup ? kVGroups : 1][N][4];
  static constexpr int kExtraRows = kVGroups > 8 ? 2 : 1;  // of a lane
  float extra[N][2 * kExtraRows];
  int lane, g, t;
  int team, first_row;  // of the unit's rows: this warp's first

  static __device__ void multiply_k(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
    if constexpr (C.k.dtype == DType::kBFloat16) {
      mma_bf16(d, a, b0, b1);
    } else {
      mma_f16(d, a, b0, b1);
    }
  }
  /// Where the item's rows are.
  __device__ void point_at(const typename Traits::Queries& queries) {
    block_sums = queries.sums[first_row + 2 * t];
    q_high = reinterpret_cast<const uint4*>(&queries.fragments[0][first_row / 8][0][lane][0]);
  }
  __device__ void begin(const AttentionParams& p, const DeviceItem& item,
                        const typename Traits::Queries& queries);
  __device__ void scores(const AttentionParams& p, const std::uint8_t* tile, bool low_part,
                         float (&x)[N][4]) const;
  __device__ void modify(const AttentionParams& p, const typename Traits::Queries& queries, int token,
                         int end, float (&x)[N][4]) const;
  __device__ void rescale(float (&x)[Traits::kStepTiles][N][4], bool modified);
  __device__ void accumulate(const AttentionParams& p, const std::uint8_t* tile, int dead_from,
                             float (&x)[N][4]);
  __device__ void end(const AttentionParams& p, const DeviceItem& item, typename Traits::Shared& s);
};

template <DecodeConfig C>
__device__ inline void Warp<C>::begin(const AttentionParams& p, const DeviceItem& item,
                                      const typename Traits::Queries& queries) {
  using Side = Part<C.k>;
  const float unit = C.k.dtype == DType::kBFloat16 ? 1.0f : (K::kScaleLog2 == 24 ? 0x1p-24f : 1.0f);
  // Codes stand as q + offset.
  constexpr float kOffset = C.k.dtype == DType::kInt8 ? -128.0f : -8.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int b = 0; b < kHeldBlocks; ++b) {
      const uint4 v = q_high[(n * kBlocks + b) * 32];
      q[b][0][n][0] = v.x, q[b][0][n][1] = v.y, q[b][1][n][0] = v.z, q[b][1][n][1] = v.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + n * 8 + 2 * t + i;
      factor[n][i] = queries.factor[row];
      total[n][i] = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        total[n][i] += queries.sums[row][b];
      }
      bias[n][i] = kHasBias ? (kBlockBias ? 1.0f : total[n][i]) * kOffset * unit : 0.0f;
      max[n][i] = kMinus;
      sum[n][i] = 0.0f;
    }
    if constexpr (C.k.mode == ScaleMode::kBlock) {  // group 4 i + t, split into f16 high and low parts
#pragma unroll
      for (int i = 0; i < kSumSteps; ++i) {
        float value = 0.0f;
        for (int b = 0; b < kBlocks; ++b) {
          if (Side::group_of(b) == 4 * i + t) value += queries.sums[first_row + n * 8 + g][b];
        }
        const float high = __half2float(__float2half_rn(value));
        q_sums[i][n] = pack_f16x2(high, value - high);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kExtraRows; ++i) extra[n][i] = 0.0f;
#pragma unroll
    for (int group = 0; group < (kOffsetPerGroup ? kVGroups : 0); ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) offset[group][n][i] = 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[b][j][n][i] = 0.0f;
      }
    }
  }
}

/// Puts the warp's state into shared memory, in real units.
template <DecodeConfig C>
__device__ inline void Warp<C>::end(const AttentionParams& p, const DeviceItem& item,
                                    typename Traits::Shared& s) {
  using Side = Part<C.v>;
  const float v_static = static_scale(p.v, item);
  constexpr float kUnit = V::kScaleLog2 == 24 ? 0x1p24f : 1.0f;  // on its own: v_static may be large
  constexpr float kOddUnit = V::kOddShift == 4 ? kUnit / 16.0f : kUnit;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = first_row + n * 8 + 2 * t + c;
      sum[n][c] = sum_of_lanes<4, 32>(sum[n][c]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float shift = 0.0f;
        if constexpr (kVBias) {
          const int group = C.v.mode == ScaleMode::kBlock ? Side::group_of(b) : 0;
          if (!kOffsetPerGroup || Side::kAsymmetric) {
            shift = __shfl_sync(~0u, extra[n][group / 8 * 2 + c], group % 8 * 4 + t);
          }
          if constexpr (kOffsetPerGroup) shift += offset[group][n][c];
          shift *= v_static;
        }
        float4 x;
        x.x = fmaf(out[b][0][n][c] * kUnit, v_static, shift);
        x.y = fmaf(out[b][0][n][2 + c] * kOddUnit, v_static, shift);
        x.z = fmaf(out[b][1][n][c] * kUnit, v_static, shift);
        x.w = fmaf(out[b][1][n][2 + c] * kOddUnit, v_static, shift);
        if (is_half_block(b, Traits::kDim)) {
          *reinterpret_cast<float2*>(&s.out[team][row][b * 32 + g * 2]) = {x.x, x.y};
        } else {
          *reinterpret_cast<float4*>(&s.out[team][row][b * 32 + g * 4]) = x;
        }
      }
      if (g == 0) s.state[team][row] = {max[n][c], sum[n][c]};
    }
  }
}

}  // namespace halftone::cuda
