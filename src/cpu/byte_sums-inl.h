// Direct path, V of int8 or int4 codes on AVX-512 with VNNI: sums of p * v over the tiles of a chunk, in
// integers.
//
// A token's weight is p times its scale. The weights of a row and scale group become fixed-point numbers of
// 24 bits (a power of two times the weights, rounded: the largest is exact) in three unsigned digits of 8
// bits, and one instruction multiplies 64 digits with signed codes and adds four products. A chunk's sums are
// exact; they meet in fp32 once per chunk.

#include "cpu/byte_dots-inl.h"
#include "cpu/tiles.h"
#include "cpu/vec-inl.h"

#if defined(HALFTONE_CPU_BYTE_SUMS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_BYTE_SUMS_INL_H
#undef HALFTONE_CPU_BYTE_SUMS_INL_H
#else
#define HALFTONE_CPU_BYTE_SUMS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

/// Symmetric 4-bit codes are used where they are in their byte, the low ones moved up: 16 times their value,
/// signed.
constexpr float byte_code_unit(Element element) { return element == Element::kI4 ? 1.0f / 16 : 1.0f; }

/// Zero points and offsets of an asymmetric V of a chunk (see ZeroPoint), [group][kChunkTokens]. 8 bits: the
/// zero point is 128, which makes codes signed.
HWY_INLINE void load_v_zero_points(const Side& side, const Chunk& chunk, const float* scale, const float* min,
                                   ByteScratch& s) {
  const F d;
  for (int i = 0; i < chunk.tiles; ++i) {
    for (int g = 0; g < side.groups; ++g) {
      const int from = (i * side.groups + g) * kTileTokens, to = g * kChunkTokens + i * kTileTokens;
      const VF scales = hn::LoadU(d, scale + from), mins = hn::LoadU(d, min + from);
      if (four_bits(side.element)) {
        const ZeroPoint x = zero_point(scales, mins, 15);
        hn::Store(hn::ConvertTo(I(), x.zero), I(), s.v_zero + to);
        hn::Store(x.offset, d, s.v_offset + to);
      } else {
        hn::Store(hn::MulAdd(scales, hn::Set(d, 128.0f), mins), d, s.v_offset + to);
      }
    }
  }
}

/// The largest lane of each of v[0] to v[3], in this order in each block of four lanes.
HWY_INLINE VI largest_of_four(const VI (&v)[4]) {
  const I d;
  const hn::RepartitionToWide<I> pair;
  const VI a = hn::Max(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  const VI b = hn::Max(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));
  const auto low = hn::InterleaveLower(pair, hn::BitCast(pair, a), hn::BitCast(pair, b));
  const auto high = hn::InterleaveUpper(pair, hn::BitCast(pair, a), hn::BitCast(pair, b));
  VI x = hn::Max(hn::BitCast(d, low), hn::BitCast(d, high));
  x = hn::Max(x, hn::ConcatLowerUpper(d, x, x));
  return hn::Max(x, hn::SwapAdjacentBlocks(x));
}

/// How the weights of R rows and one group become integers below 2^24.
template <int R>
struct WeightScale {
  float factor[R];
  float unit[R];  ///< what one of them is worth: NaN if a weight is not finite
};

/// Only weights of `sign` count. Returns whether there are others. A weight is 0 where p is, whatever the
/// scale.
template <int R>
HWY_INLINE bool weight_scale(const float* p, const float* scale, std::int64_t scale_stride, int tiles,
                             float sign, WeightScale<R>& out) {
  const F d;
  const I di;
  VI largest[4];
  VI other = hn::Zero(di);
  HALFTONE_UNROLL
  for (int r = 0; r < 4; ++r) largest[r] = hn::Zero(di);
  for (int i = 0; i < tiles; ++i) {
    const VF scales = hn::Mul(hn::LoadU(d, scale + i * scale_stride), hn::Set(d, sign));
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) {
      const VF x = hn::Load(d, p + r * kChunkTokens + i * kTileTokens);
      const VI weight = hn::BitCast(di, hn::IfThenElseZero(hn::Ne(x, hn::Zero(d)), hn::Mul(x, scales)));
      other = hn::Or(other, weight);
      largest[r] = hn::Max(largest[r], weight);  // a NaN is larger than infinity
    }
  }
  // The largest is below 2^(exponent - 126): times 2^(150 - exponent) it is below 2^24.
  const VI biased = hn::ShiftRight<23>(largest_of_four(largest));
  const VI exponent = hn::Max(biased, hn::Set(di, 24));
  const VF nan = hn::Set(d, __builtin_nanf(""));
  const VF unit = hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(exponent, hn::Set(di, 23))));
  HWY_ALIGN float factors[kMaxLanes];
  HWY_ALIGN float units[kMaxLanes];
  hn::Store(hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(hn::Set(di, 277), exponent))), d, factors);
  hn::Store(hn::IfThenElse(hn::RebindMask(d, hn::Eq(biased, hn::Set(di, 255))), nan, unit), d, units);
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) {
    out.factor[r] = factors[r] * sign;
    out.unit[r] = units[r] * sign;
  }
  return !hn::AllFalse(di, hn::Lt(other, hn::Zero(di)));
}

