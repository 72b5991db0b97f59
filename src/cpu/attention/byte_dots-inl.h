// Direct path, K of int8 or int4 codes on AVX-512 with VNNI: dot products of a few rows of Q with a chunk, in
// integers.
//
// A row of Q becomes fixed-point numbers of 24 bits (a power of two times the row; rows that are not nearly
// exact so take the other kernels) in three signed digits of 8 bits. Codes are unsigned bytes, so that one
// instruction multiplies 64 of them with digits and adds four products to a 32-bit lane. Sums of digits are
// exact; they meet in fp32, times the token's scale, once per scale group: fewer roundings than a sum in fp32
// has. The lowest digits of a 16-bit Q are mostly zero, so these are a list.
//
// Lanes are tokens: column c of a chunk holds dword c of each of its 64 tokens.

#include <array>
#include <bit>
#include <cmath>

#include "cpu/attention/byte_products-inl.h"
#include "cpu/attention/tiles.h"
#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_BYTE_DOTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_BYTE_DOTS_INL_H
#undef HALFTONE_CPU_BYTE_DOTS_INL_H
#else
#define HALFTONE_CPU_BYTE_DOTS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

/// What is added to a symmetric code to make it unsigned.
constexpr int code_bias(Element element) {
  return element == Element::kI8 ? 128 : element == Element::kI4 ? 8 : 0;
}

/// An asymmetric code's value, code * scale + min, as (code - zero) * scale + offset with an integer zero
/// near -min / scale. Where 0 lies between the extremes of a group, |offset| is at most about scale / 2, so
/// that nothing cancels in a sum of products and a sum of offsets; elsewhere both terms have the same sign.
struct ZeroPoint {
  VF zero;
  VF offset;
};
HWY_INLINE ZeroPoint zero_point(VF scale, VF min, float smallest_code, float largest_code) {
  const F d;
  const VF wish = hn::Neg(hn::Mul(min, hn::ApproximateReciprocal(scale)));
  const VF least = hn::Set(d, smallest_code);
  const VF positive = hn::IfThenElse(hn::Gt(wish, least), wish, least);  // also where it is NaN
  const VF zero = hn::Round(hn::Min(positive, hn::Set(d, largest_code)));
  return {zero, hn::MulAdd(zero, scale, min)};
}

/// Transposes 16 rows of `columns` dwords, kStride bytes apart (0: run_time_stride), into columns of
/// kChunkTokens dwords, each dword xor `flip`. Reads up to 12 bytes beyond a row.
template <int kStride>
HWY_INLINE void transpose_rows(const std::uint8_t* rows, std::int64_t run_time_stride, int columns,
                               std::int32_t flip, std::int32_t* out) {
  const std::int64_t stride = kStride != 0 ? kStride : run_time_stride;
  const I d;
  const hn::RepartitionToWide<I> pair;
  const VI flips = hn::Set(d, flip);
  for (int piece = 0; piece < columns; piece += 4) {
    VI v[4];  // block b of v[i]: token 4 b + i
    HALFTONE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto* at = rows + i * stride + piece * 4;
      const auto load = [&](int b) HWY_ATTR {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 4 * b * stride));
      };
      __m512i x = _mm512_castsi128_si512(load(0));  // masked loads leave the shuffle unit alone
      x = _mm512_mask_broadcast_i32x4(x, 0x00f0, load(1));
      x = _mm512_mask_broadcast_i32x4(x, 0x0f00, load(2));
      v[i] = hn::Xor(VI{_mm512_mask_broadcast_i32x4(x, 0xf000, load(3))}, flips);
    }
    const auto low01 = hn::BitCast(pair, hn::InterleaveLower(d, v[0], v[1]));
    const auto low23 = hn::BitCast(pair, hn::InterleaveLower(d, v[2], v[3]));
    const auto high01 = hn::BitCast(pair, hn::InterleaveUpper(d, v[0], v[1]));
    const auto high23 = hn::BitCast(pair, hn::InterleaveUpper(d, v[2], v[3]));
    std::int32_t* to = out + piece * kChunkTokens;
    hn::Store(hn::BitCast(d, hn::InterleaveLower(pair, low01, low23)), d, to);
    if (piece + 1 < columns)
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pair, low01, low23)), d, to + kChunkTokens);
    if (piece + 2 >= columns) continue;
    hn::Store(hn::BitCast(d, hn::InterleaveLower(pair, high01, high23)), d, to + 2 * kChunkTokens);
    if (piece + 3 < columns)
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pair, high01, high23)), d, to + 3 * kChunkTokens);
  }
}

