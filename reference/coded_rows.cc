// What arithmetic of 8 bits makes of rows and blocks, for the oracle.
#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/oracle.h"

namespace halftone::reference {
namespace {

/// The largest magnitude; NaN if a value is not finite.
float magnitude(const std::vector<float>& x) {
  float largest = 0;
  for (const float value : x) {
    if (!std::isfinite(value)) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::abs(value));
  }
  return largest;
}

std::vector<double> int8_row(const std::vector<float>& x) {
  const float absmax = magnitude(x), inverse = 127.0F / absmax, scale = absmax / 127.0F;
  std::vector<double> result(x.size(), std::isnan(absmax) ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  for (std::size_t i = 0; std::isfinite(inverse) && i < x.size(); ++i) {
    const float scaled = x[i] * inverse;
    result[i] = static_cast<double>(std::nearbyint(scaled)) * static_cast<double>(scale);
  }
  return result;
}

std::vector<double> e4m3_row(const std::vector<float>& x) {
  const float absmax = magnitude(x);
  std::vector<double> result(x.size(), std::isnan(absmax) ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  if (!(absmax > 0)) return result;
  int power = -126;
  while (std::ldexp(static_cast<double>(absmax), -power) > 448) ++power;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double value = std::ldexp(static_cast<double>(x[i]), -power);
    int exponent = 0;
    std::frexp(value, &exponent);
    const int unit = std::max(exponent - 4, -9);  // four significant bits, subnormals in steps of 2^-9
    result[i] = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit + power);
  }
  return result;
}

template <class Rule>
std::vector<double> rows_by(std::span<const float> x, int dim, const Rule& rule) {
  std::vector<double> result;
  for (std::size_t at = 0; at < x.size(); at += static_cast<std::size_t>(dim)) {
    const std::span<const float> row = x.subspan(at, static_cast<std::size_t>(dim));
    const std::vector<double> made = rule({row.begin(), row.end()});
    result.insert(result.end(), made.begin(), made.end());
  }
  return result;
}

template <class Rule>
std::vector<double> blocks_by(std::span<const float> v, std::int64_t channels, std::int64_t first,
                              const Rule& rule) {
  constexpr std::int64_t kBlock = 128;
  const std::int64_t tokens = static_cast<std::int64_t>(v.size()) / channels;
  std::vector<double> result(v.size());
  for (std::int64_t block = 0; block < tokens; block += kBlock) {
    const std::int64_t begin = std::max(block, first), end = std::min(block + kBlock, tokens);
    for (std::int64_t c = 0; c < channels; ++c) {
      std::vector<float> column;
      for (std::int64_t t = begin; t < end; ++t)
        column.push_back(v[static_cast<std::size_t>(t * channels + c)]);
      const std::vector<double> made = rule(column);
      for (std::int64_t t = begin; t < end; ++t) {
        result[static_cast<std::size_t>(t * channels + c)] = made[static_cast<std::size_t>(t - begin)];
      }
    }
  }
  return result;
}

}  // namespace

std::vector<double> int8_rows(std::span<const float> x, int dim) { return rows_by(x, dim, int8_row); }
std::vector<double> e4m3_rows(std::span<const float> x, int dim) { return rows_by(x, dim, e4m3_row); }

std::vector<double> int8_blocks(std::span<const float> v, std::int64_t channels, std::int64_t first) {
  return blocks_by(v, channels, first, int8_row);
}
std::vector<double> e4m3_blocks(std::span<const float> v, std::int64_t channels, std::int64_t first) {
  return blocks_by(v, channels, first, e4m3_row);
}

}  // namespace halftone::reference
