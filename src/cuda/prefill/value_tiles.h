// V of a cache as codes of E4M3 for wgmma, whose B of 8 bits is K-major: of a tile of 16 tokens the 16 codes
// of a dim lie together, dim after dim, which is a column of core matrices. Tokens 2t, 2t + 1, 2t + 8 and 2t
// + 9 are adjacent: a lane's P of a tile is then a register of A as it comes out of the softmax.
#pragma once

#include "cuda/dequantize/kernel.h"
#include "cuda/prefill/stage.h"

namespace halftone::cuda {

template <int kDim>
struct ValueTiles {
  static constexpr int kTileBytes = kDim * kTileTokens;

  const StageParams& p;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ uint4* out(std::int64_t row, int head) const {
    const std::int64_t tile = head * (p.rows.rows / kTileTokens) + row / kTileTokens;
    return reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(p.rows.out) + tile * kTileBytes);
  }
  /// A tile whose page is missing.
  __device__ __forceinline__ void zero_tile(std::int64_t row, int head) const {
    for (int dim = lane(); dim < kDim; dim += 32) out(row, head)[dim] = {};
  }
  /// Lane (g, t) of a page's string has the codes of its four tokens of four dims of a block: a quad trades
  /// them for all tokens of a dim each.
  __device__ __forceinline__ void take_tile(const std::uint8_t* tile, std::int64_t row, int count,
                                            int head) const {
    const page::Part& part = p.rows.part;
    const int g = lane() / 4, t = lane() % 4;
    std::uint32_t keep = 0;  // of the tokens that there are
#pragma unroll
    for (int k = 0; k < kLaneRows; ++k) keep |= lane_token(t, k) < count ? 0xffu << 8 * k : 0;
    uint4 string[kDim / 32];
#pragma unroll
    for (int b = 0; b < kDim / 32; ++b) {
      const std::int64_t at = part.data_offset + part.place(2 * t, 32 * b + 4 * g).byte;
      string[b] = __ldg(reinterpret_cast<const uint4*>(tile + at));
    }
#pragma unroll
    for (int b = 0; b < kDim / 32; ++b) {
      const uint4& w = string[b];
      std::uint32_t dims[4] = {__byte_perm(w.x, w.y, 0x5410) & keep, __byte_perm(w.x, w.y, 0x7632) & keep,
                               __byte_perm(w.z, w.w, 0x5410) & keep, __byte_perm(w.z, w.w, 0x7632) & keep};
      transpose_quad(dims, lane());
      out(row, head)[32 * b + 4 * g + t] = {dims[0], dims[1], dims[2], dims[3]};
    }
  }
};

}  // namespace halftone::cuda
