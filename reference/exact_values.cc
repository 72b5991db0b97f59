// Reads a cache in double precision. Where an element lies comes from format/page.h, whose orders are proven
// by their own tests; what its bits mean is spelt out here once more.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/part.h"
#include "reference/cache.h"

namespace halftone::reference {
namespace {

double compute_e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double sign = bits >> 7 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

double e4m3_value(std::uint8_t bits) {
  static const std::array<double, 256> values = [] {
    std::array<double, 256> all{};
    for (int b = 0; b < 256; ++b)
      all[static_cast<std::size_t>(b)] = compute_e4m3(static_cast<std::uint8_t>(b));
    return all;
  }();
  return values[bits];
}

double scalar(const std::uint8_t* bytes, DType dtype) {
  if (dtype == DType::kFloat8E8M0) {
    return *bytes == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, *bytes - 127);
  }
  if (dtype == DType::kFloat32) {
    float x = 0;
    std::memcpy(&x, bytes, sizeof x);
    return x;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return from_bits16(dtype, bits);
}

double code_value(const KvFormat& format, const std::uint8_t* byte, int nibble) {
  switch (format.dtype) {
    case DType::kFloat8E4M3:
      return e4m3_value(*byte);
    case DType::kInt8:
      return format.asymmetric ? *byte : static_cast<std::int8_t>(*byte);
    case DType::kInt4:
      return (*byte >> (4 * nibble) & 15) - (format.asymmetric ? 0 : 8);
    default:
      return scalar(byte, format.dtype);
  }
}

/// x = H x of Sylvester's matrix: H of 2 n is (H, H; H, -H) of n, so halves become those of their sum and
/// difference.
void multiply_sylvester(double* x, int size) {
  const int half = size / 2;
  if (half == 0) return;
  for (int i = 0; i < half; ++i) {
    const double a = x[i], b = x[i + half];
    x[i] = a + b;
    x[i + half] = a - b;
  }
  multiply_sylvester(x, half);
  multiply_sylvester(x + half, half);
}

/// The orthonormal matrix on each block of the largest power of two that divides the dim.
void rotate(double* x, int dim) {
  const int block = dim & -dim;
  const double root = std::sqrt(static_cast<double>(block));
  for (int first = 0; first < dim; first += block) {
    multiply_sylvester(x + first, block);
    for (int i = first; i < first + block; ++i) x[i] /= root;
  }
}

// One span of K or V: its values go to values[(token * heads + head) * row + d].
void read_span(const Cache& cache, const std::vector<std::int64_t>& slots, const page::Part& part,
               KvPart which, std::size_t row, bool rotates_back, double* values) {
  const KvCacheSpec& spec = cache.spec;
  const PageLayout layout = page_layout(spec);
  const bool k = which == KvPart::kK;
  const Tensor& scales = k ? cache.k_scale : cache.v_scale;
  const Tensor& mins = k ? cache.k_min : cache.v_min;
  const int groups = part.format.static_scale() ? 1 : std::max(1, part.groups);
  const int group_dim = part.dim / groups;
  std::vector<page::Place> places;
  for (int t = 0; t < kTileTokens; ++t) {
    for (int d = 0; d < part.dim; ++d) places.push_back(part.place(t, d));
  }
  for (const std::int64_t slot : slots) {
    const int within = static_cast<int>(slot % spec.page_size), t = within % kTileTokens;
    for (int head = 0; head < spec.kv_heads; ++head, values += row) {
      const std::uint8_t* tile = cache.pages.bytes().data() + slot / spec.page_size * layout.page_bytes +
                                 page::tile_offset(layout, head, within);
      for (int group = 0; group < groups; ++group) {
        double scale = 1, min = 0;
        if (part.format.static_scale()) {
          const int at = part.format.granularity == Granularity::kTensor ? 0 : head;
          scale = scales.get(at);
          if (part.format.asymmetric) min = mins.get(at);
        } else if (part.groups > 0) {
          scale = scalar(tile + part.scale_offset(within / kTileTokens, t, group), part.format.scale_dtype);
          if (part.format.asymmetric) min = scalar(tile + part.min_offset(t, group), part.format.scale_dtype);
        }
        for (int d = group * group_dim; d < (group + 1) * group_dim; ++d) {
          const page::Place place = places[static_cast<std::size_t>(t * part.dim + d)];
          const std::uint8_t* byte = tile + part.data_offset + place.byte;
          values[d] = code_value(part.format, byte, place.nibble) * scale + min;
        }
      }
      if (part.rotated && rotates_back) rotate(values, part.dim);
      for (int d = 0; k && rotates_back && d < part.dim; ++d) {
        const std::int64_t at = std::int64_t{head} * part.dim + d;
        if (spec.scale_k) values[d] *= cache.k_channel_scale.get(at);
        if (spec.offset_k) values[d] += cache.k_offset.get(at);
      }
    }
  }
}

std::vector<double> read_part(const Cache& cache, const std::vector<std::int64_t>& slots, KvPart which,
                              bool rotates_back) {
  const KvCacheSpec& spec = cache.spec;
  const auto row = static_cast<std::size_t>(which == KvPart::kK ? spec.head_dim : spec.v_dim());
  std::vector<double> values(slots.size() * static_cast<std::size_t>(spec.kv_heads) * row);
  for (const page::Part& part : page::parts_of(spec, page_layout(spec))) {
    const int first = part.first_in(which);
    if (first >= 0) read_span(cache, slots, part, which, row, rotates_back, values.data() + first);
  }
  return values;
}

}  // namespace

ExactValues exact_values(const Cache& cache) {
  const std::vector<std::int64_t> slots = cache.slots();
  return {read_part(cache, slots, KvPart::kK, true), read_part(cache, slots, KvPart::kV, true)};
}

ExactValues stored_values(const Cache& cache) {
  const std::vector<std::int64_t> slots = cache.slots();
  return {read_part(cache, slots, KvPart::kK, false), read_part(cache, slots, KvPart::kV, false)};
}

void rotate_rows(std::vector<double>& rows, int dim) {
  for (std::size_t row = 0; row < rows.size(); row += static_cast<std::size_t>(dim)) rotate(&rows[row], dim);
}

}  // namespace halftone::reference
