// S^T = K Q^T and the softmax of a tile of 16 or 32 tokens, by one warp.
#pragma once

#include "cuda/device/reduce.h"
#include "cuda/latent/few/codes.h"
#include "cuda/latent/few/queries.h"

namespace halftone::cuda {

/// A tile: tokens of a block in the ring. A lane (g, c) = (lane / 4, lane % 4) has of each 16 tokens
/// t = token_of_row(g) and t + 8, and of each 8 rows 2 c and 2 c + 1.
template <LatentFewConfig C>
struct Tile {
  using Traits = LatentFewTraits<C>;
  using Shared = typename Traits::Shared;
  static constexpr int kRowTiles = Traits::kRowTiles, kTiles = Traits::kTiles;
  using Sums = float[kTiles][kRowTiles][4];  // (t, 2c), (t, 2c + 1), (t + 8, 2c), (t + 8, 2c + 1)

  int stage, slot;
  unsigned half;  // its first 16 tokens of the block's

  static __device__ unsigned lane() { return static_cast<unsigned>(thread_index()) % 32; }
  /// The lane's first token.
  __device__ unsigned token(int m) const { return (half + m) * 16 + token_of_row<C>(lane() / 4); }

  /// Logits but for the factor of a row. A group of dims has its own accumulators until they are multiplied
  /// with the scale: any f32 scale is exact.
  __device__ void multiply(const Shared& s, bool two_parts, Sums& x) const {
    multiply_rotary(s, two_parts, x);
#pragma unroll(kTiles* kRowTiles <= 2 ? 2 : 1)  // registers
    for (int group = 0; group < Traits::kGroups; ++group) {
      Sums sums = {};
      multiply_group(s, group, sums);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float above = 1.0f, below = 1.0f;
        if constexpr (Traits::kInteger) {
          add_offsets(s, group, m, x[m]);
        }
        if constexpr (!Traits::kBf16) {
          above = scale(s, group, token(m)), below = scale(s, group, token(m) + 8);
        }
        if constexpr (Traits::kInteger) above *= kIntegerUnit, below *= kIntegerUnit;
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[m][n][i] = fmaf(sums[m][n][i], i < 2 ? above : below, x[m][n][i]);
        }
      }
    }
  }

  /// The scale of a token for a group of dims.
  __device__ float scale(const Shared& s, int group, unsigned token) const {
    return few_scale<C>(Traits::scales(s, stage), group, token);
  }

 private:
  static constexpr int kPieceDims = Traits::kBf16 ? 8 : 16;            // of a lane
  static constexpr int kPieceWords = kPieceDims * Traits::kBits / 32;  // of its codes

  /// A lane's piece of its two tokens.
  struct Pair {
    std::uint32_t above[kPieceWords], below[kPieceWords];
    __device__ Pair(const std::uint8_t* first, int row_bytes) {
      const std::uint8_t* const second = first + 8 * row_bytes;
      if constexpr (kPieceWords == 2) {
        const uint2 upper = *reinterpret_cast<const uint2*>(first);
        const uint2 lower = *reinterpret_cast<const uint2*>(second);
        above[0] = upper.x, above[1] = upper.y, below[0] = lower.x, below[1] = lower.y;
      } else {
        const uint4 upper = *reinterpret_cast<const uint4*>(first);
        const uint4 lower = *reinterpret_cast<const uint4*>(second);
        above[0] = upper.x, above[1] = upper.y, above[2] = upper.z, above[3] = upper.w;
        below[0] = lower.x, below[1] = lower.y, below[2] = lower.z, below[3] = lower.w;
      }
    }
  };

  /// The codes of two tokens for k-step `step` of a piece, in f16; integers as they are stored, without a
  /// sign, in units of 2^-24.
  static __device__ void step_of(const Pair& k, int step, std::uint32_t (&a)[4]) {
    if constexpr (Traits::kBits == 4) {
      const std::uint32_t above = k.above[step / 2] >> step % 2 * 8,
                          below = k.below[step / 2] >> step % 2 * 8;
      a[0] = above & 0x000f000fu, a[1] = below & 0x000f000fu;
      a[2] = above & 0x00f000f0u, a[3] = below & 0x00f000f0u;
    } else if constexpr (Traits::kInteger) {
      a[0] = even_codes(k.above[step]), a[1] = even_codes(k.below[step]);
      a[2] = even_codes(k.above[step] >> 8), a[3] = even_codes(k.below[step] >> 8);
    } else {
      a[0] = e4m3x2_to_f16x2(k.above[step]), a[1] = e4m3x2_to_f16x2(k.below[step]);
      a[2] = e4m3x2_to_f16x2(k.above[step], true), a[3] = e4m3x2_to_f16x2(k.below[step], true);
    }
  }

  __device__ void multiply_group(const Shared& s, int group, Sums& sums) const {
    constexpr int kPieces = Traits::kGroupDims / 4 / kPieceDims;
    const unsigned g = lane() / 4, c = lane() % 4;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const unsigned piece = Traits::kGroupDims / kPieceDims * group + 4 * j + c;
      const auto pair = [&](int m) {
        constexpr bool kPairs = kPieceWords == 2;
        const unsigned chunk = kPairs ? piece / 2 : piece;
        return Pair(s.codes[stage] + code_place<C>(token(m), chunk) + (kPairs ? piece % 2 * 8 : 0),
                    Traits::kRowPitch);
      };
      const Pair first = pair(0), second = pair(kTiles - 1);
#pragma unroll
      for (int part = 0; part < kPieceDims / 8; ++part) {  // 8 dims of Q: two k-steps
        uint4 q[kRowTiles];
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          q[n] = *reinterpret_cast<const uint4*>(&s.queries[8 * n + g][piece * kPieceDims + 8 * part]);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            const Pair& k = m == 0 ? first : second;
            if constexpr (Traits::kBf16) {
              multiply_pair(k.above, k.below, q, step, sums[m]);
            } else {
              std::uint32_t a[4];
              step_of(k, 2 * part + step, a);
#pragma unroll
              for (int n = 0; n < kRowTiles; ++n) {
                mma_f16(sums[m][n], a, step == 0 ? q[n].x : q[n].z, step == 0 ? q[n].y : q[n].w);
              }
            }
          }
        }
      }
    }
  }

  /// What integers lack: a min, or the sign, times the sum of Q's dims.
  __device__ void add_offsets(const Shared& s, int group, int m, float (&x)[kRowTiles][4]) const {
    const float above = few_offset<C>(Traits::scales(s, stage), group, token(m)),
                below = few_offset<C>(Traits::scales(s, stage), group, token(m) + 8);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float2 sum = *reinterpret_cast<const float2*>(&s.query_sums[group][8 * n + lane() % 4 * 2]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = fmaf(i % 2 == 0 ? sum.x : sum.y, i < 2 ? above : below, x[n][i]);
    }
  }

  /// One k-step of 16-bit values.
  static __device__ void multiply_pair(const std::uint32_t (&above)[4], const std::uint32_t (&below)[4],
                                       const uint4 (&q)[kRowTiles], int step, float (&sums)[kRowTiles][4]) {
    const std::uint32_t a[4] = {above[2 * step], below[2 * step], above[2 * step + 1], below[2 * step + 1]};
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      mma_bf16(sums[n], a, step == 0 ? q[n].x : q[n].z, step == 0 ? q[n].y : q[n].w);
    }
  }

  /// The rotary dims. `two_parts`: Q is f16, of which bf16 leaves something.
  __device__ void multiply_rotary(const Shared& s, bool two_parts, Sums& x) const {
    const unsigned g = lane() / 4, c = lane() % 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned chunk = 4 * i + c;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const std::uint8_t* const first = Traits::ropes(s, stage) + rope_place<C>(token(m), chunk);
        const uint4 upper = *reinterpret_cast<const uint4*>(first);
        const uint4 lower = *reinterpret_cast<const uint4*>(first + 8 * Traits::kRopePitch);
        const std::uint32_t above[4] = {upper.x, upper.y, upper.z, upper.w};
        const std::uint32_t below[4] = {lower.x, lower.y, lower.z, lower.w};
        uint4 q[kRowTiles];
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          q[n] = *reinterpret_cast<const uint4*>(&s.rotary[0][8 * n + g][8 * chunk]);
        }
        multiply_pair(above, below, q, 0, x[m]);
        multiply_pair(above, below, q, 1, x[m]);
        if (!two_parts) continue;
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          q[n] = *reinterpret_cast<const uint4*>(&s.rotary[1][8 * n + g][8 * chunk]);
        }
        multiply_pair(above, below, q, 0, x[m]);
        multiply_pair(above, below, q, 1, x[m]);
      }
    }
  }
};

