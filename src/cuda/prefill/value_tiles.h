// V of a cache as codes of E4M3 for wgmma, whose B of 8 bits is K-major: of a tile of 16 tokens the 16 codes
// of a dim lie together, dim after dim, which is a column of core matrices. Tokens 2t, 2t + 1, 2t + 8 and 2t
// + 9 are adjacent: a lane's P of a tile is then a register of A as it comes out of the softmax.
#pragma once

#include "cuda/dequantize/kernel.h"
#include "cuda/prefill/stage.h"

namespace halftone::cuda {

/// Where the tile of a head whose first staged row is `row` goes, a dim after the other.
__device__ __forceinline__ uint4* value_tile(const DequantizeParams& rows, std::int64_t row, int head) {
  const std::int64_t tile = head * (rows.rows / kTileTokens) + row / kTileTokens;
  return static_cast<uint4*>(rows.out) + tile * rows.part.dim;
}
/// One whose page is missing.
__device__ __forceinline__ void zero_value_tile(const DequantizeParams& rows, std::int64_t row, int head) {
  for (int dim = threadIdx.x % 32; dim < rows.part.dim; dim += 32) value_tile(rows, row, head)[dim] = {};
}
/// Bytes of those of the four tokens of a lane that there are, `place` in its quad.
__device__ __forceinline__ std::uint32_t bytes_of_tokens(int place, int count) {
  std::uint32_t keep = 0;
#pragma unroll
  for (int k = 0; k < kLaneRows; ++k) keep |= lane_token(place, k) < count ? 0xffu << 8 * k : 0;
  return keep;
}

/// Of rows of a multiple of 64 dims, up to 128 at a time.
struct ValueTiles {
  static constexpr int kDims = 128;

  const StageParams& p;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ void zero_tile(std::int64_t row, int head) const {
    zero_value_tile(p.rows, row, head);
  }
  /// Lane (g, t) of a page's string has the codes of its four tokens of four dims of a block: a quad trades
  /// them for all tokens of a dim each.
  __device__ __forceinline__ void take_tile(const std::uint8_t* tile, const TilePlace& at) const {
    const page::Part& part = p.rows.part;
    const std::uint32_t keep = bytes_of_tokens(lane() % 4, at.count);
    const auto* from = reinterpret_cast<const uint4*>(tile + part.data_offset) + lane();
    uint4* to = value_tile(p.rows, at.row, at.head) + lane();
#pragma unroll 1
    for (int first = 0; first < part.dim; first += kDims, from += kDims, to += kDims) {
      uint4 string[kDims / 32];  // 16 bytes of a lane's string for each block of 32 dims
#pragma unroll
      for (int b = 0; b < kDims / 32; ++b) {
        if (first + 32 * b < part.dim) string[b] = __ldg(from + 32 * b);
      }
#pragma unroll
      for (int b = 0; b < kDims / 32; ++b) {
        if (first + 32 * b >= part.dim) break;
        const uint4& w = string[b];
        std::uint32_t dims[4] = {__byte_perm(w.x, w.y, 0x5410) & keep, __byte_perm(w.x, w.y, 0x7632) & keep,
                                 __byte_perm(w.z, w.w, 0x5410) & keep, __byte_perm(w.z, w.w, 0x7632) & keep};
        transpose_quad(dims, lane());
        to[32 * b] = {dims[0], dims[1], dims[2], dims[3]};
      }
    }
  }
};

}  // namespace halftone::cuda