/// One plane of K's params of a tile, [16][groups], as [group] vectors of tokens.
HWY_INLINE void load_k_plane(const Side& side, const std::uint8_t* params, VF* out) {
  const F d;
  const auto half = [&](__m512i x, int i) HWY_ATTR {
    return VF{_mm512_cvtph_ps(i == 0 ? _mm512_castsi512_si256(x) : _mm512_extracti64x4_epi64(x, 1))};
  };
  // Word 16 g + t of `index`: where token t of group g is, among the 32 words before it.
  alignas(64) static constexpr auto kIndex = [] {
    std::array<std::array<std::uint16_t, 32>, 3> index{};
    for (int i = 0; i < 32; ++i) {
      const int group = i / 16, token = i % 16;
      index[0][i] = static_cast<std::uint16_t>(token * 2 + group);
      index[1][i] = static_cast<std::uint16_t>(token * 4 + group);
      index[2][i] = static_cast<std::uint16_t>(token * 4 + group + 2);
    }
    return index;
  }();
  if (side.groups == 4 && !side.f32_params) {
    const __m512i low = _mm512_loadu_si512(params), high = _mm512_loadu_si512(params + 64);
    for (int i = 0; i < 2; ++i) {
      const __m512i x = _mm512_permutex2var_epi16(low, _mm512_load_si512(kIndex[1 + i].data()), high);
      out[2 * i] = half(x, 0);
      out[2 * i + 1] = half(x, 1);
    }
  } else if (side.groups == 2 && !side.f32_params) {
    const __m512i x =
        _mm512_permutexvar_epi16(_mm512_load_si512(kIndex[0].data()), _mm512_loadu_si512(params));
    out[0] = half(x, 0);
    out[1] = half(x, 1);
  } else if (side.groups == 1) {
    load_params(side.f32_params, params, kTileTokens, 1.0f, reinterpret_cast<float*>(out));
  } else {
    HWY_ALIGN float rows[kTileTokens * kMaxGroups];
    load_params(side.f32_params, params, kTileTokens * side.groups, 1.0f, rows);
    const VI index = hn::Mul(hn::Iota(I(), 0), hn::Set(I(), side.groups));
    for (int g = 0; g < side.groups; ++g) out[g] = hn::GatherIndex(d, rows + g, index);
  }
}

/// Scales and mins (zero points and offsets) of kLanes tokens of K.
HWY_INLINE void store_k_params(const Side& side, VF scale, VF min, int at, ByteScratch& s) {
  const F d;
  hn::Store(scale, d, s.k_scale + at);
  if (!side.has_min) return;
  const ZeroPoint x = zero_point(scale, min, 0, four_bits(side.element) ? 15 : 255);
  hn::Store(x.zero, d, s.k_zero + at);
  hn::Store(x.offset, d, s.k_offset + at);
}

/// A static scale and min, for all tokens of a chunk.
HWY_INLINE void fill_static_columns(const Side& side, float scale, float min, ByteScratch& s) {
  for (int t = 0; t < kChunkTokens; t += kLanes)
    store_k_params(side, hn::Set(F(), scale), hn::Set(F(), min), t, s);
}

