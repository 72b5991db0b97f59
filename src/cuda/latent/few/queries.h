// The queries of an item: from global memory to shared memory by all compute warps, from there to B
// fragments.
#pragma once

#include "cuda/device/ptx.h"
#include "cuda/device/values.h"
#include "cuda/latent/few/traits.h"

namespace halftone::cuda {

/// Row `row` of an item by a warp: in units of a power of two, so that f16 holds what K's codes are
/// multiplied with. Rows that the item does not have are zeros.
template <LatentFewConfig C>
__device__ inline void load_query(const AttentionParams& p, const DeviceItem& item,
                                  typename LatentFewTraits<C>::Shared& s, int row) {
  using Traits = LatentFewTraits<C>;
  const int lane = thread_index() % 32;
  constexpr int kChunks = Traits::kQueryDim / 8, kLoads = (kChunks + 31) / 32, kLatent = Traits::kDim / 8;
  const bool bf16 = p.q_type == DType::kBFloat16;
  const bool exists = row < item.work.row_end - item.work.row_begin;
  const RowPlace place = place_of(p, item, row);
  uint4 raw[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    raw[i] = {};
    if (!exists || i * 32 + lane >= kChunks) continue;
    raw[i] = load_eight(static_cast<const std::uint16_t*>(p.q) + place.token * p.q_token_stride +
                            place.head * p.q_head_stride + (i * 32 + lane) * 8,
                        p.q_aligned);
  }
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
    s.factor[row] = p.scale_log2 * __uint_as_float(bits);
    s.places[row] = place;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk >= kChunks) continue;
    const std::uint32_t words[] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float x = half_of(words[w], false, bf16) * unit, y = half_of(words[w], true, bf16) * unit;
      high[w] = Traits::kScaled && chunk < kLatent ? pack_f16x2(x, y) : pack_bf16x2(x, y);
      low[w] = pack_bf16x2(x - half_of(high[w], false, true), y - half_of(high[w], true, true));
    }
    const uint4 x{high[0], high[1], high[2], high[3]};
    if (chunk < kLatent) {
      *reinterpret_cast<uint4*>(&s.queries[row][chunk * 8]) = x;
    } else {
      *reinterpret_cast<uint4*>(&s.rotary[0][row][(chunk - kLatent) * 8]) = x;
      *reinterpret_cast<uint4*>(&s.rotary[1][row][(chunk - kLatent) * 8]) = {low[0], low[1], low[2], low[3]};
    }
  }
}

/// What a warp multiplies the codes of K with: a group of dims, the rows of its team. K's dims come in the
/// order of a lane's pieces of 16 bytes, and so do these.
template <LatentFewConfig C>
struct QueryFragments {
  using Traits = LatentFewTraits<C>;
  static constexpr int kPieceDims = Traits::kScaled ? 16 : 8, kPieces = Traits::kGroupDims / 4 / kPieceDims;
  std::uint32_t x[Traits::kRowTiles][kPieces][kPieceDims / 2];  // [step, register]

  __device__ void load(const typename Traits::Shared& s) {
    const auto [team, warp, lane] = ComputeThread();
    const unsigned group = warp % Traits::kGroups, first_row = Traits::first_row(team);
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const unsigned dim = group * Traits::kGroupDims + kPieceDims * (4 * j + lane % 4);
        const auto* at = reinterpret_cast<const uint4*>(&s.queries[first_row + 8 * n + lane / 4][dim]);
#pragma unroll
        for (int i = 0; i < kPieceDims / 8; ++i) {
          const uint4 words = at[i];
          x[n][j][4 * i] = words.x, x[n][j][4 * i + 1] = words.y;
          x[n][j][4 * i + 2] = words.z, x[n][j][4 * i + 3] = words.w;
        }
      }
    }
  }
};

}  // namespace halftone::cuda
