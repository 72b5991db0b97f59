// The role that brings queries: digits of 8 bits of the next item's rows, in the order in which K lies in its
// page.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/device/range.h"
#include "cuda/device/values.h"

namespace halftone::cuda {

/// Brings rows, kBatch loads at a time: rotated, scaled, cut into digits. A lane has 8 consecutive dims of a
/// row, which K has side by side, too.
template <DecodeConfig C, int kBatch>
struct RowsQueries {
  using Traits = DecodeRowsTraits<C>;
  static constexpr int kRowLanes = Traits::kDim / 8, kLaneRows = 32 / kRowLanes;
  static constexpr float kNaN = __builtin_nanf("");
  const AttentionParams& p;
  int warp, warps, lane;  // of those that bring an item's rows

  struct Digits {
    uint2 digit[Traits::kDigits];
    float unit;  // of the lowest one's last place; NaN: a value of the row is no finite number
  };

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
  /// 16 bits, of which the row's largest value uses nearly all.
  static __device__ Digits cut(const float (&x)[8], float largest) {
    const float bounded = fmaxf(largest, 0x1p-100f), inverse = 32000.0f * __frcp_rn(bounded);
    Digits d;
    std::uint32_t pairs[4];  // low bytes of two values, high bytes of two values
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // an integer in the low bits of 1.5 * 2^23 + it
      pairs[i] = __byte_perm(__float_as_uint(fmaf(x[2 * i], inverse, 0x1.8p23f)),
                             __float_as_uint(fmaf(x[2 * i + 1], inverse, 0x1.8p23f)), 0x5140);
    }
    d.digit[0] = {__byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632)};
    d.digit[1] = {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410)};
    d.unit = largest < __builtin_huge_valf() ? bounded * (1.0f / 32000.0f) : kNaN;
    return d;
  }

  /// A lane's 8 dims of two rows, `row` and kLaneRows more; all lanes take part. `factor`: of all rows.
  __device__ void store(const uint4 (&raw)[2], typename Traits::Queries& queries, int row, int piece,
                        float factor) const {
    float x[2][8];
    const bool bf16 = p.q_type == DType::kBFloat16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t words[4] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[r][i] = half_of(words[i / 2], i % 2, bf16);
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
    // K's halves are blocks of 64 dims; of these lane t of four has 8 dims of the first 32 and of the others.
    const int block = piece / 4, chunk = block / 2 * 4 + piece % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + r * kLaneRows;
      const Digits d = cut(x[r], largest[r]);
      const int place = own * 128 + (chunk ^ own % 8) * 16 + block % 2 * 8;
#pragma unroll
      for (int i = 0; i < Traits::kDigits; ++i) {
        *reinterpret_cast<uint2*>(queries.digits[i] + place) = d.digit[i];
      }
      if (piece == 0) queries.factor[own] = fabsf(factor) * d.unit;
    }
  }

  /// The rows of an item; those that it lacks are zeros.
  __device__ void bring(const DeviceItem& item, typename Traits::Queries& queries) const {
    constexpr int kWarpRows = kBatch * kLaneRows;
    const unsigned piece = lane % kRowLanes, half = lane / kRowLanes;
    const int rows = item.work.row_end - item.work.row_begin;
#pragma unroll 1
    for (int base = warp * kWarpRows; base < Traits::kRows; base += warps * kWarpRows) {
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
        queries.slope[own] =
            p.alibi_slopes != nullptr && own < rows ? p.alibi_slopes[place.head] * kLog2e : 0.0f;
      }
#pragma unroll 1
      for (int i = 0; i < kBatch; i += 2) {
        store({raw[0], raw[1]}, queries, base + i * kLaneRows + half, piece, factor);
        if constexpr (kBatch > 2) raw[0] = raw[2], raw[1] = raw[3];
      }
    }
  }
};

/// A query warp: the rows of all items but the first, which the compute warps bring while they wait for keys.
template <DecodeConfig C>
__device__ inline void bring_queries(const AttentionParams& p, typename DecodeRowsTraits<C>::Shared& s,
                                     int warp, int lane) {
  using Traits = DecodeRowsTraits<C>;
  wait_for_previous_kernel();
  if (warp == 0) check_inputs(p, blockIdx.x, lane);
  const RowsQueries<C, 2> queries{p, warp, Traits::kQueryWarps, lane};
#pragma unroll 1
  for (int index = 1; s.queue.has(index); ++index) {
    barrier_wait(shared_address(&s.queries_empty[index % 2]), index / 2 & 1 ^ 1);
    queries.bring(s.queue.items[index % ItemQueue::kCapacity], s.queries[index % 2]);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.queries_full[index % 2]));
  }
}

}  // namespace halftone::cuda
