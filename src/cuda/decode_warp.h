// What a compute warp of the decode kernel holds, and how an item begins and ends for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/decode_shared.h"
#include "cuda/device/dequant.h"
#include "cuda/device/ptx.h"
#include "format/hadamard.h"

namespace halftone::cuda {

/// Properties of K or V: constants for a fixed part, run-time values else.
template <PartConfig P>
struct Part {
  const ParamView& view;
  __device__ bool asymmetric() const { return P.fixed ? P.asymmetric : view.asymmetric; }
  __device__ int group_of(int block) const {
    return P.fixed ? block / P.group_blocks : block >> view.block_shift;
  }
  template <int kBlocks>
  __device__ int groups() const {
    if constexpr (P.mode == ScaleMode::kStatic) return 0;
    if constexpr (P.mode == ScaleMode::kToken) return 1;
    return P.fixed ? kBlocks / P.group_blocks : view.groups;
  }
  /// A stored scale or min.
  __device__ float load(const std::uint8_t* plane, int index) const {
    return __half2float(reinterpret_cast<const __half*>(plane)[index]);
  }
  /// One stored value in both halves of an f16x2.
  __device__ std::uint32_t load_twice(const std::uint8_t* plane, int index) const {
    const std::uint32_t bits = reinterpret_cast<const std::uint16_t*>(plane)[index];
    return __byte_perm(bits, bits, 0x1010);
  }
  /// Two neighbouring stored values as f16x2.
  __device__ std::uint32_t load_pair(const std::uint8_t* plane, int index) const {
    return *reinterpret_cast<const std::uint32_t*>(plane + 2 * index);
  }
};
__device__ inline float load_16bit(const void* p, std::int64_t at, bool bf16) {
  return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p)[at])
              : __half2float(static_cast<const __half*>(p)[at]);
}
/// Rotates `row` [dim] in shared memory: one thread, out of line because few caches need it.
__device__ __noinline__ inline void rotate_shared(float* row, int dim) { hadamard::rotate(row, dim); }

/// Rotates a row whose dim 32 b + lane is x[b]; `scratch` holds kDim floats.
template <DecodeConfig C>
__device__ inline void rotate_row(float* scratch, float (&x)[DecodeTraits<C>::kBlocks], int lane) {
  constexpr int kBlocks = DecodeTraits<C>::kBlocks;
  __syncwarp();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) scratch[b * 32 + lane] = x[b];
  __syncwarp();
  if (lane == 0) rotate_shared(scratch, C.head_dim);
  __syncwarp();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) x[b] = scratch[b * 32 + lane];
}

/// Where the lane's dim i (of 8) of a block stands among the fragment halves (step * 4 + slot): inverse of
/// K's q_dim().
template <DType kType>
__device__ constexpr int fragment_half(int i) {
  if constexpr (kType == DType::kInt4) return i % 4 / 2 * 4 + i % 2 * 2 + i / 4;
  if constexpr (kType == DType::kInt8) return i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
  return i;
}

/// Reads the item's query rows into shared memory as B fragments, rotated and scaled by a power of two per
/// row so that f16 holds them, and notes where each row stands.
template <DecodeConfig C>
__device__ inline void load_queries(const DecodeParams& p, const DeviceItem& item,
                                    typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  using K = KReader<C.k.dtype, Traits::kDim>;
  const int lane = threadIdx.x % 32, group = p.schedule.params.group;
  const int rows = item.work.row_end - item.work.row_begin;
  const int half = fragment_half<C.k.dtype>(lane % 8);
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < Traits::kRows; row += Traits::kWarps) {
    const int packed = item.work.row_begin + row, query = packed / group;
    const int head = item.work.kv_head * group + packed - query * group;
    const std::int64_t token = std::int64_t{item.first_query} + query;
    float x[Traits::kBlocks];
    const std::int64_t at = token * p.q_token_stride + head * p.q_head_stride + lane;
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b)
      x[b] = row < rows ? load_16bit(p.q, at + b * 32, p.q_bf16) : 0.0f;
    if (p.rotate_k) rotate_row<C>(s.q_row[row], x, lane);
    float factor = p.scale_log2, inverse = 1.0f;
    if constexpr (C.k.dtype != DType::kBFloat16) {
      float largest = 0.0f;
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) largest = fmaxf(largest, fabsf(x[b]));
#pragma unroll 1
      for (int i = 16; i > 0; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
      // Exponent bits of the largest value: 2^exponent, and its inverse, for every finite and normal one.
      const std::uint32_t bits = min(max(__float_as_uint(largest) & 0x7f800000u, 0x08000000u), 0x77000000u);
      factor *= __uint_as_float(bits);
      inverse = __uint_as_float(0x7f000000u - bits);
    }
    const float shift = K::q_shift(half % 4) ? 1.0f / 16.0f : 1.0f;
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      x[b] *= inverse;
      const int at = row % 8 * 4 + lane / 8;
      const float value = x[b] * shift;
      if constexpr (C.k.dtype == DType::kBFloat16) {
        const __nv_bfloat16 high = __float2bfloat16_rn(value);
        s.q[0][row / 8][b][at][half] = __bfloat16_as_ushort(high);
        s.q[1][row / 8][b][at][half] =
            __bfloat16_as_ushort(__float2bfloat16_rn(value - __bfloat162float(high)));
      } else {
        const __half high = __float2half_rn(value);
        s.q[0][row / 8][b][at][half] = __half_as_ushort(high);
        s.q[1][row / 8][b][at][half] = __half_as_ushort(__float2half_rn(value - __half2float(high)));
      }
    }
