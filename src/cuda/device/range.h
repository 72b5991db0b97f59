// Scales that bring values into a narrower type.
#pragma once

#include <cstdint>

namespace halftone::cuda {

/// Of a magnitude: integers order them, and infinities and NaNs are the largest.
__device__ inline std::uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

/// A power of two by which a row, the bits of whose largest magnitude are `largest`, is divided before it
/// becomes f16: 1 where f16 holds it with its small values, too.
__device__ inline float f16_scale(std::uint32_t largest) {
  const float magnitude = __uint_as_float(largest);
  if (largest == 0 || (magnitude >= 0x1p-6f && magnitude < 0x1p15f)) return 1.0f;
  const float power = __uint_as_float(largest & 0x7f800000u);
  return fminf(fmaxf(power, 0x1p-126f), 0x1p126f);
}

/// What V of a static scale and min is divided by before it becomes f16: the scale, unless the min is so far
/// off that f16 would not hold it, rotated back, in steps of the scale. `min` null: symmetric.
__device__ inline float value_unit(const float* scale, const float* min, std::int64_t head) {
  return min == nullptr ? scale[head] : fmaxf(scale[head], fabsf(min[head]) * 0x1p-10f);
}

}  // namespace halftone::cuda
