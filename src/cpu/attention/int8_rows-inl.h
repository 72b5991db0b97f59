// Blocked path, Arithmetic::kHalfInt8 and kFullInt8: rows of Q and K as integers of 8 bits with one scale
// each (format/int8_row.h).
//
// Their dots are exact either way. In fp32: a sum of 512 products of codes stays below 2^24. On AVX-512 with
// VNNI, where four products of bytes are one lane's step: K is biased to unsigned bytes, which sums begin by
// taking back, and lanes are rows as in all of the blocked path.

#include <cstring>

#include "cpu/attention/byte_products-inl.h"
#include "cpu/attention/layer.h"
#include "cpu/attention/tiles.h"
#include "cpu/attention/vec-inl.h"
#include "format/int8_row.h"

#if defined(HALFTONE_CPU_INT8_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_INT8_ROWS_INL_H
#undef HALFTONE_CPU_INT8_ROWS_INL_H
#else
#define HALFTONE_CPU_INT8_ROWS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// Magnitudes as the bits of an fp32: integers order them, infinities and NaNs come last.
HWY_INLINE VI magnitude_bits(VF x) { return hn::And(hn::BitCast(I(), x), hn::Set(I(), 0x7fffffff)); }

/// The largest of `width` values, whole vectors.
HWY_INLINE std::uint32_t largest_bits(const float* x, int width) {
  const I di;
  VI largest = hn::Zero(di);
  for (int i = 0; i < width; i += kLanes) {
    largest = hn::Max(largest, magnitude_bits(hn::LoadU(F(), x + i)));
  }
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
}

/// Scale and inverse of a row of `width` values, whole vectors.
HWY_INLINE int8_row::Row int8_row_of(const float* x, int width) {
  return int8_row::row_of(largest_bits(x, width));
}

/// Replaces a row by its codes, in fp32, and returns its scale. Without a finite one, codes are zeros.
HWY_INLINE float make_int8_codes(float* x, int width) {
  const F d;
  const int8_row::Row row = int8_row_of(x, width);
  for (int i = 0; i < width; i += kLanes) {
    const VF code = hn::Round(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, row.inverse)));
    hn::StoreU(row.inverse == 0.0f ? hn::Zero(d) : code, d, x + i);
  }
  return row.scale;
}

/// Rounds values to `type` (f16 or bf16) and back.
inline void round_values(DType type, int count, float* x) {
  if (type == DType::kFloat16) {
    for (int i = 0; i < count; ++i) x[i] = codec::f32_from_f16(codec::f16_from_f32(x[i]));
  } else {
    for (int i = 0; i < count; ++i) x[i] = codec::f32_from_bf16(codec::bf16_from_f32(x[i]));
  }
}

/// Where elements of K are padding, zeros replace whatever was decoded.
inline void clear_padding(const KMap& map, int tokens, float* x) {
  const int width = map.width();
  for (int i = 0; i < width; ++i) {
    if (map.dims[i] >= 0) continue;
    for (int t = 0; t < tokens; ++t) x[t * width + i] = 0.0f;
  }
}

#if HWY_TARGET == HWY_AVX3_DL

/// What is added to a code of K to make it unsigned.
inline constexpr int kInt8Bias = 128;

/// Four tokens of K against C vectors of rows. q: [column][rows] dwords of four codes; start: [rows].
template <int C>
HWY_INLINE void score_bytes(const std::uint8_t* k, int stride, const std::int32_t* q,
                            const std::int32_t* start, int rows, float* scores) {
  const F d;
  const I di;
  VI acc[4][C];
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) acc[i / C][i % C] = hn::Load(di, start + i % C * kLanes);
  for (int column = 0; column < stride; column += 4, q += rows) {
    VI query[C];
    HALFTONE_UNROLL
    for (int c = 0; c < C; ++c) query[c] = hn::Load(di, q + c * kLanes);
    HALFTONE_UNROLL
    for (int t = 0; t < 4; ++t) {
      std::int32_t codes;
      std::memcpy(&codes, k + t * stride + column, sizeof codes);
      const VI x = hn::Set(di, codes);
      HALFTONE_UNROLL
      for (int c = 0; c < C; ++c) acc[t][c] = add_byte_products(acc[t][c], x, query[c]);
    }
  }
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) {
    hn::Store(hn::ConvertTo(d, acc[i / C][i % C]), d, scores + i / C * rows + i % C * kLanes);
  }
}

/// Codes of one tile of an int8 K as they lie, [token][dim in the order of the columns].
inline void copy_int8_codes(const KColumns& map, const Tile& tile, int dim, std::uint8_t* out) {
  const hn::CappedTag<std::uint8_t, 16> bytes;
  const auto bias = hn::Set(bytes, std::uint8_t{kInt8Bias});
  for (const KSection& section : map.sections) {
    for (int t = 0; t < kTileTokens; ++t) {
      const std::uint8_t* from = tile.k + section.offset + t * section.stride;
      for (int i = 0; i < section.columns * 4; i += 16) {
        hn::StoreU(hn::Xor(hn::LoadU(bytes, from + i), bias), bytes, out + t * dim + i);
      }
    }
    out += section.columns * 4;
  }
}

/// make_int8_codes(), as biased bytes.
HWY_INLINE float store_int8_codes(const float* x, int width, std::uint8_t* out) {
  const hn::Rebind<std::uint8_t, F> byte;
  const VI bias = hn::Set(I(), kInt8Bias);
  const int8_row::Row row = int8_row_of(x, width);
  for (int i = 0; i < width; i += kLanes) {
    const VI code = hn::NearestInt(hn::Mul(hn::LoadU(F(), x + i), hn::Set(F(), row.inverse)));
    hn::StoreU(hn::DemoteTo(byte, hn::Add(code, bias)), byte, out + i);
  }
  return row.scale;
}

/// Codes of a query's row, four to a dword of column c: those of dims[4 c] on (-1: padding). Returns where
/// its sums begin.
inline std::int32_t pack_int8_codes(const float* codes, const std::int16_t* dims, int columns, int rows,
                                    std::int32_t* q) {
  int sum = 0;
  for (int c = 0; c < columns; ++c) {
    std::uint32_t packed = 0;
    for (int i = 0; i < 4; ++i) {
      const int dim = dims[4 * c + i], code = dim < 0 ? 0 : static_cast<int>(codes[dim]);
      sum += code;
      packed |= static_cast<std::uint32_t>(code & 255) << (8 * i);
    }
    q[c * rows] = static_cast<std::int32_t>(packed);
  }
  return -kInt8Bias * sum;
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_INT8_ROWS_INL_H