struct ByteSumArgs {
  const VBytes* map;
  const VByteClass* cls;
  const Chunk* chunk;
  const float* scale;  // per tile: [group][16]
  std::int64_t scale_stride;
  const float* p;      // [R][kChunkTokens]
  const float* alpha;  // [R], or null if all are 1
  float* acc;          // [vector][plane][R][16]
  float* offset_sums;  // asymmetric: [group][R][16] sums of p * offset, 16 partial ones each
  int groups;
  ByteScratch* scratch;
  Prefetcher* prefetcher;
};

/// Adds p * offset of a chunk.
template <int R>
HWY_INLINE void sum_offsets(const ByteSumArgs& a) {
  const F d;
  const float* offset = a.scratch->v_offset;
  for (int g = 0; g < a.groups; ++g, offset += kChunkTokens) {
    float* sums = a.offset_sums + g * R * kLanes;
    VF sum[R];
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) {
      sum[r] = hn::Load(d, sums + r * kLanes);
      if (a.alpha != nullptr) sum[r] = hn::Mul(sum[r], hn::Set(d, a.alpha[r]));
    }
    for (int t = 0; t < a.chunk->tiles * kTileTokens; t += kLanes) {
      const VF offsets = hn::Load(d, offset + t);
      HALFTONE_UNROLL
      for (int r = 0; r < R; ++r) {
        const VF p = hn::Load(d, a.p + r * kChunkTokens + t);
        sum[r] = hn::MulAdd(p, hn::IfThenElseZero(hn::Ne(p, hn::Zero(d)), offsets), sum[r]);
      }
    }
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) hn::Store(sum[r], d, sums + r * kLanes);
  }
}

