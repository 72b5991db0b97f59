#include "reference/arrays.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "reference/oracle.h"
#include "reference/ranges.h"
#include "reference/tensor.h"

namespace halftone::reference {
namespace {

/// 2^exponent of a normal number, exactly.
double power(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

/// `e` with |x| in [2^(e - 1), 2^e); of a subnormal number that of the smallest normal one, less 1.
int exponent_of(float x) { return static_cast<int>(std::bit_cast<std::uint32_t>(x) >> 23 & 0xFF) - 126; }

float rounded(DType dtype, float x) {
  if (dtype == DType::kFloat32 || !std::isfinite(x) || x == 0) return x;
  const int precision = dtype == DType::kBFloat16 ? 8 : 11;   // significant bits
  const int lowest = dtype == DType::kBFloat16 ? -133 : -24;  // exponent of the smallest subnormal
  const double limit = dtype == DType::kBFloat16 ? 255 * 0x1p120 : 65504.0;
  const int unit = std::max(exponent_of(x) - precision, lowest);
  // x in these units is exact and so small that the sum with 1.5 * 2^52 is rounded to an integer, ties to
  // even.
  constexpr double kToInteger = 0x1.8p52;
  const double units = (static_cast<double>(x) * power(-unit) + kToInteger) - kToInteger;
  const double result = units * power(unit);
  if (std::abs(result) > limit) return std::copysign(std::numeric_limits<float>::infinity(), x);
  return std::copysign(static_cast<float>(result), x);
}

std::uint16_t bits_of(DType dtype, float x) {
  const float y = rounded(dtype, x);
  const auto bits = std::bit_cast<std::uint32_t>(y);
  if (dtype == DType::kBFloat16) {
    return static_cast<std::uint16_t>(std::isnan(y) ? bits >> 16 | 0x40 : bits >> 16);
  }
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  if (std::isnan(y)) return sign | 0x7E00;
  if (std::isinf(y)) return sign | 0x7C00;
  if (std::abs(y) < 0x1p-14F) return sign | static_cast<std::uint16_t>(std::abs(y) * 0x1p24F);
  return static_cast<std::uint16_t>(sign | (exponent_of(y) + 14) << 10 | (bits >> 13 & 0x3FF));
}

float value_of(DType dtype, std::uint16_t bits) {
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 0x3FF;
  const float sign = bits >> 15 ? -1.0F : 1.0F;
  if (exponent == 31) {
    return mantissa ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * (static_cast<float>(mantissa) * 0x1p-24F);
  return sign * static_cast<float>((mantissa + 1024) * power(exponent - 25));
}

}  // namespace

float round_to(DType dtype, float x) { return rounded(dtype, x); }
std::uint16_t to_bits16(DType dtype, float x) { return bits_of(dtype, x); }
float from_bits16(DType dtype, std::uint16_t bits) { return value_of(dtype, bits); }

namespace loops {

template <class From, class To>
void convert(const From* from, std::size_t count, To* to) {
  reads(from, count);
  writes(to, count);
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
}
template void convert(const float*, std::size_t, double*);
template void convert(const double*, std::size_t, float*);

void to_bits16(DType dtype, const float* from, std::size_t count, std::uint16_t* to) {
  reads(from, count);
  writes(to, count);
  for (std::size_t i = 0; i < count; ++i) to[i] = bits_of(dtype, from[i]);
}

void from_bits16(DType dtype, const std::uint16_t* from, std::size_t count, float* to) {
  reads(from, count);
  writes(to, count);
  for (std::size_t i = 0; i < count; ++i) to[i] = value_of(dtype, from[i]);
}

double largest_magnitude(const double* x, std::size_t count) {
  reads(x, count);
  double largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isfinite(x[i])) largest = std::max(largest, std::abs(x[i]));
  }
  return largest;
}

}  // namespace loops
}  // namespace halftone::reference
