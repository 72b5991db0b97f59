// Queries become codes: 8-bit integers with a scale per row, for Q K^T of integers.
#pragma once

#include "cuda/device/values.h"
#include "cuda/prefill/compute.h"

namespace halftone::cuda {

/// Two lanes of a warp, 16 apart, have a row: each the values of `kPieces` pieces of 8.
template <int kPieces>
struct QueryCodes {
  std::uint32_t words[kPieces][4];  // 16-bit values
  float largest = 0.0f, none = 0.0f;  // none: 0, or NaN if a value is not finite

  template <DType kType>
  __device__ void measure() {
#pragma unroll
    for (int i = 0; i < kPieces * 8; ++i) {
      const float x = half_of(words[i / 8][i / 2 % 4], i % 2, kType == DType::kBFloat16);
      largest = fmaxf(largest, fabsf(x));
      none = fmaf(x, 0.0f, none);
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
    none += __shfl_xor_sync(~0u, none, 16);
  }
  /// Four codes of piece `i`.
  template <DType kType>
  __device__ std::uint32_t codes(int i, int four, float inverse) const {
    constexpr float kRound = 12582912.0f;  // adds to 1.5 * 2^23: rounds, and leaves the code in the low byte
    std::uint32_t code[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = half_of(words[i][2 * four + e / 2], e % 2, kType == DType::kBFloat16);
      code[e] = __float_as_uint(__fadd_rn(__fmul_rn(x, inverse), kRound));
    }
    return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
  }
};

/// A warp's 16 rows of Q, in their own place: chunks of 64 16-bit values become chunks of 128 codes, swizzled
/// alike; their scales go to query_scales.
template <PrefillConfig C>
__device__ inline void quantise_queries(Consumer<C>& c) {
  constexpr int kPieces = C.head_dim / 16;
  constexpr float kLeast = 0x1p-120f;  // of a largest value whose inverse is finite
  const int row = c.warp() * 16 + c.lane() % 16, half = c.lane() / 16, swizzle = row % 8;
  std::uint8_t* const q = c.s.q[c.group()] + row * 128;
  QueryCodes<kPieces> codes;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = half * kPieces + i;
    const uint4 x = *reinterpret_cast<const uint4*>(q + piece / 8 * (64 * 128) + (piece % 8 ^ swizzle) * 16);
    codes.words[i][0] = x.x, codes.words[i][1] = x.y, codes.words[i][2] = x.z, codes.words[i][3] = x.w;
  }
  codes.template measure<C.dtype>();
  const float inverse = codes.largest > kLeast ? __fdiv_rn(127.0f, codes.largest) : 0.0f;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPieces; i += 2) {
    const int piece = (half * kPieces + i) / 2;  // of 16 codes
    const uint4 x = {codes.template codes<C.dtype>(i, 0, inverse), codes.template codes<C.dtype>(i, 1, inverse),
                     codes.template codes<C.dtype>(i + 1, 0, inverse),
                     codes.template codes<C.dtype>(i + 1, 1, inverse)};
    *reinterpret_cast<uint4*>(q + piece / 8 * (64 * 128) + (piece % 8 ^ swizzle) * 16) = x;
  }
  c.s.query_scales[c.group() * 64 + row] = __fdiv_rn(codes.largest, 127.0f) + codes.none;
  fence_async_shared();
  team_barrier(c.group());
}

}  // namespace halftone::cuda