/// Weights of a class, digit by digit, in the lanes of its vectors. Returns as weight_scale().
template <Element kElement, int R>
HWY_INLINE bool class_weights(const ByteSumArgs& a, float sign) {
  const F d;
  const I di;
  ByteScratch& s = *a.scratch;
  const int tiles = a.chunk->tiles, group_a = a.cls->group_a, group_b = a.cls->group_b;
  const bool two = group_b != group_a;
  const float* scale_a = a.scale + group_a * kTileTokens;
  const float* scale_b = a.scale + group_b * kTileTokens;
  WeightScale<R> first, second;
  bool other = weight_scale<R>(a.p, scale_a, a.scale_stride, tiles, sign, first);
  if (two) {
    other |= weight_scale<R>(a.p, scale_b, a.scale_stride, tiles, sign, second);
  } else {
    second = first;
  }
  const hn::Mask<F> second_lanes{static_cast<__mmask16>(a.cls->second)};
  VF factor_a[R], factor_b[R];
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) {
    const VF x = hn::IfThenElse(second_lanes, hn::Set(d, second.unit[r]), hn::Set(d, first.unit[r]));
    hn::Store(hn::Mul(x, hn::Set(d, byte_code_unit(kElement) * 0x1p16f)), d, s.unit + r * 2 * kLanes);
    hn::Store(hn::Mul(x, hn::Set(d, byte_code_unit(kElement))), d, s.unit + (r * 2 + 1) * kLanes);
    factor_a[r] = hn::Set(d, first.factor[r]);
    factor_b[r] = hn::Set(d, second.factor[r]);
  }
  // Byte i of a pattern is a digit of token[i]; in dwords of `second`, of the second weights.
  const __m512i four = _mm512_slli_epi32(_mm512_loadu_si512(a.map->token.data()), 2);
  const __m512i token =
      _mm512_mask_or_epi32(four, static_cast<__mmask16>(a.cls->second), four, _mm512_set1_epi8(64));
  const __m512i index[3] = {_mm512_add_epi8(token, _mm512_set1_epi8(2)),
                            _mm512_add_epi8(token, _mm512_set1_epi8(1)), token};  // the highest digit first
  // NaN, where p is 0 and the scale is garbage, becomes the lowest integer and then 0.
  const auto weight = [&](VF p, VF scales, VF factor) HWY_ATTR {
    return hn::Max(VI{_mm512_cvtps_epi32(hn::Mul(p, hn::Mul(scales, factor)).raw)}, hn::Zero(di)).raw;
  };
  for (int i = 0; i < tiles; ++i) {
    if constexpr (kElement == Element::kU4) {
      const std::int32_t* zero = s.v_zero + i * kTileTokens;
      const __m512i zero_a = _mm512_load_si512(zero + group_a * kChunkTokens);
      const __m512i zero_b = _mm512_load_si512(zero + group_b * kChunkTokens);
      _mm512_store_si512(s.zero_pattern + i * 64, _mm512_permutex2var_epi8(zero_a, token, zero_b));
    }
    const VF scales_a = hn::LoadU(d, scale_a + i * a.scale_stride),
             scales_b = hn::LoadU(d, scale_b + i * a.scale_stride);
    std::uint8_t* pattern = s.pattern + i * R * 3 * 64;
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r, pattern += 3 * 64) {
      const VF p = hn::Load(d, a.p + r * kChunkTokens + i * kTileTokens);
      const __m512i weight_a = weight(p, scales_a, factor_a[r]);
      const __m512i weight_b = two ? weight(p, scales_b, factor_b[r]) : weight_a;
      HALFTONE_UNROLL
      for (int digit = 0; digit < 3; ++digit)
        _mm512_store_si512(pattern + digit * 64, _mm512_permutex2var_epi8(weight_a, index[digit], weight_b));
    }
  }
  return other;
}

/// A vectors of V.
template <Element kElement, int R, int A>
HWY_INLINE void sum_block(const ByteSumArgs& a, int vector, const float* alpha) {
  constexpr int P = planes_of(kElement);
  const F d;
  const I di;
  const ByteScratch& s = *a.scratch;
  const std::int32_t* offset = a.map->offset.data() + vector;
  const VI shuffle = hn::LoadU(di, reinterpret_cast<const std::int32_t*>(a.map->shuffle.data()));
  VI sum[3][A][P][R];
  HALFTONE_UNROLL
  for (int i = 0; i < 3 * A * P * R; ++i)
    sum[i / (A * P * R)][i / (P * R) % A][i / R % P][i % R] = hn::Zero(di);
  const std::uint8_t* pattern = s.pattern;
  for (int tile = 0; tile < a.chunk->tiles; ++tile) {
    a.prefetcher->advance();
    VI code[A][P];
    HALFTONE_UNROLL
    for (int i = 0; i < A; ++i) {
      const auto* at = reinterpret_cast<const std::int32_t*>(a.chunk->tile[tile].v + offset[i]);
      const VI bytes = hn::TableLookupBytes(hn::LoadU(di, at), shuffle);
      const VI sign = hn::Set(di, static_cast<std::int32_t>(0x80808080u));
      if constexpr (kElement == Element::kI4) {
        const VI high = hn::Set(di, static_cast<std::int32_t>(0xf0f0f0f0u));
        code[i][0] = hn::Xor(hn::And(hn::ShiftLeft<4>(bytes), high), sign);
        code[i][1] = hn::Xor(hn::And(bytes, high), sign);
      } else if constexpr (kElement == Element::kU4) {
        const hn::Repartition<std::int8_t, I> d8;
        const VI low = hn::Set(di, 0x0f0f0f0f);
        const auto zero = hn::Load(d8, s.zero_pattern + tile * 64);
        code[i][0] = hn::BitCast(di, hn::Sub(hn::BitCast(d8, hn::And(bytes, low)), zero));
        code[i][1] = hn::BitCast(di, hn::Sub(hn::BitCast(d8, hn::And(hn::ShiftRight<4>(bytes), low)), zero));
      } else {
        code[i][0] = kElement == Element::kU8 ? hn::Xor(bytes, sign) : bytes;
      }
    }
    HALFTONE_UNROLL
    for (int i = 0; i < R * 3; ++i, pattern += 64) {
      const VI weight = hn::Load(di, reinterpret_cast<const std::int32_t*>(pattern));
      HALFTONE_UNROLL
      for (int j = 0; j < A * P; ++j) {
        VI& x = sum[i % 3][j / P][j % P][i / 3];
        x = add_byte_products(x, weight, code[j / P][j % P]);
      }
    }
  }
  float* acc = a.acc + vector * (P * R * kLanes);
  HALFTONE_UNROLL
  for (int i = 0; i < A * P * R; ++i) {
    const int v = i / (P * R), plane = i / R % P, r = i % R;
    VF x = hn::Load(d, acc + i * kLanes);
    if (alpha != nullptr) x = hn::Mul(x, hn::Set(d, alpha[r]));
    const VI low = hn::Add(hn::ShiftLeft<8>(sum[1][v][plane][r]), sum[2][v][plane][r]);
    x = hn::MulAdd(hn::ConvertTo(d, low), hn::Load(d, s.unit + (r * 2 + 1) * kLanes), x);
    x = hn::MulAdd(hn::ConvertTo(d, sum[0][v][plane][r]), hn::Load(d, s.unit + r * 2 * kLanes), x);
    hn::Store(x, d, acc + i * kLanes);
  }
}

