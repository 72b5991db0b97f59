// Numbers as instructions name them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace halftone::emulator {

inline float f32_of_f16(std::uint32_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits)));
}
inline std::uint32_t f16_of(double x) { return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x)); }
inline float f32_of_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }
inline std::uint32_t bf16_of(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float f32_of_e4m3(std::uint32_t code) {
  const std::uint32_t magnitude = code & 0x7f;
  if (magnitude == 0x7f) return std::bit_cast<float>(0x7fffffffu);
  const float x = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                : std::ldexp(static_cast<float>(8 + (magnitude & 7)),
                                             static_cast<int>(magnitude >> 3) - 10);
  return (code & 0x80) != 0 ? -x : x;
}
/// To nearest, halves to even; what exceeds 448 becomes that.
inline std::uint32_t e4m3_of(float x) {
  if (std::isnan(x)) return 0x7f;
  const std::uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude >= 448.0f) return sign | 0x7e;
  const int exponent = static_cast<int>(std::bit_cast<std::uint32_t>(magnitude) >> 23) - 127;
  const int unit = exponent < -6 ? -9 : exponent - 3;  // the step between codes is 2^unit
  const auto steps = static_cast<std::uint32_t>(
      std::nearbyint(magnitude * std::bit_cast<float>(static_cast<std::uint32_t>(127 - unit) << 23)));
  // steps is 8 to 16 of normal codes, 0 to 8 of subnormal ones: the carry runs into the exponent by itself.
  return sign | (unit == -9 ? steps : (static_cast<std::uint32_t>(unit + 9) << 3) + steps);
}

/// Calls use.template operator()<T>() for u32, s64, f32, b16, ...; of another type it returns false.
template <class Use>
bool with_integer(std::string_view type, Use&& use) {
  if (type.front() != 's' && type.front() != 'u' && type.front() != 'b') return false;
  const bool is_signed = type.front() == 's';
  const std::string_view bits = type.substr(1);
  if (bits == "8")
    return (is_signed ? use.template operator()<std::int8_t>() : use.template operator()<std::uint8_t>()),
           true;
  if (bits == "16")
    return (is_signed ? use.template operator()<std::int16_t>() : use.template operator()<std::uint16_t>()),
           true;
  if (bits == "32")
    return (is_signed ? use.template operator()<std::int32_t>() : use.template operator()<std::uint32_t>()),
           true;
  if (bits == "64")
    return (is_signed ? use.template operator()<std::int64_t>() : use.template operator()<std::uint64_t>()),
           true;
  return false;
}
inline bool is_integer(std::string_view type) {
  return type.size() >= 2 && (type.front() == 's' || type.front() == 'u' || type.front() == 'b') &&
         type[1] != 'f' && type.back() >= '0' && type.back() <= '9';
}

}  // namespace halftone::emulator