#pragma unroll 1
    for (int i = 16; i > 0; i /= 2) {
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) x[b] += __shfl_xor_sync(~0u, x[b], i);
    }
    if (lane == 0) {
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) s.q_sums[row][b] = x[b];
      s.q_factor[row] = factor;
      s.places[row] = {token, head, query + item.keys - item.queries,
                       p.alibi_slopes != nullptr && row < rows ? p.alibi_slopes[head] * kLog2e : 0.0f};
    }
  }
}

/// What a warp holds of the current item: Q fragments, softmax state and accumulators.
template <DecodeConfig C>
struct Warp {
  using Traits = DecodeTraits<C>;
  using K = KReader<C.k.dtype, Traits::kDim>;
  using V = VReader<C.v.dtype, Traits::kDim>;
  static constexpr int kBlocks = Traits::kBlocks;
  static constexpr int N = C.row_tiles;
  static constexpr bool kSplitP = C.v.dtype == DType::kBFloat16;  // P as bf16 high + low
  static constexpr bool kVBias = is_integer(C.v.dtype);
  static constexpr std::uint32_t kMinusOffset =
      C.v.dtype == DType::kInt8 ? 0xd800d800u : 0xc800c800u;  // -128, -8
  // Block scales of signed integers: every block has its own bias, read from shared memory to save registers.
  static constexpr bool kBlockBias =
      C.k.mode == ScaleMode::kBlock && is_integer(C.k.dtype) && !(C.k.fixed && C.k.asymmetric);

  std::uint32_t q[kBlocks][2][N][2];  // B fragments of S^T
  const uint4* q_low;  // the low parts [row tile][block][32]; null where the high parts are exact
  float bias[N][2];    // what an accumulator of K starts from; with kBlockBias, per unit of the sums of Q
  const float* block_sums;      // q_sums of column 2t
  std::uint32_t q_sums[2][N];   // B fragment of the product with K's mins
  float total[N][2];            // sum of Q over all dims
  float factor[N][2];           // raw product -> base-2 logit
  float max[N][2];              // of columns 2t, 2t + 1
  float sum[N][2];              // this lane's share
  float out[kBlocks][2][N][4];  // O^T
  float extra[N][4];            // row g: sum over tokens of P * min, or of P * scale, of group g
  int lane, g, t;

  static __device__ void multiply_k(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
    if constexpr (C.k.dtype == DType::kBFloat16) {
      mma_bf16(d, a, b0, b1);
    } else {
      mma_f16(d, a, b0, b1);
    }
  }
  __device__ void begin(const DecodeParams& p, const DeviceItem& item, const typename Traits::Shared& s);
  __device__ void scores(const DecodeParams& p, const std::uint8_t* tile, float (&x)[N][4]) const;
  __device__ void modify(const DecodeParams& p, const typename Traits::Shared& s, int token, int end,
                         float (&x)[N][4]) const;
  __device__ void rescale(float (&x)[Traits::kStepTiles][N][4]);
  __device__ void accumulate(const DecodeParams& p, const std::uint8_t* tile, int dead_from,
                             float (&x)[N][4]);
  __device__ void end(const DecodeParams& p, const DeviceItem& item, typename Traits::Shared& s, int warp);
};