/// Codes and scales of K of a whole chunk.
HWY_NOINLINE void load_columns(const Side& side, const KColumns& map, const Chunk& chunk, ByteScratch& s) {
  const std::int32_t flip = side.element == Element::kI8 ? static_cast<std::int32_t>(0x80808080u) : 0;
  for (int i = 0; i < chunk.tiles; ++i) {
    std::int32_t* out = s.columns + i * kTileTokens;
    for (const KSection& section : map.sections) {
      const std::uint8_t* rows = chunk.tile[i].k + section.offset;
      if (section.stride == 64) {  // head_dim 128, most often
        transpose_rows<64>(rows, 64, section.columns, flip, out);
      } else {
        transpose_rows<0>(rows, section.stride, section.columns, flip, out);
      }
      out += section.columns * kChunkTokens;
    }
    if (!side.stored_params) continue;
    VF scale[kMaxGroups], min[kMaxGroups];
    load_k_plane(side, chunk.tile[i].k_params, scale);
    if (side.has_min) {
      load_k_plane(side, chunk.tile[i].k_params + kTileTokens * side.groups * (side.f32_params ? 4 : 2), min);
    }
    for (int g = 0; g < side.groups; ++g)
      store_k_params(side, scale[g], side.has_min ? min[g] : hn::Zero(F()),
                     g * kChunkTokens + i * kTileTokens, s);
  }
}

/// Where a block of rows keeps its digits of Q.
struct ByteBlock {
  int rows;
  std::int32_t* q;
  std::int32_t* start;
  float* sums;
  ByteScratch::LowDigit* low;
  int first;  ///< row of the item
  int low_count = 0;
};

/// Elements of a row that may be rounded: those of a 16-bit Q below 2^-16 of its largest.
inline constexpr int kRoundedElements = 2;

/// The digits of one row. False if it holds an infinity or a NaN, or is not nearly exact in 24 bits (fp32 or
/// rotated rows): other kernels then serve it.
inline bool store_digits(const KColumns& map, Element element, const float* row, ByteBlock& block, int r,
                         ByteScratch& s) {
  float largest = 0;
  const int codes = four_bits(element) ? 8 : 4, halves = codes / 4;
  for (const std::int16_t dim : map.dims) {
    const float x = std::abs(row[dim]);
    if (!(x <= __FLT_MAX__)) return false;
    largest = std::max(largest, x);
  }
  // At most 127 in each digit. 2^126 is enough for any Q that matters, and has a reciprocal.
  int exponent = 0;
  if (largest > 0) {
    exponent = 22 - std::ilogb(largest);
    if (std::ldexp(largest, exponent) > 0x7f7f7f) --exponent;
    exponent = std::min(exponent, 126);
  }
  s.q_unit[block.first + r] = std::ldexp(1.0f, -exponent);
  const float factor = std::ldexp(1.0f, exponent);
  const int group_columns = map.columns() / map.groups;
  int rounded = 0;
  for (int group = 0; group < map.groups; ++group) {
    int sums[3] = {};
    for (int i = group * group_columns * halves; i < (group + 1) * group_columns * halves; ++i) {
      const int column = i / halves, half = i % halves;
      std::uint32_t digits[3] = {};
      int low_sum = 0;
      for (int k = 0; k < 4; ++k) {
        const int dim = map.dims[column * codes + (halves == 2 ? 2 * k + half : k)];
        const float fixed = row[dim] * factor, whole = std::nearbyint(fixed);
        if (fixed != whole && ++rounded > kRoundedElements) return false;
        int x = static_cast<int>(whole);
        for (int digit = 2; digit >= 0; --digit) {
          const int value = static_cast<std::int8_t>(x & 255);
          x = (x - value) >> 8;
          sums[digit] += value;
          if (digit == 2) low_sum += value;
          digits[digit] |= static_cast<std::uint32_t>(value & 255) << (8 * k);
        }
      }
      for (int digit = 0; digit < 2; ++digit)
        block.q[(i * 2 + digit) * block.rows + r] = std::bit_cast<std::int32_t>(digits[digit]);
      if (digits[2] != 0) {
        block.low[block.low_count++] = {map.order[column] * kChunkTokens,
                                        4 * half,
                                        std::bit_cast<std::int32_t>(digits[2]),
                                        -code_bias(element) * low_sum,
                                        static_cast<float>(low_sum),
                                        group,
                                        r};
      }
    }
    for (int digit = 0; digit < 2; ++digit)
      block.start[(group * 2 + digit) * block.rows + r] = -code_bias(element) * sums[digit];
    float* group_sums = block.sums + group * 3 * block.rows + r;
    const int both = sums[0] * 256 + sums[1];
    group_sums[0] = static_cast<float>(halves == 2 ? both : sums[0]);
    group_sums[block.rows] = static_cast<float>(sums[1]);
    group_sums[2 * block.rows] = static_cast<float>(both) + static_cast<float>(sums[2]) * (1.0f / 256);
  }
  return true;
}

