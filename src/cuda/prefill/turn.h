// The role that turns V in E4M3 over, of which tiles have come as pages have them: wgmma takes B of 8 bits
// only with k, here the tokens, as the inner dim. Where a tile lies, a string of it becomes 16 tokens of a
// dim.
#pragma once

#include "cuda/device/chunk.h"
#include "cuda/prefill/packed.h"

namespace halftone::cuda {

/// Turns tiles of 16 tokens over as value_tiles.h has them, by one warp. Of each block of 32 dims lane (g, t)
/// has four tokens of dims 4 g to 4 g + 3, and wants all tokens of dim 4 g + t: a word of each lane of its
/// quad. Quads begin with different lanes, so that none meets another's banks.
template <PrefillConfig C>
struct ValueTurner {
  static constexpr int kBlocks = C.value_dim / 32, kBlockBytes = 32 * 16;
  std::uint8_t* const values;  // of all stages, at a multiple of 64
  const std::uint32_t lane;

  /// `tile`: of `values`, a multiple of 64.
  __device__ void turn_over(std::uint32_t tile) const {
    const std::uint32_t pick = lane % 2 == 0 ? 0x5410 : 0x7632;
    // Of the first word that the lane reads, or writes; words are 16, or 4, bytes apart.
    const std::uint32_t source = tile + lane / 4 * 64 + lane / 8 * 16 + lane % 4 / 2 * 8;
    const std::uint32_t target = tile + lane * 16 + lane / 8 * 4;
    std::uint32_t words[kBlocks][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 x = *reinterpret_cast<const uint2*>(values + (source ^ 16 * i) + block * kBlockBytes);
        words[block][i] = __byte_perm(x.x, x.y, pick);
      }
    }
    __syncwarp();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<std::uint32_t*>(values + (target ^ 4 * i) + block * kBlockBytes) = words[block][i];
      }
    }
  }
  /// Zeroes tokens from `alive` on in a tile that is turned over.
  __device__ void clear(std::uint32_t tile, int alive) const {
    std::uint32_t keep[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) keep[i / 4] |= lane_token(i / 4, i % 4) < alive ? 0xffu << i % 4 * 8 : 0;
    auto* at = reinterpret_cast<uint4*>(values + (tile + lane * 16));
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block, at += 32) {
      uint4 x = *at;
      x.x &= keep[0], x.y &= keep[1], x.z &= keep[2], x.w &= keep[3];
      *at = x;
    }
  }
};

/// The warps that turn tiles over, in turn.
template <PrefillConfig C>
__device__ inline void turn_values(typename PrefillTraits<C>::Shared& s, int warp) {
  using Traits = PrefillTraits<C>;
  constexpr int kBytes = kTileTokens * C.value_dim;
  const ValueTurner<C> turner{s.v[0], static_cast<std::uint32_t>(thread_index()) % 32};
  RingPlace<C.stages> ring;
#pragma unroll 1
  for (;; ring.advance()) {
    barrier_wait(shared_address(&s.packed_full[ring.stage]), ring.parity);
    const std::uint32_t live = s.packed_live[ring.stage];
    const int keys = s.packed_keys[ring.stage];
    if (keys == kPackedEnd) return;
#pragma unroll 1
    for (int i = warp; i < C.kv_tile / kTileTokens; i += Traits::kConvertWarps) {
      const std::uint32_t tile = ring.stage * Traits::kValueTileBytes + i * kBytes;
      const bool lives = live >> i & 1;
      const int alive = lives ? keys - i * kTileTokens : 0;
      if (lives) turner.turn_over(tile);
      if (alive < kTileTokens) turner.clear(tile, alive);
    }
    fence_async_shared();
    __syncwarp();
    if (turner.lane == 0) barrier_arrive(shared_address(&s.v_full[ring.stage]));
  }
}

}  // namespace halftone::cuda
