// The role that brings queries: digits of 8 bits of the next item's rows, in the order in which K lies in its
// page.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/device/values.h"

namespace halftone::cuda {

/// Brings rows: rotated, scaled, cut into digits. A lane has 8 consecutive dims of a row, which K has side by
/// side, too.
template <DecodeConfig C>
struct RowsQueries {
  using Traits = DecodeRowsTraits<C>;
  static constexpr int kRowLanes = Traits::kDim / 8, kLaneRows = 32 / kRowLanes;
  static constexpr int kBatch = 4;  // loads in flight
  static constexpr float kNaN = __builtin_nanf("");
  const AttentionParams& p;
  typename Traits::Shared& s;
  int warp, lane;

  struct Digits {
    uint2 digit[Traits::kMostDigits];
    float unit;  // of the lowest one's last place; NaN: a value of the row is no finite number
  };

  static __device__ float largest_of_row(const float (&x)[8], int lane) {
    std::uint32_t largest = 0;  // infinities and NaNs are the largest
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int i = kRowLanes / 2; i > 0; i /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, i));
    return __uint_as_float(largest);
  }
  /// 16 bits, of which the row's largest value uses nearly all.
  static __device__ Digits cut_integer(const float (&x)[8], int lane) {
    const float largest = largest_of_row(x, lane), bounded = fmaxf(largest, 0x1p-100f);
    const float inverse = 32000.0f / bounded;
    Digits d;
    std::uint32_t high[2] = {}, low[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto q = static_cast<std::uint32_t>(__float2int_rn(x[i] * inverse));
      high[i / 4] |= (q >> 8 & 0xff) << 8 * (i % 4);
      low[i / 4] |= (q & 0xff) << 8 * (i % 4);
    }
    d.digit[0] = {high[0], high[1]}, d.digit[1] = {low[0], low[1]};
    d.unit = largest < __builtin_huge_valf() ? bounded * (1.0f / 32000.0f) : kNaN;
    return d;
  }
  static __device__ std::uint32_t to_e4m3x2(float low, float high) {
    std::uint16_t y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
  }
  static __device__ Digits cut_float(const float (&x)[8], int lane) {
    const float largest = largest_of_row(x, lane);
    // The largest value comes to stand in [128, 256).
    const std::uint32_t bits = min(max(__float_as_uint(largest) & 0x7f800000u, 0x08000000u), 0x77000000u);
    const float factor = __uint_as_float(0x7f000000u - bits) * 128.0f;
    Digits d;
    float rest[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rest[i] = x[i] * factor;
#pragma unroll
    for (int digit = 0; digit < Traits::kMostDigits; ++digit) {
      std::uint32_t words[2] = {};
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const std::uint32_t pair = to_e4m3x2(rest[i], rest[i + 1]), values = e4m3x2_to_f16x2(pair);
        words[i / 4] |= pair << 8 * (i % 4);
        rest[i] -= half_of(values, false, false), rest[i + 1] -= half_of(values, true, false);
      }
      d.digit[digit] = {words[0], words[1]};
    }
    d.unit = largest < __builtin_huge_valf() ? __uint_as_float(bits) * (1.0f / 128.0f) : kNaN;
    return d;
  }

  /// One lane's 8 dims of a row; all lanes take part.
  __device__ void store(const DeviceItem& item, const uint4& raw, typename Traits::Queries& queries, int row,
                        int piece) const {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = half_of(words[i / 2], i % 2, p.q_type == DType::kBFloat16);
    if (p.rotate_k) {
      rotate_lanes<8, Traits::kDim>(x, piece);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= hadamard::factor(hadamard::block_size(Traits::kDim));
    }
    float factor = p.scale_log2;
    if (p.k.static_scale != nullptr) factor *= p.k.static_scale[item.work.kv_head * p.k.static_stride];
    if (factor < 0.0f) {  // the factor of a row is not negative
      factor = -factor;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = -x[i];
    }
    Digits d;
    if constexpr (Traits::kInteger) {
      d = cut_integer(x, lane);
    } else {
      d = cut_float(x, lane);
    }
    // K's halves are blocks of 64 dims; of these lane t of four has 8 dims of the first 32 and of the others.
    const int block = piece / 4, t = piece % 4;
    const int place = row * 128 + ((block / 2 * 4 + t) ^ row % 8) * 16 + block % 2 * 8;
#pragma unroll
    for (int i = 0; i < Traits::kMostDigits; ++i) {
      *reinterpret_cast<uint2*>(queries.digits[i] + place) = d.digit[i];
    }
    if (piece == 0) {
      const RowPlace at = place_of(p, item, row);
      const bool biased = p.alibi_slopes != nullptr && row < item.work.row_end - item.work.row_begin;
      queries.factor[row] = factor * d.unit;
      queries.position[row] = at.position;
      queries.slope[row] = biased ? p.alibi_slopes[at.head] * kLog2e : 0.0f;
    }
  }

  /// The rows of an item; those that it lacks are zeros.
  __device__ void bring(const DeviceItem& item, typename Traits::Queries& queries) const {
    const int piece = lane % kRowLanes, rows = item.work.row_end - item.work.row_begin;
#pragma unroll 1
    for (int base = warp * kBatch * kLaneRows; base < Traits::kRows;
         base += Traits::kQueryWarps * kBatch * kLaneRows) {
      uint4 raw[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = base + i * kLaneRows + lane / kRowLanes;
        raw[i] = {};
        if (row >= rows) continue;
        const RowPlace place = place_of(p, item, row);
        raw[i] = load_eight(static_cast<const std::uint16_t*>(p.q) + place.token * p.q_token_stride +
                                place.head * p.q_head_stride + piece * 8,
                            p.q_aligned);
      }
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        store(item, raw[0], queries, base + i * kLaneRows + lane / kRowLanes, piece);
#pragma unroll
        for (int j = 1; j < kBatch; ++j) raw[j - 1] = raw[j];
      }
    }
  }

  __device__ void run() const {
    wait_for_previous_kernel();
    if (warp == 0 && !s.queue.has(0)) check_inputs(p, blockIdx.x, lane);
#pragma unroll 1
    for (int index = 0; s.queue.has(index); ++index) {
      typename Traits::Queries& queries = s.queries[index % 2];
      barrier_wait(shared_address(&s.queries_empty[index % 2]), index / 2 & 1 ^ 1);
      bring(s.queue.items[index % ItemQueue::kCapacity], queries);
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&s.queries_full[index % 2]));
      if (warp == 0 && index == 0) check_inputs(p, blockIdx.x, lane);
    }
  }
};

}  // namespace halftone::cuda
