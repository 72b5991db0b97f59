// The queries of an item, from global memory to B fragments: by the warps that finish items.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>

#include "cuda/decode/traits.h"
#include "cuda/device/fragments.h"
#include "cuda/device/lanes.h"
#include "cuda/device/ptx.h"
#include "cuda/device/reduce.h"
#include "format/hadamard.h"

namespace halftone::cuda {

/// Brings an item's rows: in the basis in which K is stored, scaled by a power of two per row so that f16
/// holds them. A lane has 8 consecutive dims of a row, or of each half of a wide one, which are one lane's
/// share of a block of K.
template <DecodeConfig C>
struct QueryLoader {
  using Traits = DecodeTraits<C>;
  using K = KReader<C.k.dtype, Traits::kDim>;
  static constexpr bool kBf16 = C.k.dtype == DType::kBFloat16;
  static constexpr int kHalves = is_wide(Traits::kDim) ? 2 : 1;
  static constexpr int kChunks = Traits::kDim / 8 / kHalves;  // of a row or a half
  static constexpr int kSegment = std::bit_ceil(static_cast<unsigned>(kChunks));
  using Raw = uint4[kHalves];
  static constexpr int kLaneRows = 32 / kSegment;  // rows of one load of a warp
  static constexpr int kBatch = Traits::kRows >= 32             ? 3
                                : Traits::kRows / kLaneRows > 3 ? 2
                                                                : 1;  // loads in flight

  /// By warp `warp` of those that bring queries: its rows.
  static __device__ void load(const AttentionParams& p, const DeviceItem& item,
                              typename Traits::Queries& queries, int warp) {
    const int lane = thread_index() % 32, chunk = lane % kSegment;
    const int rows = item.work.row_end - item.work.row_begin;
#pragma unroll 1
    for (int base = warp * kBatch * kLaneRows; base < Traits::kRows;
         base += Traits::kQueryWarps * kBatch * kLaneRows) {
      Raw raw[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = base + i * kLaneRows + lane / kSegment;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) raw[i][h] = {};
        if (row < rows && chunk < kChunks) {
          const RowPlace place = place_of(p, item, row);
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            raw[i][h] = load_eight(static_cast<const std::uint16_t*>(p.q) + place.token * p.q_token_stride +
                                       place.head * p.q_head_stride + (chunk + h * kHalfChunks) * 8,
                                   p.q_aligned);
          }
        }
      }
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        store(p, item, raw[0], queries, base + i * kLaneRows + lane / kSegment, chunk);
#pragma unroll
        for (int j = 0; j < (kBatch - 1) * kHalves; ++j) {
          raw[j / kHalves][j % kHalves] = raw[j / kHalves + 1][j % kHalves];
        }
      }
    }
  }

 private:
  static __device__ float low_half(std::uint32_t word, bool bf16) {
    return bf16 ? __uint_as_float(word << 16) : __half2float(__ushort_as_half(word & 0xffff));
  }
  static __device__ float high_half(std::uint32_t word, bool bf16) {
    return bf16 ? __uint_as_float(word & 0xffff0000u) : __half2float(__ushort_as_half(word >> 16));
  }
  static __device__ std::uint32_t pack(float low, float high) {
    return kBf16 ? pack_bf16x2(low, high) : pack_f16x2(low, high);
  }

  /// A lane's share of a row's B fragments, or matrices.
  static __device__ void store_words(typename Traits::Queries& queries, int part, int row, int block, int t,
                                     const std::uint32_t (&words)[4]) {
    if constexpr (Traits::kWarpgroups) {
      std::uint16_t* matrices = &queries.fragments[part][0][0][0][0] + block * 2 * (16 * Traits::kRows);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int k = w % 2 * 8 + 2 * t;
        *reinterpret_cast<std::uint32_t*>(
            &matrices[w / 2 * (16 * Traits::kRows) + matrix_place<Traits::kRows>(k, row)]) = words[w];
      }
    } else {
      const bool half = is_half_block(block, Traits::kDim);  // two lanes' fragments of one step
      std::uint16_t* at = queries.fragments[part][row / 8][block][row % 8 * 4 + (half ? 2 * t : t)];
      if (half) {
        reinterpret_cast<uint2*>(at)[0] = {words[0], words[1]};
        reinterpret_cast<uint2*>(at)[2] = {words[2], words[3]};
      } else {
        reinterpret_cast<uint4*>(at)[0] = {words[0], words[1], words[2], words[3]};
      }
    }
  }
  /// The sum over group `chunk` of K (0: no such group) from the lanes' sums over their blocks.
  static __device__ float sum_of_group(float sum, int chunk) {
    constexpr int kBlocksOfGroup = C.k.mode == ScaleMode::kBlock ? C.k.group_blocks : Traits::kBlocks;
    constexpr int kGroups = Traits::kBlocks / kBlocksOfGroup;
    sum = sum_of_lanes<4, 4 * kBlocksOfGroup>(sum);
    sum = __shfl_sync(~0u, sum, min(chunk, kGroups - 1) * kBlocksOfGroup * 4, kSegment);
    return chunk < kGroups ? sum : 0.0f;
  }

  /// A lane's dims of a row; all lanes take part.
  static __device__ void store(const AttentionParams& p, const DeviceItem& item, const Raw& raw,
                               typename Traits::Queries& queries, int row, int chunk) {
    float x[kHalves][8];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const std::uint32_t words[4] = {raw[h].x, raw[h].y, raw[h].z, raw[h].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[h][2 * i] = low_half(words[i], p.q_type == DType::kBFloat16);
        x[h][2 * i + 1] = high_half(words[i], p.q_type == DType::kBFloat16);
      }
      if (p.channels.scale != nullptr && chunk < kChunks) {
        const float* const scale =
            p.channels.scale + (item.work.kv_head * Traits::kDim + (chunk + h * kHalfChunks) * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[h][i] *= __ldg(scale + i);
      }
    }
    if (p.rotate_k) rotate(x, chunk);
    // Raw products are in units of the static scale and, for integers, of 2^-24.
    const float k_static = static_scale(p.k, item);
    float factor = p.scale_log2 * k_static;
    float unit = factor < 0.0f ? -1.0f : 1.0f;  // the factor of a row is not negative
    factor *= unit;
    if constexpr (!kBf16) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 8 * kHalves; ++i) largest = fmaxf(largest, fabsf(x[i / 8][i % 8]));