template <DecodeConfig C>
__device__ inline void Warp<C>::begin(const DecodeParams& p, const DeviceItem& item,
                                      const typename Traits::Shared& s) {
  const Part<C.k> part{p.k};
  const float k_static =
      p.k.static_scale == nullptr ? 1.0f : p.k.static_scale[item.work.kv_head * p.k.static_stride];
  const float unit = C.k.dtype == DType::kBFloat16 ? 1.0f : (K::kScaleLog2 == 24 ? 0x1p-24f : 1.0f);
  // Codes stand as q + offset; a static min is one more constant per column.
  float offset = !is_integer(C.k.dtype) || part.asymmetric() ? 0.0f
                 : C.k.dtype == DType::kInt8                 ? -128.0f
                                                             : -8.0f;
  if (p.k.static_min != nullptr) offset = p.k.static_min[item.work.kv_head * p.k.static_stride] / k_static;
  block_sums = s.q_sums[2 * t];
  // A rotated row has fp32 values, and bf16 cannot hold an f16 one.
  const bool split = p.rotate_k || (C.k.dtype == DType::kBFloat16 && !p.q_bf16);
  q_low = split ? reinterpret_cast<const uint4*>(&s.q[1][0][0][lane][0]) : nullptr;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint4 v = *reinterpret_cast<const uint4*>(s.q[0][n][b][lane]);
      q[b][0][n][0] = v.x, q[b][0][n][1] = v.y, q[b][1][n][0] = v.z, q[b][1][n][1] = v.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + 2 * t + i;
      factor[n][i] = s.q_factor[column] * k_static / unit;
      total[n][i] = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        total[n][i] += s.q_sums[column][b];
      }
      bias[n][i] = (kBlockBias ? 1.0f : total[n][i]) * offset * unit;
      max[n][i] = kMinus;
      sum[n][i] = 0.0f;
    }
    if constexpr (C.k.mode == ScaleMode::kBlock) {  // group 4 i + t, split into f16 high and low parts
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float value = 0.0f;
        for (int b = 0; b < kBlocks; ++b) {
          if (part.group_of(b) == 4 * i + t) value += s.q_sums[n * 8 + g][b];
        }
        const float high = __half2float(__float2half_rn(value));
        q_sums[i][n] = pack_f16x2(high, value - high);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) extra[n][i] = 0.0f;
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
__device__ inline void Warp<C>::end(const DecodeParams& p, const DeviceItem& item, typename Traits::Shared& s,
                                    int warp) {
  const Part<C.v> part{p.v};
  const float v_static =
      p.v.static_scale == nullptr ? 1.0f : p.v.static_scale[item.work.kv_head * p.v.static_stride];
  const float v_min =
      p.v.static_min == nullptr ? 0.0f : p.v.static_min[item.work.kv_head * p.v.static_stride];
  const float unit = v_static * (V::kScaleLog2 == 24 ? 0x1p24f : 1.0f);
  const float odd_unit = V::kOddShift == 4 ? unit * (1.0f / 16.0f) : unit;
  const float offset = C.v.dtype == DType::kInt8 ? 128.0f : 8.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = n * 8 + 2 * t + c;
#pragma unroll
      for (int i = 4; i < 32; i *= 2) sum[n][c] += __shfl_xor_sync(~0u, sum[n][c], i);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float shift = 0.0f;
        if constexpr (kVBias) {
          const int group = C.v.mode == ScaleMode::kBlock ? part.group_of(b) : 0;
          shift = __shfl_sync(~0u, extra[n][c], group * 4 + t) * v_static;
          if (p.v.static_min != nullptr) shift += (v_min + offset * v_static) * sum[n][c];
        }
        float4 x;
        x.x = fmaf(out[b][0][n][c], unit, shift);
        x.y = fmaf(out[b][0][n][2 + c], odd_unit, shift);
        x.z = fmaf(out[b][1][n][c], unit, shift);
        x.w = fmaf(out[b][1][n][2 + c], odd_unit, shift);
        *reinterpret_cast<float4*>(&s.out[warp][row][b * 32 + g * 4]) = x;
      }
      if (g == 0) {
        s.state[warp][row][0] = max[n][c];
        s.state[warp][row][1] = sum[n][c];
      }
    }
  }
}

}  // namespace halftone::cuda
