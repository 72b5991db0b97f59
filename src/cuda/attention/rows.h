// Packed query rows: where they stand, which keys they see, how they come from Q.
#pragma once

#include "cuda/attention/item_queue.h"
#include "cuda/attention/params.h"
#include "format/hadamard.h"

namespace halftone::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMinus = -__builtin_huge_valf();

/// Where a packed row of an item stands.
struct RowPlace {
  std::int64_t token;  // row of Q and O
  int head;
  int position;  // bottom-right aligned: the last key that causal attention sees
  float slope;   // ALiBi, base 2
};

/// Packed row `row` of an item, apart from its slope.
__device__ inline RowPlace place_of(const AttentionParams& p, const DeviceItem& item, int row) {
  const int group = p.schedule.params.group;
  const int packed = item.work.row_begin + row, query = packed / group;
  return {std::int64_t{item.first_query} + query, item.work.kv_head * group + packed - query * group,
          query + item.keys - item.queries, 0.0f};
}

/// The slope of ALiBi of a head, base 2: 0 without.
__device__ inline float slope_of(const AttentionParams& p, int head) {
  return p.alibi_slopes == nullptr ? 0.0f : p.alibi_slopes[head] * kLog2e;
}

/// Keys from `begin` up to `end`.
struct KeyRange {
  int begin, end;
  __device__ bool has(int key, int count) const { return key >= begin && key + count <= end; }
};

/// The keys before `end` that rows at positions from `first` to `last` all see: pieces within need no mask.
__device__ inline KeyRange seen_by_all(const AttentionParams& p, int first, int last, int end) {
  return {last - p.window_left, min(end, first + p.causal_right + 1)};
}
/// Likewise of every row of an item.
__device__ inline KeyRange seen_by_all(const AttentionParams& p, const DeviceItem& item,
                                       const RowPlace* places, int end) {
  const int last_row = max(item.work.row_end - item.work.row_begin, 1) - 1;
  return seen_by_all(p, places[0].position, places[last_row].position, end);
}

__device__ inline QueryBounds bounds_of(const AttentionParams& p) {
  return {p.q_tokens, p.schedule.params.group};
}

/// Eight 16-bit elements from `at` on; `aligned` to 16 bytes or not.
__device__ inline uint4 load_eight(const std::uint16_t* at, bool aligned) {
  if (aligned) return __ldg(reinterpret_cast<const uint4*>(at));
  uint4 x{};
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    x.x = __funnelshift_r(x.x, x.y, 16), x.y = __funnelshift_r(x.y, x.z, 16);
    x.z = __funnelshift_r(x.z, x.w, 16), x.w = __funnelshift_r(x.w, at[i], 16);
  }
  return x;
}

/// Rotates a row that is spread over lanes: lane i of a segment holds the dims from i * kElements on.
/// Stages and rounding are those of hadamard::rotate().
template <int kElements, int kDim>
__device__ inline void rotate_lanes(float (&x)[kElements], int lane) {
  constexpr int kBlock = hadamard::block_size(kDim);
#pragma unroll
  for (int h = 1; h < kElements; h *= 2) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
#pragma unroll 1
  for (int h = kElements; h < min(kBlock, 32 * kElements); h *= 2) {
    const bool upper = lane & h / kElements;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], h / kElements);
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
}

}  // namespace halftone::cuda
