#include "reference/normals.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "reference/ranges.h"

namespace halftone::reference::loops {
namespace {

constexpr std::size_t kBlock = 64;

/// log(x) of a normal x <= 1: x = 2^k m with m in [sqrt(1/2), sqrt(2)), log(m) = 2 artanh((m - 1) / (m + 1)).
double log_near(double x) {
  constexpr std::uint64_t kRoot = 0x3FE6A09E667F3BCD, kOne = 0x3FF0000000000000;  // sqrt(1/2), 1
  const std::uint64_t from_root = std::bit_cast<std::uint64_t>(x) - kRoot + kOne;
  const double k = std::bit_cast<double>(from_root >> 52 | 0x4330000000000000) - (0x1p52 + 1023);
  const double m = std::bit_cast<double>((from_root & 0xFFFFFFFFFFFFF) + kRoot);
  const double t = (m - 1) / (m + 1), s = t * t;
  double sum = 1.0 / 17;
  sum = sum * s + 1.0 / 15;
  sum = sum * s + 1.0 / 13;
  sum = sum * s + 1.0 / 11;
  sum = sum * s + 1.0 / 9;
  sum = sum * s + 1.0 / 7;
  sum = sum * s + 1.0 / 5;
  sum = sum * s + 1.0 / 3;
  sum = sum * s + 1.0;
  return k * std::numbers::ln2 + 2 * t * sum;
}

/// cos(2 pi x) of x in [0, 1], which is the sine of an angle from -pi/2 to pi/2.
double cos_near(double x) {
  const double a = 2 * std::numbers::pi * (std::abs(x - 0.5) - 0.25), s = a * a;
  double sum = -1.0 / 121645100408832000;  // 19!
  sum = sum * s + 1.0 / 355687428096000;
  sum = sum * s - 1.0 / 1307674368000;
  sum = sum * s + 1.0 / 6227020800;
  sum = sum * s - 1.0 / 39916800;
  sum = sum * s + 1.0 / 362880;
  sum = sum * s - 1.0 / 5040;
  sum = sum * s + 1.0 / 120;
  sum = sum * s - 1.0 / 6;
  sum = sum * s + 1.0;
  return a * sum;
}

}  // namespace

float normal(double a, double b) {
  const double radius = std::sqrt(-2 * std::log(1 - a));
  return static_cast<float>(radius * std::cos(2 * std::numbers::pi * b));
}

void normals(std::uint64_t (&state)[4], float* x, std::size_t count) {
  writes(state, 4);
  writes(x, count);
  double a[kBlock], b[kBlock];
  float low[kBlock], high[kBlock];
  std::fill(a, a + kBlock, 0.5);
  std::fill(b, b + kBlock, 0.5);
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t n = std::min(kBlock, count - i);
    for (std::size_t j = 0; j < n; ++j) {
      a[j] = uniform(xoshiro(state));
      b[j] = uniform(xoshiro(state));
    }
    // The series and the C library are within 2^-48 of each other, in units of the radius. Where a range
    // sixteen times as wide rounds to one float, that is what the C library's value rounds to.
    for (std::size_t j = 0; j < kBlock; ++j) {
      const double radius = std::sqrt(-2 * log_near(1 - a[j]));
      const double y = radius * cos_near(b[j]), error = radius * 0x1p-44;
      low[j] = static_cast<float>(y - error);
      high[j] = static_cast<float>(y + error);
    }
    for (std::size_t j = 0; j < n; ++j) x[i + j] = low[j] == high[j] ? low[j] : normal(a[j], b[j]);
  }
}

void scale_rows(float* x, std::size_t count, const float* gain, const float* offset, std::size_t row) {
  writes(x, count);
  reads(gain, std::min(row, count));
  reads(offset, std::min(row, count));
  for (std::size_t i = 0; i < count; i += row) {
    const std::size_t n = std::min(row, count - i);
    for (std::size_t j = 0; j < n; ++j) x[i + j] = gain[j] * x[i + j] + offset[j];
  }
}

}  // namespace halftone::reference::loops
