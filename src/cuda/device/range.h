// Scales that bring the values of a row into a narrower type.
#pragma once

#include <cstdint>

namespace halftone::cuda {

/// A power of two by which a row, whose largest magnitude is `largest`, is divided before it becomes f16: 1
/// where f16 holds it with its small values, too.
__device__ inline float f16_scale(float largest) {
  if (largest == 0.0f || (largest >= 0x1p-6f && largest < 0x1p15f)) return 1.0f;
  const std::uint32_t exponent = __float_as_uint(largest) & 0x7f800000u;
  const float power = __uint_as_float(exponent);
  return fminf(fmaxf(power, 0x1p-126f), 0x1p126f);
}

/// The scale of a row of 8-bit codes, and what values are multiplied by to become codes.
__device__ inline float codes_scale(float largest) { return __fdiv_rn(largest, 127.0f); }
__device__ inline float codes_inverse(float largest) {
  constexpr float kLeast = 0x1p-120f;  // of which the inverse is finite
  return largest > kLeast ? __fdiv_rn(127.0f, largest) : 0.0f;
}

}  // namespace halftone::cuda