struct ByteDotArgs {
  const KColumns* map;
  const ByteScratch* scratch;
  const ByteBlock* block;
  int tokens;
  float* dots;  // [R][kChunkTokens]
  Prefetcher* prefetcher;
};

/// The unsigned codes of half `half` of a dword.
template <bool kFour>
HWY_INLINE VI half_codes(VI dword, int half) {
  if constexpr (!kFour) return dword;
  return hn::And(half == 0 ? dword : hn::ShiftRight<4>(dword), hn::Set(I(), 0x0f0f0f0f));
}

/// Adds what the lowest digits of Q bring, one list entry at a time: they are few, and their rows and groups
/// follow no order that a branch could be predicted from.
template <bool kFour, bool kMin>
HWY_NOINLINE void add_low_digits(const ByteDotArgs& a) {
  const F d;
  const I di;
  const ByteScratch& s = *a.scratch;
  for (int i = 0; i < a.block->low_count; ++i) {
    const ByteScratch::LowDigit& low = a.block->low[i];
    const __m128i shift = _mm_cvtsi32_si128(low.shift);
    const VI start = hn::Set(di, low.start), digits = hn::Set(di, low.digits);
    const VF sum = hn::Set(d, low.sum), unit = hn::Set(d, s.q_unit[a.block->first + low.row]);
    float* dots = a.dots + low.row * kChunkTokens;
    for (int t = 0; t < a.tokens; t += kLanes) {
      VI code = hn::Load(di, s.columns + low.column + t);
      if constexpr (kFour) code = hn::And(VI{_mm512_srl_epi32(code.raw, shift)}, hn::Set(di, 0x0f0f0f0f));
      VF x = hn::ConvertTo(d, add_byte_products(start, code, digits));
      const int at = low.group * kChunkTokens + t;
      if constexpr (kMin) x = hn::NegMulAdd(hn::Load(d, s.k_zero + at), sum, x);
      const VF scale = hn::Mul(unit, hn::Load(d, s.k_scale + at));
      hn::Store(hn::MulAdd(x, scale, hn::Load(d, dots + t)), d, dots + t);
    }
  }
}

