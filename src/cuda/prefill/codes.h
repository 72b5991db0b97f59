// Eight values of a row of K as codes of 8 bits.
#pragma once

#include "cuda/device/values.h"
#include "format/codec.h"

namespace halftone::cuda {

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
