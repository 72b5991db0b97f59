// The queries of an item: from global to shared memory, by the warps of the scores.
#pragma once

#include "cuda/device/ptx.h"
#include "cuda/device/reduce.h"
#include "cuda/device/values.h"
#include "cuda/latent/few/traits.h"

namespace halftone::cuda {

/// A row of an item, by a warp; a lane has chunks of 8 dims.
template <LatentFewConfig C>
struct QueryRow {
  static constexpr int kChunks = LatentFewTraits<C>::kQueryDim / 8, kLoads = (kChunks + 31) / 32;
  RowPlace place;
  uint4 raw[kLoads];

  __device__ void load(const AttentionParams& p, const DeviceItem& item, int row) {
    const int lane = thread_index() % 32;
    place = place_of(p, item, row);
    const bool exists = row < item.work.row_end - item.work.row_begin;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      raw[i] = {};
      if (!exists || i * 32 + lane >= kChunks) continue;
      raw[i] = load_eight(static_cast<const std::uint16_t*>(p.q) + place.token * p.q_token_stride +
                              place.head * p.q_head_stride + (i * 32 + lane) * 8,
                          p.q_aligned);
    }
  }
};

/// Eight dims in the order in which Tile takes integers apart; what is 16 times too large there is 16 times
/// smaller here.
template <int kBits>
__device__ inline void order_query(std::uint32_t (&x)[4]) {
  if constexpr (kBits == 8) {  // 0 2 | 1 3 | 4 6 | 5 7
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const std::uint32_t low = __byte_perm(x[i], x[i + 1], 0x5410);
      x[i + 1] = __byte_perm(x[i], x[i + 1], 0x7632), x[i] = low;
    }
  } else {  // 0 4 | 1 5 | 2 6 | 3 7
    constexpr std::uint32_t kSixteenth = 0x2c002c00;
    const std::uint32_t a = __byte_perm(x[0], x[2], 0x5410), b = __byte_perm(x[0], x[2], 0x7632);
    const std::uint32_t c = __byte_perm(x[1], x[3], 0x5410), d = __byte_perm(x[1], x[3], 0x7632);
    x[0] = a, x[1] = mul_f16x2(b, kSixteenth), x[2] = c, x[3] = mul_f16x2(d, kSixteenth);
  }
}

/// The sum of 64 dims, eight of which each of eight lanes has in f16.
template <LatentFewConfig C>
__device__ inline void store_query_sum(const std::uint32_t (&x)[4], float& to) {
  float sum = 0.0f;
#pragma unroll
  for (const std::uint32_t word : x) sum += half_of(word, false, false) + half_of(word, true, false);
  sum = sum_of_lanes<1, 8>(sum);
  if (thread_index() % 8 == 0) to = sum;
}

/// Row `row` of an item by a warp: in units of a power of two, so that f16 holds what K's codes are
/// multiplied with. Rows that the item does not have are zeros. `side`: of what two items have side by side.
template <LatentFewConfig C>
__device__ inline void store_query(const AttentionParams& p, const QueryRow<C>& query,
                                   typename LatentFewTraits<C>::Shared& s, int side, int row) {
  using Traits = LatentFewTraits<C>;
  const int lane = thread_index() % 32;
  constexpr int kChunks = QueryRow<C>::kChunks, kLoads = QueryRow<C>::kLoads, kLatent = Traits::kLatent / 8;
  const bool bf16 = p.q_type == DType::kBFloat16;
  const auto& raw = query.raw;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const std::uint32_t words[] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (const std::uint32_t word : words) {
      largest = fmaxf(largest, fmaxf(fabsf(half_of(word, false, bf16)), fabsf(half_of(word, true, bf16))));
    }
  }
  largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  // Exponent bits of the largest value: 2^exponent, and its inverse, for every finite and normal one.
  const std::uint32_t bits = min(max(__float_as_uint(largest) & 0x7f800000u, 0x08000000u), 0x77000000u);
  const float unit = __uint_as_float(0x7f000000u - bits);
  if (lane == 0) {
    s.factor[side][row] = p.scale_log2 * __uint_as_float(bits);
    s.places[side][row] = query.place;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk >= kChunks) continue;
    const std::uint32_t words[] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    float x[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      x[2 * w] = half_of(words[w], false, bf16) * unit, x[2 * w + 1] = half_of(words[w], true, bf16) * unit;
    }
    std::uint32_t high[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      high[w] = !Traits::kBf16 && chunk < kLatent ? pack_f16x2(x[2 * w], x[2 * w + 1])
                                                  : pack_bf16x2(x[2 * w], x[2 * w + 1]);
    }
    if constexpr (Traits::kInteger) {
      if (chunk < kLatent) {
        store_query_sum<C>(high, s.query_sums[chunk / 8][row]);
        order_query<Traits::kBits>(high);
      }
    }
    std::uint16_t* const to =
        chunk < kLatent ? &s.queries[row][chunk * 8] : &s.rotary[0][row][(chunk - kLatent) * 8];
    *reinterpret_cast<uint4*>(to) = uint4{high[0], high[1], high[2], high[3]};
    if (bf16 || chunk < kLatent) continue;
    std::uint32_t low[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      low[w] =
          pack_bf16x2(x[2 * w] - half_of(high[w], false, true), x[2 * w + 1] - half_of(high[w], true, true));
    }
    *reinterpret_cast<uint4*>(&s.rotary[1][row][(chunk - kLatent) * 8]) = {low[0], low[1], low[2], low[3]};
  }
}

}  // namespace halftone::cuda
