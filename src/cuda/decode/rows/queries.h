// The role that brings queries: the next item's rows in f16, each in units of a power of two.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/device/range.h"
#include "cuda/device/values.h"

namespace halftone::cuda {

/// Brings rows, kBatch pairs at a time: rotated and scaled. A lane has 8 consecutive dims of a row.
template <DecodeConfig C, int kBatch = 4>
struct RowsQueries {
  using Traits = DecodeRowsTraits<C>;
  static constexpr int kRowLanes = Traits::kDim / 8, kLaneRows = 32 / kRowLanes;
  static constexpr float kNaN = __builtin_nanf("");
  const AttentionParams& p;
  int warp, warps, lane;  // of those that bring an item's rows

  /// Of two rows, over the lanes of each.
  static __device__ void find_largest(const float (&x)[2][8], float (&largest)[2]) {
    std::uint32_t bits[2] = {};  // infinities and NaNs are the largest
#pragma unroll
    for (int i = 0; i < 16; ++i) bits[i / 8] = max(bits[i / 8], magnitude_bits(x[i / 8][i % 8]));
#pragma unroll
    for (int i = kRowLanes / 2; i > 0; i /= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) bits[r] = max(bits[r], __shfl_xor_sync(~0u, bits[r], i));
    }
    largest[0] = __uint_as_float(bits[0]), largest[1] = __uint_as_float(bits[1]);
  }
  /// The power of two that takes a row's largest value to 2^13 or more, and what undoes it; the latter NaN: a
  /// value of the row is no finite number.
  static __device__ float2 powers(float largest) {
    const auto exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 127 - 100);
    return {__uint_as_float(static_cast<std::uint32_t>(2 * 127 + 13 - exponent) << 23),
            largest < __builtin_huge_valf() ? __uint_as_float(static_cast<std::uint32_t>(exponent - 13) << 23)
                                            : kNaN};
  }

  /// A lane's 8 dims of two rows, `row` and kLaneRows more; all lanes take part. `factor`: of all rows;
  /// `scale`: of these dims of K, or null.
  __device__ void store(const uint4 (&raw)[2], typename Traits::Queries& queries, int row, int piece,
                        float factor, const float* scale) const {
    float x[2][8];
    const bool bf16 = p.q_type == DType::kBFloat16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t words[4] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[r][i] = half_of(words[i / 2], i % 2, bf16);
      if (scale != nullptr) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[r][i] *= __ldg(scale + i);
      }
      if (p.rotate_k) {
        rotate_lanes<8, Traits::kDim>(x[r], piece);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[r][i] *= hadamard::factor(hadamard::block_size(Traits::kDim));
      }
      if (factor < 0.0f) {  // the factor of a row is not negative
#pragma unroll
        for (int i = 0; i < 8; ++i) x[r][i] = -x[r][i];
      }
    }
    float largest[2];
    find_largest(x, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + r * kLaneRows;
      const float2 power = powers(largest[r]);
      const int place = piece / 8 * Traits::kHalfBytes + own * 128 + (piece % 8 ^ own % 8) * 16;
      std::uint32_t high[4];
      float a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // dims in the order of K's
        a[i] = x[r][Traits::Tile::kFourBits ? i : 2 * i] * power.x;
        b[i] = x[r][Traits::Tile::kFourBits ? i + 4 : 2 * i + 1] * power.x;
        high[i] = pack_f16x2(a[i], b[i]);
      }
      *reinterpret_cast<uint4*>(queries.parts[0] + place) = {high[0], high[1], high[2], high[3]};
      if (needs_low_part<C>(p)) {
        std::uint32_t low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 rounded = unpack_f16x2(high[i]);
          low[i] = pack_f16x2(a[i] - rounded.x, b[i] - rounded.y);
        }
        *reinterpret_cast<uint4*>(queries.parts[1] + place) = {low[0], low[1], low[2], low[3]};
      }
      if (piece == 0) queries.factor[own] = fabsf(factor) * power.y;
    }
  }

  /// Every kLaneRows-th row from `row` on, of kBatch, which the item lacks.
  __device__ void clear(typename Traits::Queries& queries, int row, int piece) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i, row += kLaneRows) {
      const int place = piece / 8 * Traits::kHalfBytes + row * 128 + (piece % 8 ^ row % 8) * 16;
      *reinterpret_cast<uint4*>(queries.parts[0] + place) = uint4{};
      *reinterpret_cast<uint4*>(queries.parts[1] + place) = uint4{};
      if (piece == 0) queries.factor[row] = queries.slope[row] = 0.0f, queries.position[row] = 0;
    }
  }
  /// Rows [first, end) of an item; those that it lacks are zeros.
  __device__ void bring(const DeviceItem& item, typename Traits::Queries& queries, int first, int end) const {
    constexpr int kWarpRows = kBatch * kLaneRows;
    const unsigned piece = lane % kRowLanes, half = lane / kRowLanes;
    const int rows = item.work.row_end - item.work.row_begin;
    const float* const scale = p.channels.scale == nullptr
                                   ? nullptr
                                   : p.channels.scale + item.work.kv_head * Traits::kDim + piece * 8;
#pragma unroll 1
    for (int base = first + warp * kWarpRows; base < end; base += warps * kWarpRows) {
      if (base >= rows) {
        clear(queries, base + half, piece);
        continue;
      }
      const int own = base + lane % kWarpRows;  // whose place the lane works out
      const RowPlace place = place_of(p, item, min(own, max(rows, 1) - 1));
      const std::int64_t offset = place.token * p.q_token_stride + place.head * p.q_head_stride;
      uint4 raw[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::int64_t at = __shfl_sync(~0u, offset, i * kLaneRows + half);
        raw[i] = {};
        if (base + i * kLaneRows + static_cast<int>(half) < rows) {
          raw[i] = load_eight(static_cast<const std::uint16_t*>(p.q) + at + piece * 8, p.q_aligned);
        }
      }
      float factor = p.scale_log2;
      if (p.k.static_scale != nullptr) factor *= p.k.static_scale[item.work.kv_head * p.k.static_stride];
      if (base == 0 && lane == 0 && p.v.static_scale != nullptr) {
        queries.value_scale = p.v.static_scale[item.work.kv_head * p.v.static_stride];
      }
      if (lane < kWarpRows) {
        queries.position[own] = place.position;
        queries.slope[own] = own < rows ? slope_of(p, place.head) : 0.0f;
      }
#pragma unroll 1
      for (int i = 0; i < kBatch; i += 2) {
        store({raw[0], raw[1]}, queries, base + i * kLaneRows + half, piece, factor, scale);
        if constexpr (kBatch > 2) raw[0] = raw[2], raw[1] = raw[3];
      }
    }
  }
};

/// A share of the rows of item `index`, once those of the item before the last one are not needed any more.
template <DecodeConfig C, int kBatch>
__device__ inline void bring_share(const AttentionParams& p, typename DecodeRowsTraits<C>::Shared& s,
                                   const RowsQueries<C, kBatch>& queries, int index, int first, int end) {
  wait_for_previous_kernel();
  barrier_wait(shared_address(&s.queries_empty[index % 2]), index / 2 & 1 ^ 1);
  queries.bring(s.queue.items[index % ItemQueue::kCapacity], s.queries[index % 2], first, end);
  fence_async_shared();
  __syncwarp();
  if (queries.lane == 0) barrier_arrive(shared_address(&s.queries_full[index % 2]));
}

}  // namespace halftone::cuda
