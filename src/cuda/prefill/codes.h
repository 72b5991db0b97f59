// Values of rows as codes of 8 bits, eight at a time.
#pragma once

#include "cuda/device/pairs.h"
#include "cuda/device/range.h"
#include "cuda/device/values.h"
#include "format/codec.h"
#include "format/int8_row.h"

namespace halftone::cuda {

/// Eight elements of 16 bits.
__device__ __forceinline__ void unpack(const uint4& piece, bool bf16, float (&x)[8]) {
  const std::uint32_t words[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = half_of(words[i / 2], i % 2, bf16);
}

template <bool kBFloat16>
__device__ __forceinline__ std::uint32_t larger_pair(const uint4& x) {
  return larger_pair<kBFloat16>(larger_pair<kBFloat16>(x.x, x.y), larger_pair<kBFloat16>(x.z, x.w));
}
/// Bits of the larger magnitude of a pair, a NaN's if there is one.
template <bool kBFloat16>
__device__ __forceinline__ std::uint32_t larger_bits(std::uint32_t pair) {
  return magnitude_bits(half_of(max(pair >> 16 & 0x7fffu, pair & 0x7fffu), false, kBFloat16));
}

/// Bits of the largest magnitude of a row of which each of `lanes` adjacent lanes has eight values, of each
/// half.
template <int kHalves>
__device__ __forceinline__ std::uint32_t largest_of_row(const float (&x)[kHalves][8], int lanes) {
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8 * kHalves; ++i) most = max(most, magnitude_bits(x[i / 8][i % 8]));
  for (int i = lanes / 2; i > 0; i /= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
  return most;
}

/// What makes codes of a row of K of its values, from the bits of its largest magnitude.
__device__ inline int8_row::Row key_row(bool e4m3, std::uint32_t largest) {
  if (!e4m3) return int8_row::row_of(largest);
  const float scale = e4m3_scale(largest);
  return {scale, 1.0f / scale};
}

/// A value of V divided by a power of two: NaN of an infinity.
__device__ __forceinline__ float divided_value(float x, float inverse) { return fmaf(0.0f, x, x * inverse); }

/// Values that are multiples of the row's scale already, ties to even.
__device__ inline uint2 int8_codes(const float (&x)[8]) {
  std::uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int code = __float2int_rn(x[i]);
    word[i / 4] |= (static_cast<std::uint32_t>(code) & 0xffu) << 8 * (i % 4);
  }
  return {word[0], word[1]};
}
__device__ inline uint2 e4m3_codes(const float (&x)[8]) {
  return {pack_e4m3x4(x[0], x[1], x[2], x[3]), pack_e4m3x4(x[4], x[5], x[6], x[7])};
}

}  // namespace halftone::cuda
