// O^T += V^T P^T.
#pragma once

#include "cuda/latent/few/traits.h"

namespace halftone::cuda {

/// A warp's 64 dims of O for all rows. Of an m-tile, 16 dims, row g is dim 2g and row g + 8 is
/// dim 2g + 1, so that a lane has pairs of adjacent dims; with bf16 records they are dims g and g + 8 until
/// pair() exchanges them.
template <LatentFewConfig C>
struct Output {
  using Traits = LatentFewTraits<C>;
  static constexpr int kTiles = Traits::kRowTiles, kDimTiles = Traits::kDim / Traits::kOutputWarps / 16;
  static constexpr int kRise = 3;  // log2 of a tile's unit over O's before that is raised
  float x[kDimTiles][kTiles][4];
  int unit[kTiles];  // log2 of what row 8 n + lane / 4 is in units of

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) unit[n] = kNoUnit;
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

  /// A block whose P is in a slot.
  __device__ void add(const typename Traits::Shared& s, int stage, int slot) {
    const unsigned warp = this->warp(), lane = static_cast<unsigned>(thread_index()) % 32;
    const unsigned group = Traits::kScaled ? warp / 2 : 0;
    std::uint32_t prob[2][kTiles][2];
    load_prob(s, slot, 0, group, lane, prob[0]);
    load_prob(s, slot, 1, group, lane, prob[1]);
    to_unit(s.units[slot][group], lane, prob);
    add_block(shared_address(s.codes[stage]), prob, warp, lane);
  }
  static __device__ unsigned warp() {
    return static_cast<unsigned>(thread_index() - Traits::kFirstOutput) / 32;
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
  /// P of 16 tokens as B fragments.
  static __device__ void load_prob(const typename Traits::Shared& s, int slot, int half, unsigned group,
                                   unsigned lane, std::uint32_t (&prob)[kTiles][2]) {
    const std::uint32_t from = shared_address(s.prob[slot][half][group][0][0]) + lane * 16;
    if constexpr (kTiles == 1) {
      load_transposed(prob[0], from);
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        std::uint32_t words[4];
        load_transposed(words, from + n * 256);
        prob[n][0] = words[0], prob[n][1] = words[1], prob[n + 1][0] = words[2], prob[n + 1][1] = words[3];
      }
    }
  }

  /// Brings P from its tiles' units to that of O, which is raised if it is too small for that.
  __device__ void to_unit(const int2 (&units)[Traits::kRows], unsigned lane,
                          std::uint32_t (&prob)[2][kTiles][2]) {
    int2 rise[kTiles];
    int most = kNoUnit;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int2 own = units[8 * n + lane / 4];
      rise[n] = {own.x - unit[n], own.y - unit[n]};
      most = max(most, max(rise[n].x, rise[n].y));
    }
    if (__any_sync(~0u, most > kRise)) {
      float2 by[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int largest = max(rise[n].x, rise[n].y), raised = largest > kRise ? largest : 0;
        unit[n] += raised, rise[n].x -= raised, rise[n].y -= raised;
        by[n] = of_columns(exp2_approx(static_cast<float>(-raised)), lane);
      }
      scale(by);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float power = exp2_approx(static_cast<float>(half == 0 ? rise[n].x : rise[n].y));
        const std::uint32_t both = Traits::kScaled ? pack_f16x2(power, power) : pack_bf16x2(power, power);
#pragma unroll
        for (std::uint32_t& word : prob[half][n]) {
          word = Traits::kScaled ? mul_f16x2(word, both) : mul_bf16x2(word, both);
        }
      }
    }
  }

 public:
  /// Of 8 rows, a value each in the lanes 4 row to 4 row + 3: those of the lane's columns of x.
  static __device__ float2 of_columns(float value, unsigned lane) {
    const unsigned from = lane % 4 * 8;
    return {__shfl_sync(~0u, value, from), __shfl_sync(~0u, value, from + 4)};
  }

 private:
  __device__ void add_block(std::uint32_t codes, const std::uint32_t (&prob)[2][kTiles][2], unsigned warp,
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
          for (int n = 0; n < kTiles; ++n) mma_f16(x[m][n], a, prob[step][n][0], prob[step][n][1]);
        }
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          std::uint32_t a[4];
          const unsigned token = 16 * step + lane / 16 * 8 + lane % 8;
          const unsigned chunk = 2 * (kDimTiles * warp + m) + lane / 8 % 2;
          load_transposed(a, codes + code_place(token, chunk, Traits::kRowBytes));
#pragma unroll
          for (int n = 0; n < kTiles; ++n) mma_bf16(x[m][n], a, prob[step][n][0], prob[step][n][1]);
        }
      }
    }
  }
};

}  // namespace halftone::cuda
