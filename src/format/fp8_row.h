// Rows of Q and K, and channels of V, as Arithmetic::kFp8 takes them: E4M3 and a power of two.
#pragma once

#include <cstdint>

#include "format/codec.h"
#include "format/host_device.h"

namespace halftone::fp8_row {

/// x is about f32_from_e4m3(code) * scale with code = e4m3_from_f32(x * inverse). Both are powers of two, so
/// that x * inverse is x / scale, without a rounding that a code could show.
struct Row {
  float scale;
  float inverse;
};

/// From the largest magnitude of a row, as the bits of an fp32 without its sign: the smallest power of two
/// from 2^-126 on that leaves magnitudes of at most 448. A row of zeros has scale 1, one that holds an
/// infinity or a NaN has scale NaN, so that every dot with it is NaN, and inverse 0.
HT_HOST_DEVICE inline Row row_of(std::uint32_t largest) {
  if (largest >= 0x7f800000U) return {codec::float_of(0x7fc00000U), 0.0f};
  if (largest == 0) return {1.0f, 1.0f};
  // 448 is 1.75 * 2^8: what exceeds 1.75 carries into the exponent.
  const std::uint32_t exponent = (largest + 0x1fffffU) >> 23;
  const std::uint32_t biased = exponent > 9 ? exponent - 8 : 1;
  return {codec::float_of(biased << 23), codec::float_of((254 - biased) << 23)};
}

/// The code of one value of the row. Of a row without a finite scale it is not to be used: zero.
HT_HOST_DEVICE inline std::uint8_t code_of(const Row& row, float x) {
  return row.inverse == 0.0f ? std::uint8_t{0} : codec::e4m3_from_f32(codec::ht_mul(x, row.inverse));
}

}  // namespace halftone::fp8_row