#pragma unroll 1
      for (int i = kSegment / 2; i > 0; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
      // Exponent bits of the largest value: 2^exponent, and its inverse, for every finite and normal one.
      const std::uint32_t bits = min(max(__float_as_uint(largest) & 0x7f800000u, 0x08000000u), 0x77000000u);
      factor *= __uint_as_float(bits);
      unit *= __uint_as_float(0x7f000000u - bits);
    }
    // Last: the static scale may be large. Warpgroups put the power into the scales of K's groups.
    constexpr bool kCodeUnits =
        K::kScaleLog2 == 24 && !(Traits::kWarpgroups && C.k.mode == ScaleMode::kBlock);
    factor *= kCodeUnits ? 0x1p24f : 1.0f;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[h][i] *= unit;
      store_chunk(p, x[h], queries, row, chunk, chunk + h * kHalfChunks);
    }
    if (row >= Traits::kRows || chunk != 0) return;
    queries.factor[row] = factor;
    RowPlace place = place_of(p, item, row);
    if (row < item.work.row_end - item.work.row_begin) place.slope = slope_of(p, place.head);
    queries.places[row] = place;
  }

  static __device__ void rotate(float (&x)[kHalves][8], int chunk) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) rotate_lanes<8, Traits::kDim>(x[h], chunk);
#pragma unroll
    for (int i = 0; i < 8 * (kHalves - 1); ++i) {
      const float a = x[0][i], b = x[kHalves - 1][i];
      x[0][i] = a + b, x[kHalves - 1][i] = a - b;
    }
#pragma unroll
    for (int i = 0; i < 8 * kHalves; ++i) {
      x[i / 8][i % 8] *= hadamard::factor(hadamard::block_size(Traits::kDim));
    }
  }

  /// Chunk `chunk` of a row, in the units of its fragments, of lane `own` of the row.
  static __device__ void store_chunk(const AttentionParams& p, const float (&x)[8],
                                     typename Traits::Queries& queries, int row, int own, int chunk) {
    float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    sum = sum_of_lanes<1, 4>(sum);
    float group_sum = 0.0f;
    if constexpr (Traits::kWarpgroups) group_sum = sum_of_group(sum, chunk);
    if (row >= Traits::kRows || own >= kChunks) return;
    const int block = chunk / 4, t = chunk % 4;
    const bool half = is_half_block(block, Traits::kDim);  // the chunk is two lanes' share
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float shift = K::q_shift(w % 2 * 2) ? 1.0f / 16.0f : 1.0f;
      const auto value = [&](int slot) {
        const float whole = x[K::q_dim(w / 2, slot)];
        return (half ? x[w / 2 * 4 + K::half_dim(slot)] : whole) * shift;
      };
      const float first = value(w % 2 * 2), second = value(w % 2 * 2 + 1);
      high[w] = pack(first, second);
      low[w] = pack(first - low_half(high[w], kBf16), second - high_half(high[w], kBf16));
    }
    store_words(queries, 0, row, block, t, high);
    if (needs_low_part<C>(p)) store_words(queries, 1, row, block, t, low);
    if constexpr (Traits::kWarpgroups) {
      const float rounded = __half2float(__float2half_rn(group_sum));
      auto* at = reinterpret_cast<std::uint32_t*>(queries.group_sums);
      if (chunk < 8) {
        at[matrix_place<Traits::kRows>(2 * chunk, row) / 2] = pack_f16x2(rounded, group_sum - rounded);
      }
      if (chunk == 0) queries.totals[row] = group_sum;
    }
    if (t == 0) queries.sums[row][block] = sum;
  }
};

}  // namespace halftone::cuda