template <bool kFour, bool kMin, int R>
HWY_NOINLINE void dot_bytes(const ByteDotArgs& a) {
  constexpr int V = R == 4 ? 2 : 4, H = kFour ? 2 : 1;
  const F d;
  const I di;
  const ByteScratch& s = *a.scratch;
  const int groups = a.map->groups, group_columns = a.map->columns() / groups;
  for (int token = 0; token < a.tokens; token += V * kLanes) {
    const std::int32_t* q = a.block->q;
    const std::int32_t* order = a.map->order.data();
    VF total[R][V];
    HALFTONE_UNROLL
    for (int i = 0; i < R * V; ++i) total[i / V][i % V] = hn::Zero(d);
    for (int group = 0; group < groups; ++group) {
      const std::int32_t* start = a.block->start + group * 2 * R;
      VI sum[2][R][V];
      HALFTONE_UNROLL
      for (int i = 0; i < 2 * R * V; ++i) sum[i / (R * V)][i / V % R][i % V] = hn::Set(di, start[i / V]);
      for (int c = 0; c < group_columns; ++c, ++order) {
        if (c % 2 == 0) a.prefetcher->advance();
        VI code[H][V];
        HALFTONE_UNROLL
        for (int i = 0; i < H * V; ++i) {
          const VI dword = hn::Load(di, s.columns + *order * kChunkTokens + token + i % V * kLanes);
          code[i / V][i % V] = half_codes<kFour>(dword, i / V);
        }
        HALFTONE_UNROLL
        for (int i = 0; i < H * 2 * R; ++i, ++q) {
          const VI digits = hn::Set(di, *q);
          HALFTONE_UNROLL
          for (int v = 0; v < V; ++v) {
            VI& x = sum[i / R % 2][i % R][v];
            x = add_byte_products(x, code[i / (2 * R)][v], digits);
          }
        }
      }
      const float* q_sums = a.block->sums + group * 3 * R;
      const int params = group * kChunkTokens + token;
      VF zero[V];
      HALFTONE_UNROLL
      for (int v = 0; v < V; ++v) zero[v] = kMin ? hn::Load(d, s.k_zero + params + v * kLanes) : hn::Zero(d);
      const auto without_zero = [&](VI x, float q_sum, int v) HWY_ATTR {
        const VF y = hn::ConvertTo(d, x);
        return kMin ? hn::NegMulAdd(zero[v], hn::Set(d, q_sum), y) : y;
      };
      HALFTONE_UNROLL
      for (int r = 0; r < R; ++r) {
        VF x[V];  // in units of the middle digit
        HALFTONE_UNROLL
        for (int v = 0; v < V; ++v) {
          if constexpr (kFour) {  // two digits fit into 24 bits for up to 32 dims
            x[v] = without_zero(hn::Add(hn::ShiftLeft<8>(sum[0][r][v]), sum[1][r][v]), q_sums[r], v);
          } else {
            x[v] = hn::MulAdd(without_zero(sum[0][r][v], q_sums[r], v), hn::Set(d, 256.0f),
                              without_zero(sum[1][r][v], q_sums[R + r], v));
          }
        }
        HALFTONE_UNROLL
        for (int v = 0; v < V; ++v) {
          const int at = params + v * kLanes;
          if constexpr (kMin)
            total[r][v] =
                hn::MulAdd(hn::Set(d, q_sums[2 * R + r]), hn::Load(d, s.k_offset + at), total[r][v]);
          total[r][v] = hn::MulAdd(x[v], hn::Load(d, s.k_scale + at), total[r][v]);
        }
      }
    }
    HALFTONE_UNROLL
    for (int i = 0; i < R * V; ++i) {
      const VF unit = hn::Set(d, s.q_unit[a.block->first + i / V] * 256);
      hn::Store(hn::Mul(total[i / V][i % V], unit), d,
                a.dots + i / V * kChunkTokens + token + i % V * kLanes);
    }
  }
  add_low_digits<kFour, kMin>(a);
}

/// How often dot_bytes() calls Prefetcher::advance() for a whole chunk.
inline int byte_dot_advances(const KColumns& map, int rows) {
  return map.columns() / 2 * kChunkTokens / ((rows == 4 ? 2 : 4) * kLanes);
}

using ByteDotFunction = void (*)(const ByteDotArgs&);

template <bool kFour, bool kMin>
ByteDotFunction dot_bytes_rows(int rows) {
  return rows == 4   ? dot_bytes<kFour, kMin, 4>
         : rows == 2 ? dot_bytes<kFour, kMin, 2>
                     : dot_bytes<kFour, kMin, 1>;
}

inline ByteDotFunction dot_bytes_of(Element element, int rows) {
  if (four_bits(element))
    return asymmetric(element) ? dot_bytes_rows<true, true>(rows) : dot_bytes_rows<true, false>(rows);
  return asymmetric(element) ? dot_bytes_rows<false, true>(rows) : dot_bytes_rows<false, false>(rows);
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_BYTE_DOTS_INL_H
