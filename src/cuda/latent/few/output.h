// O^T += V^T P^T, by the warps of a team.
#pragma once

#include "cuda/latent/few/traits.h"

namespace halftone::cuda {

/// A warp's 64 dims of O for the rows of its team. Of an m-tile, 16 dims, row g is dim 2g and row g + 8 is
/// dim 2g + 1, so that a lane has pairs of adjacent dims; with bf16 records they are dims g and g + 8 until
/// pair() exchanges them.
template <LatentFewConfig C>
struct Output {
  using Traits = LatentFewTraits<C>;
  static constexpr int kTiles = Traits::kRowTiles, kDimTiles = Traits::kDim / Traits::kTeamWarps / 16;
  float x[kDimTiles][kTiles][4];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0.0f;
      }
    }
  }

  /// Multiplies with a factor per row: those of the lane's rows 8 n + 2 c and the next one.
  __device__ void scale(const float2 (&by)[kTiles]) {
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        x[m][n][0] *= by[n].x, x[m][n][1] *= by[n].y, x[m][n][2] *= by[n].x, x[m][n][3] *= by[n].y;
      }
    }
  }

  /// A step whose P is in the team's Exchange.
  __device__ void add(const typename Traits::Shared& s, const Step<C>& at) {
    const auto [team, warp, lane] = ComputeThread();
    const typename Traits::Exchange& exchange = s.exchange[team];
    const unsigned group = Traits::kScaled ? warp / 2 : 0;
    float2 raised[kTiles];
    bool any = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      raised[n] = *reinterpret_cast<const float2*>(&s.raised[team][group][8 * n + lane % 4 * 2]);
      any |= raised[n].x != 1.0f || raised[n].y != 1.0f;
    }
    if (__any_sync(~0u, any)) scale(raised);
#pragma unroll
    for (int b = 0; b < Traits::kStep; ++b) {
      uint2 prob[2][kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        prob[0][n] = exchange.prob[b][group][0][n][lane], prob[1][n] = exchange.prob[b][group][1][n][lane];
      }
      add_block(shared_address(s.codes[at.stage[b]]), prob, warp, lane);
    }
  }

  /// Gives every lane pairs of adjacent dims: first_of_pair() and the next one of an m-tile.
  __device__ void pair() {
    if constexpr (Traits::kScaled) return;
    const bool odd = thread_index() / 4 % 2;
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float &low = x[m][n][i], &high = x[m][n][2 + i];
          const float other = __shfl_xor_sync(~0u, odd ? low : high, 4);
          (odd ? low : high) = other;
        }
      }
    }
  }
  static __device__ unsigned first_of_pair(unsigned lane) {
    const unsigned g = lane / 4;
    return Traits::kScaled ? 2 * g : g % 2 == 0 ? g : 8 + g - 1;
  }

 private:
  __device__ void add_block(std::uint32_t codes, const uint2 (&prob)[2][kTiles], unsigned warp,
                            unsigned lane) {
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
      if constexpr (Traits::kScaled) {
        std::uint32_t pairs[4];  // two dims of two tokens
        load_transposed(pairs, codes + code_place(lane, kDimTiles * warp + m, Traits::kRowBytes));
#pragma unroll
        for (std::uint32_t& word : pairs) word = __byte_perm(word, 0, 0x3120);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const std::uint32_t first = pairs[2 * step], second = pairs[2 * step + 1];
          const std::uint32_t a[4] = {e4m3x2_to_f16x2(first), e4m3x2_to_f16x2(first, true),
                                      e4m3x2_to_f16x2(second), e4m3x2_to_f16x2(second, true)};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) mma_f16(x[m][n], a, prob[step][n].x, prob[step][n].y);
        }
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          std::uint32_t a[4];
          const unsigned token = 16 * step + lane / 16 * 8 + lane % 8;
          const unsigned chunk = 2 * (kDimTiles * warp + m) + lane / 8 % 2;
          load_transposed(a, codes + code_place(token, chunk, Traits::kRowBytes));
#pragma unroll
          for (int n = 0; n < kTiles; ++n) mma_bf16(x[m][n], a, prob[step][n].x, prob[step][n].y);
        }
      }
    }
  }
};

}  // namespace halftone::cuda
