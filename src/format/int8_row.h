// Rows of Q and K as Arithmetic::kHalfInt8 takes them: integers of 8 bits and one scale.
#pragma once

#include <cstdint>

#include "format/codec.h"
#include "format/host_device.h"

namespace halftone::int8_row {

inline constexpr float kLevels = 127.0f;

/// x is about code * scale with code = rint(x * inverse), ties to even.
struct Row {
  float scale;
  float inverse;
};

/// From the largest magnitude of a row, as the bits of an fp32 without its sign (integers order them, and
/// infinities and NaNs are the largest). A row that holds one of these has scale NaN, so that every dot with
/// it is NaN; one of zeros, or of magnitudes below 127 / FLT_MAX, has scale 0 and codes 0.
HT_HOST_DEVICE inline Row row_of(std::uint32_t largest) {
  if (largest >= 0x7f800000U) return {codec::float_of(0x7fc00000U), 0.0f};
  const float absmax = codec::float_of(largest);
  const float inverse = codec::ht_div(kLevels, absmax);
  if (!codec::is_finite(inverse)) return {0.0f, 0.0f};
  return {codec::ht_div(absmax, kLevels), inverse};
}

}  // namespace halftone::int8_row
