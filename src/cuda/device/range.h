// Scales that bring values into a narrower type.
#pragma once

#include <cstdint>

namespace halftone::cuda {

/// Of a magnitude: integers order them, and infinities and NaNs are the largest.
__device__ inline std::uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

/// 1 / x of a power of two between 2^-126 and 2^126, which is exact.
__device__ inline float inverse_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

/// A power of two by which a row, the bits of whose largest magnitude are `largest`, is divided before it
/// becomes f16: 1 where f16 holds it with its small values, too.
__device__ inline float f16_scale(std::uint32_t largest) {
  const float magnitude = __uint_as_float(largest);
  if (largest == 0 || (magnitude >= 0x1p-6f && magnitude < 0x1p15f)) return 1.0f;
  const float power = __uint_as_float(largest & 0x7f800000u);
  return fminf(fmaxf(power, 0x1p-126f), 0x1p126f);
}

/// The same before it becomes E4M3: of the powers of 2^8 the one that leaves the largest magnitude between
/// 1.75 and 448, so that most rows have the same one. A power of two changes codes only where E4M3 is
/// subnormal, by up to 2^-10.8 of the largest magnitude. NaN if that is none.
__device__ inline float e4m3_scale(std::uint32_t largest) {
  if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  if (largest == 0) return 1.0f;
  // 448 is 1.75 * 2^8: what exceeds 1.75 carries into the exponent.
  const int above = static_cast<int>((largest + 0x1fffffu) >> 23) - (127 + 8);
  const int power = min(max((above + 128 + 7) / 8 * 8 - 128, -120), 120);
  return __uint_as_float(static_cast<std::uint32_t>(127 + power) << 23);
}

/// What V of a static scale and min is divided by before it becomes f16: the scale, unless the min is so far
/// off that f16 would not hold it, rotated back, in steps of the scale. `min` null: symmetric.
__device__ inline float value_unit(const float* scale, const float* min, std::int64_t head) {
  return min == nullptr ? scale[head] : fmaxf(scale[head], fabsf(min[head]) * 0x1p-10f);
}

}  // namespace halftone::cuda