/// Vectors of one sum_block(): as many as their sums fit into registers.
constexpr int byte_sum_vectors(bool four, int rows) { return 8 / rows / (four ? 2 : 1); }

template <Element kElement, int R>
HWY_NOINLINE void sum_bytes(ByteSumArgs a) {
  constexpr int A = byte_sum_vectors(four_bits(kElement), R);
  if constexpr (asymmetric(kElement)) sum_offsets<R>(a);
  for (const VByteClass& cls : a.map->classes) {
    a.cls = &cls;
    const float* alpha = a.alpha;
    float sign = 1;
    for (bool more = true; more;) {  // weights below 0, which no append() makes, are a second pass
      more = class_weights<kElement, R>(a, sign) && sign > 0;
      int i = 0;
      for (; i + A <= cls.count; i += A) sum_block<kElement, R, A>(a, cls.first + i, alpha);
      if constexpr (A > 1) {
        for (; i < cls.count; ++i) sum_block<kElement, R, 1>(a, cls.first + i, alpha);
      }
      alpha = nullptr;
      sign = -1;
    }
  }
}

/// How often sum_bytes() calls Prefetcher::advance() for one tile, at least.
inline int byte_sum_advances(const VBytes& map, bool four, int rows) {
  return static_cast<int>(map.offset.size()) / byte_sum_vectors(four, rows);
}

using ByteSumFunction = void (*)(ByteSumArgs);

template <Element kElement>
ByteSumFunction sum_bytes_rows(int rows) {
  return rows == 4 ? sum_bytes<kElement, 4> : rows == 2 ? sum_bytes<kElement, 2> : sum_bytes<kElement, 1>;
}

inline ByteSumFunction sum_bytes_of(Element element, int rows) {
  return element == Element::kI8   ? sum_bytes_rows<Element::kI8>(rows)
         : element == Element::kI4 ? sum_bytes_rows<Element::kI4>(rows)
         : element == Element::kU8 ? sum_bytes_rows<Element::kU8>(rows)
                                   : sum_bytes_rows<Element::kU4>(rows);
}

/// Adds up the lanes of a block's sums: out [R][dim].
inline void gather_bytes(const Side& side, const VBytes& map, int rows, const float* acc,
                         const float* offset_sums, float* out) {
  const int width = static_cast<int>(map.offset.size()) * planes_of(side.element), dim = side.dim;
  for (int r = 0; r < rows; ++r) {
    for (int d = 0; d < dim; ++d) {
      float sum = 0;
      if (side.has_min && (d == 0 || (side.groups > 1 && d % side.group_size == 0))) {
        const float* lanes = offset_sums + (d * side.groups / dim * rows + r) * 16;
        for (int lane = 0; lane < 16; ++lane) sum += lanes[lane];
      } else if (d > 0) {
        sum = side.has_min ? out[r * dim + d - 1] : 0.0f;
      }
      out[r * dim + d] = sum;
    }
    for (int i = 0; i < width; ++i) {
      for (int lane = 0; lane < 16; ++lane)
        out[r * dim + map.dims[i * 16 + lane]] += acc[(i * rows + r) * 16 + lane];
    }
  }
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_BYTE_SUMS_INL_H