/// The softmax of a warp's tiles.
///
/// P is stored in 16 bits, in f16 but for bf16 records, in units of 2^max: a maximum that is raised, not when
/// a logit is above it, but before P leaves f16's range, and then stands so far below the logit that P has
/// bits for small ones, too. What another row needs changes no bit of a row.
template <LatentFewConfig C>
struct TileSoftmax {
  using Traits = LatentFewTraits<C>;
  using Shared = typename Traits::Shared;
  using Sums = typename Tile<C>::Sums;
  static constexpr int kRowTiles = Traits::kRowTiles, kTiles = Traits::kTiles;
  using Layout = KeysAsM<kRowTiles>;
  // Of a logit above `max`: after it was raised, and before it must be.
  static constexpr float kFirst = 7.0f, kLargest = 15.0f;

  // Rows 8 n + 2 c and the next one. `sum`: of the lane's tokens.
  float max[kRowTiles][2], sum[kRowTiles][2];
  unsigned stale;  // bit m: the units that the slot has of the m-th 16 tokens are not these

  static __device__ unsigned warp() { return static_cast<unsigned>(thread_index()) / 32; }
  static __device__ unsigned lane() { return static_cast<unsigned>(thread_index()) % 32; }

  __device__ void begin() {
    stale = 3;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      max[n][0] = max[n][1] = kMinus, sum[n][0] = sum[n][1] = 0.0f;
    }
  }

  /// What brings raw products to logits; keys that a row does not see have none.
  __device__ void to_logits(const AttentionParams& p, const Shared& s, int side, Sums& x) const {
    const unsigned c = lane() % 4;
    float2 factors[kRowTiles];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      factors[n] = *reinterpret_cast<const float2*>(&s.factor[side][8 * n + 2 * c]);
    }
    const auto factor = [&](int row) { return row % 2 == 0 ? factors[row / 2].x : factors[row / 2].y; };
    cap_logits<Layout>(p, s.softcap, factor, flat(x));
  }
  /// `first`: the block's first token, `end`: the item's.
  __device__ void mask(const AttentionParams& p, const Shared& s, const Tile<C>& tile, int side, int first,
                       int end, bool all_rows, Sums& x) const {
    const unsigned c = lane() % 4;
    const std::uint32_t live = *reinterpret_cast<const std::uint32_t*>(s.live[tile.stage]);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!(live >> (tile.token(m) + i / 2 * 8) & 1)) {
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) x[m][n][i] = kMinus;
        }
      }
    }
    if (all_rows) return;
    const auto position = [&](int row) { return s.places[side][2 * c + Layout::offset(row)].position; };
    mask_unseen<Layout>(p, position, first + static_cast<int>(tile.token(0)), end, flat(x));
  }

  /// From logits to probabilities.
  __device__ void weigh(Sums& x) {
    float top[kRowTiles][2];
    bool raises = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[n][i] = fmaxf(x[0][n][i], x[0][n][2 + i]);
        if constexpr (kTiles == 2) top[n][i] = fmaxf(top[n][i], fmaxf(x[1][n][i], x[1][n][2 + i]));
        raises |= top[n][i] > max[n][i] + kLargest;
      }
    }
    if (__any_sync(~0u, raises)) raise_max(top);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[m][n][i] = exp2_approx(x[m][n][i] - (max[n][i % 2] == kMinus ? 0.0f : max[n][i % 2]));
          sum[n][i % 2] += x[m][n][i];
        }
      }
    }
  }

  /// P to the tile's slot.
  __device__ void store(Shared& s, const Tile<C>& tile, const Sums& x) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const unsigned half = tile.half + m;
      std::uint32_t words[kRowTiles][2];  // tokens t and t + 8
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float first = x[m][n][2 * i], second = x[m][n][2 * i + 1];
          words[n][i] = Traits::kBf16 ? pack_bf16x2(first, second) : pack_f16x2(first, second);
        }
      }
      const std::uint32_t to =
          shared_address(s.prob[tile.slot][half][0][0]) + (lane() / 8 * 8 + token_of_row<C>(lane() % 8)) * 16;
      if constexpr (kRowTiles == 1) {
        store_matrices(to, words[0][0], words[0][1]);
      } else {
#pragma unroll
        for (int n = 0; n < kRowTiles; n += 2) {
          store_matrices(to + n * 256, words[n][0], words[n][1], words[n + 1][0], words[n + 1][1]);
        }
      }
      if (stale >> m & 1 && lane() < 4) store_units(s, tile.slot, half);
      stale &= ~(1u << m);
    }
  }

  /// What the warp's tiles of the item come to.
  __device__ void leave(Shared& s, int side) const {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float total = sum_of_lanes<4, 32>(sum[n][i]);
        if (lane() < 4) s.state[side][warp()][8 * n + 2 * lane() + i] = {max[n][i], total};
      }
    }
  }

 private:
  __device__ void raise_max(float (&top)[kRowTiles][2]) {
    stale = 3;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[n][i] = largest_of_lanes<4, 32>(top[n][i]);
        const bool raises = top[n][i] > max[n][i] + kLargest;
        const float next = raises ? rintf(top[n][i]) - kFirst : max[n][i];
        const bool none = max[n][i] == kMinus;  // so far
        sum[n][i] *= exp2_approx(none || !raises ? 0.0f : max[n][i] - next);
        max[n][i] = next;
      }
    }
  }

  /// By lanes 0 to 3.
  __device__ void store_units(Shared& s, int slot, unsigned half) const {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int unit = max[n][i] == kMinus ? kNoUnit : __float2int_rn(max[n][i]);
        reinterpret_cast<int*>(&s.units[slot][8 * n + 2 * lane() + i])[half] = unit;
      }
    }
  }
};

}  // namespace halftone::cuda
