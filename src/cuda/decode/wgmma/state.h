// What a warpgroup of the decode kernel holds of an item, and how an item begins and ends for it. Its warps
// share the rows; of a piece of four tiles warp w computes the logits of tile w and, of O, the dims of block
// w.
#pragma once

#include <cfloat>

#include "cuda/attention/side.h"
#include "cuda/decode/traits.h"
#include "cuda/device/fragments.h"
#include "cuda/device/reduce.h"
#include "cuda/device/wgmma.h"

namespace halftone::cuda {

/// A block of 32 dims of V in one tile, in codes of 4 bits: A fragments of its two m-tiles over the tile's
/// tokens. Scale and min enter the fragment, which then holds values: the blocks of a product differ in
/// scale.
template <PartConfig P>
struct VBlock {
  static_assert(P.dtype == DType::kInt4);
  VTile<P.dtype, 32> codes;
  std::uint32_t scale[2], min[2];  // of tokens 2t + 8p, 2t + 8p + 1

  __device__ void load(int groups, const std::uint8_t* data, const std::uint8_t* params, int block,
                       int lane) {
    using Side = Part<P>;
    // Two blocks share a chunk of a lane's string.
    const uint2 v = *reinterpret_cast<const uint2*>(data + (block / 2 * 32 + lane) * 16 + block % 2 * 8);
    codes.words[0] = v.x, codes.words[1] = v.y;
    const int group = P.mode == ScaleMode::kBlock ? Side::group_of(block) : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = group * kTileTokens + lane % 4 * 2 + 8 * i;
      scale[i] = Side::load_pair(params, at);
      min[i] = Side::load_pair(params, at + groups * kTileTokens);
    }
  }
  /// What stands for tokens from `alive` on becomes zero.
  __device__ void clear(int alive, int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool first = 2 * t + 8 * i < alive, second = 2 * t + 8 * i + 1 < alive;
      const std::uint32_t mask = (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
      scale[i] &= mask, min[i] &= mask;
    }
  }
  __device__ void fragment(int j, std::uint32_t (&a)[4]) const {
    codes.fragment(0, j, 0, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 1024 + q (or 16 q) -> q -> value
      const std::uint32_t raised = a[i] | 0x64006400u;
      const std::uint32_t q = i % 2 == 0 ? add_f16x2(raised, 0xe400e400u)                // - 1024
                                         : fma_f16x2(raised, 0x2c002c00u, 0xd400d400u);  // / 16 - 64
      a[i] = fma_f16x2(q, scale[i / 2], min[i / 2]);
    }
  }
};

template <DecodeConfig C>
struct Team {
  using Traits = DecodeTraits<C>;
  using Shared = typename Traits::Shared;
  using Queries = typename Traits::Queries;
  using K = KReader<C.k.dtype, Traits::kDim>;
  using V = VBlock<C.v>;
  static_assert(Traits::kDim == 128 && C.piece_tiles == 4 && C.k == C.v && C.k.asymmetric);
  static constexpr int kBlocks = Traits::kBlocks;
  static constexpr int kSteps = 2 * kBlocks;  // of 16 dims
  static constexpr int kTiles = C.row_tiles;
  static constexpr int kColumns = 8 * kTiles;  // rows of the unit
  static constexpr int kSums = kColumns / 2;   // accumulators of 64 x kColumns: 4 i ... belong to tile i
  static constexpr int kProbBytes = 4 * kColumns * 32;  // P of a piece: a B matrix per tile
  static constexpr DType kType = DType::kFloat16;       // of the products
  static constexpr std::uint64_t kNext = kNextBMatrix<kColumns>;
  static constexpr int kGroups = C.k.mode == ScaleMode::kBlock ? kBlocks / C.k.group_blocks : 1;

  float max[kTiles][2];  // base 2, of columns 2t, 2t + 1; kNone before the first key
  float sum[kTiles][2];  // this lane's share
  float out[2][kSums];   // O^T: m-tile j of the warp's block
  unsigned thread;       // of the compute warps
  static constexpr float kNone = -FLT_MAX;
  static constexpr float kLargest = 1 << Traits::kLargestLog2;  // of P; every raise is a barrier more

  __device__ int lane() const { return static_cast<int>(thread % 32); }
  __device__ int g() const { return static_cast<int>(thread % 32 / 4); }
  __device__ int t() const { return static_cast<int>(thread % 4); }
  __device__ int warp() const { return static_cast<int>(thread / 32 % 4); }
  __device__ int team() const { return static_cast<int>(thread / 128); }
  /// P of a piece, two of which exist: where the team's O goes at the end.
  __device__ std::uint8_t* prob(Shared& s, int buffer) const {
    static_assert(sizeof(s.out[0]) >= 2 * kProbBytes);
    return reinterpret_cast<std::uint8_t*>(s.out[team()]) + buffer * kProbBytes;
  }
  __device__ void begin() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) max[n][c] = kNone, sum[n][c] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) out[j][i] = 0.0f;
    }
  }
  // K of one group: its fragments stay in registers until the products are complete.
  static constexpr bool kWholeRows = C.k.mode != ScaleMode::kBlock;
  using KFragments = std::uint32_t[kWholeRows ? kSteps : 1][4];
  __device__ void begin_scores(const Queries& queries, const std::uint8_t* tile, KFragments& a,
                               float (&x)[kSums]) const;
  __device__ void end_scores(const AttentionParams& p, const Queries& queries, const std::uint8_t* tile,
                             bool low_part, KFragments& a, float (&x)[kSums]) const;
  template <bool kFirst>
  __device__ void add_groups(K& k, const std::uint8_t* scales, std::uint64_t q, std::uint64_t sums,
                             float (&x)[kSums]) const;
  __device__ void modify(const AttentionParams& p, const Queries& queries, int first, int end,
                         float (&x)[kSums]) const;
  template <bool kLogits>
  __device__ bool probabilities(const float* factors, const float (&x)[kSums], std::uint32_t place,
                                float (&partial)[kTiles][2]) const;
  template <bool kLogits>
  __device__ void raise(const float* factors, const float (&x)[kSums], Shared& s);
  using VFragments = std::uint32_t[4][2][4];
  static __device__ void make_fragments(const V (&v)[4], VFragments& a);
  __device__ void accumulate(const VFragments& a, const std::uint8_t* prob);
  /// Until O is complete.
  __device__ void wait() {
    wgmma_wait();
    pin(out[0]);
    pin(out[1]);
  }
  __device__ void end(Shared& s);
};

/// Puts the team's state into shared memory.
template <DecodeConfig C>
__device__ inline void Team<C>::end(Shared& s) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[n][c] = sum_of_lanes<4, 32>(sum[n][c]);
    }
    if (g() == 0) {
      *reinterpret_cast<float2*>(&s.exchange[team()][warp()][n * 8 + 2 * t()]) = {sum[n][0], sum[n][1]};
    }
  }
  team_barrier(team());  // and nobody needs P any more
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = n * 8 + 2 * t() + c;
      *reinterpret_cast<float4*>(&s.out[team()][row][warp() * 32 + g() * 4]) = {
          out[0][4 * n + c], out[0][4 * n + 2 + c], out[1][4 * n + c], out[1][4 * n + 2 + c]};
      if (g() == 0 && warp() == 0) {
        const auto& shares = s.exchange[team()];
        s.state[team()][row] = {max[n][c] == kNone ? kMinus : max[n][c],
                                (shares[0][row] + shares[1][row]) + (shares[2][row] + shares[3][row])};
      }
    }
  }
}

}  // namespace halftone::cuda
