// Direct path, V of int8 or int4 codes on AVX-512 with VNNI: sums of p * v over the tiles of a chunk, in integers.
//
// A token's weight is p times its scale. The weights of a row and scale group become fixed-point numbers of 24
// bits (a power of two times the weights, rounded: the largest is exact) in three unsigned digits of 8 bits, and
// one instruction multiplies 64 digits with signed codes and adds four products. A chunk's sums are exact; they
// meet in fp32 once per chunk.

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

/// 4-bit codes are used where they are in their byte, the low ones moved up: 16 times their value, signed.
constexpr float byte_code_unit(bool four) { return four ? 1.0f / 16 : 1.0f; }

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

/// Weights of R rows and one group as integers below 2^24 in `out`, [R][kChunkTokens]; `unit` [>= R] receives
/// what one of them is worth: NaN if a weight is not finite. `sign`: only weights of this sign count. Returns
/// whether there are others. A weight is 0 where p is, whatever the scale.
template <int R>
HWY_INLINE bool group_weights(const float* p, const float* scale, std::int64_t scale_stride, int tiles,
                              float sign, float* products, std::int32_t* out, float* unit) {
  const F d;
  const I di;
  VI largest[4];
  VI other = hn::Zero(di);
  HALFTONE_UNROLL
  for (int r = 0; r < 4; ++r) {
    largest[r] = hn::Zero(di);
    if (r >= R) continue;
    for (int i = 0; i < tiles; ++i) {
      const VF x = hn::Load(d, p + r * kChunkTokens + i * kTileTokens);
      const VF y = hn::Mul(hn::Mul(x, hn::LoadU(d, scale + i * scale_stride)), hn::Set(d, sign));
      const VF weight = hn::IfThenElseZero(hn::Ne(x, hn::Zero(d)), y);
      other = hn::Or(other, hn::BitCast(di, weight));
      largest[r] = hn::Max(largest[r], hn::BitCast(di, weight));  // a NaN is larger than infinity
      hn::Store(weight, d, products + r * kChunkTokens + i * kTileTokens);
    }
  }
  // The largest is below 2^(exponent - 126): times 2^(150 - exponent) it is below 2^24.
  const VI biased = hn::ShiftRight<23>(largest_of_four(largest));
  const VI exponent = hn::Max(biased, hn::Set(di, 24));
  const VF nan = hn::Set(d, __builtin_nanf(""));
  const VF worth = hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(exponent, hn::Set(di, 23))));
  HWY_ALIGN float factor[kMaxLanes];
  HWY_ALIGN float value[kMaxLanes];
  hn::Store(hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(hn::Set(di, 277), exponent))), d, factor);
  hn::Store(hn::IfThenElse(hn::RebindMask(d, hn::Eq(biased, hn::Set(di, 255))), nan, worth), d, value);
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) {
    unit[r] = value[r] * sign;
    const VF factors = hn::Set(d, factor[r]);
    for (int i = 0; i < tiles; ++i) {
      const int at = r * kChunkTokens + i * kTileTokens;
      const VI weight{_mm512_cvtps_epi32(hn::Mul(hn::Load(d, products + at), factors).raw)};
      hn::Store(hn::Max(weight, hn::Zero(di)), di, out + at);
    }
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
  ByteScratch* scratch;
  Prefetcher* prefetcher;
};

/// Weights of a class, digit by digit, in the lanes of its vectors. As group_weights().
template <bool kFour, int R>
HWY_INLINE bool class_weights(const ByteSumArgs& a, float sign) {
  const F d;
  ByteScratch& s = *a.scratch;
  const int tiles = a.chunk->tiles, group_a = a.cls->group_a, group_b = a.cls->group_b;
  float unit[2][4];
  bool other = group_weights<R>(a.p, a.scale + group_a * kTileTokens, a.scale_stride, tiles, sign, s.products,
                                s.weights[0], unit[0]);
  if (group_b != group_a) {
    other |= group_weights<R>(a.p, a.scale + group_b * kTileTokens, a.scale_stride, tiles, sign, s.products,
                              s.weights[1], unit[1]);
  } else {
    std::copy_n(unit[0], R, unit[1]);
  }
  const hn::Mask<F> second{static_cast<__mmask16>(a.cls->second)};
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) {
    const VF x = hn::IfThenElse(second, hn::Set(d, unit[1][r]), hn::Set(d, unit[0][r]));
    hn::Store(hn::Mul(x, hn::Set(d, byte_code_unit(kFour) * 0x1p16f)), d, s.unit + r * 2 * kLanes);
    hn::Store(hn::Mul(x, hn::Set(d, byte_code_unit(kFour))), d, s.unit + (r * 2 + 1) * kLanes);
  }
  // Byte i of a pattern is a digit of token[i]; in dwords of `second`, of the second weights.
  const __m512i four = _mm512_slli_epi32(_mm512_loadu_si512(a.map->token.data()), 2);
  const __m512i token = _mm512_mask_or_epi32(four, static_cast<__mmask16>(group_b != group_a ? a.cls->second : 0),
                                             four, _mm512_set1_epi8(64));
  for (int i = 0; i < tiles; ++i) {
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) {
      const int at = r * kChunkTokens + i * kTileTokens;
      const __m512i first = _mm512_load_si512(s.weights[0] + at), other_weights = _mm512_load_si512(s.weights[1] + at);
      std::uint8_t* pattern = s.pattern + (i * R + r) * 3 * 64;
      HALFTONE_UNROLL
      for (int digit = 0; digit < 3; ++digit) {  // the highest first
        const __m512i index = _mm512_add_epi8(token, _mm512_set1_epi8(static_cast<char>(2 - digit)));
        _mm512_store_si512(pattern + digit * 64, _mm512_permutex2var_epi8(first, index, other_weights));
      }
    }
  }
  return other;
}

/// A vectors of V.
template <bool kFour, int R, int A>
HWY_INLINE void sum_block(const ByteSumArgs& a, int vector, const float* alpha) {
  constexpr int P = kFour ? 2 : 1;
  const F d;
  const I di;
  const ByteScratch& s = *a.scratch;
  const std::int32_t* offset = a.map->offset.data() + vector;
  const VI shuffle = hn::LoadU(di, reinterpret_cast<const std::int32_t*>(a.map->shuffle.data()));
  VI sum[3][A][P][R];
  HALFTONE_UNROLL
  for (int i = 0; i < 3 * A * P * R; ++i) sum[i / (A * P * R)][i / (P * R) % A][i / R % P][i % R] = hn::Zero(di);
  const std::uint8_t* pattern = s.pattern;
  for (int tile = 0; tile < a.chunk->tiles; ++tile) {
    a.prefetcher->advance();
    VI code[A][P];
    HALFTONE_UNROLL
    for (int i = 0; i < A; ++i) {
      const auto* at = reinterpret_cast<const std::int32_t*>(a.chunk->tile[tile].v + offset[i]);
      const VI bytes = hn::TableLookupBytes(hn::LoadU(di, at), shuffle);
      if constexpr (kFour) {
        const VI high = hn::Set(di, static_cast<std::int32_t>(0xf0f0f0f0u));
        const VI sign = hn::Set(di, static_cast<std::int32_t>(0x80808080u));
        code[i][0] = hn::Xor(hn::And(hn::ShiftLeft<4>(bytes), high), sign);
        code[i][1] = hn::Xor(hn::And(bytes, high), sign);
      } else {
        code[i][0] = bytes;
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

template <bool kFour, int R>
HWY_NOINLINE void sum_bytes(ByteSumArgs a) {
  constexpr int A = byte_sum_vectors(kFour, R);
  for (const VByteClass& cls : a.map->classes) {
    a.cls = &cls;
    const float* alpha = a.alpha;
    float sign = 1;
    for (bool more = true; more;) {  // weights below 0, which no append() makes, are a second pass
      more = class_weights<kFour, R>(a, sign) && sign > 0;
      int i = 0;
      for (; i + A <= cls.count; i += A) sum_block<kFour, R, A>(a, cls.first + i, alpha);
      if constexpr (A > 1) {
        for (; i < cls.count; ++i) sum_block<kFour, R, 1>(a, cls.first + i, alpha);
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

template <bool kFour>
HWY_INLINE void sum_bytes_of(const ByteSumArgs& a, int rows) {
  if (rows == 4) {
    sum_bytes<kFour, 4>(a);
  } else if (rows == 2) {
    sum_bytes<kFour, 2>(a);
  } else {
    sum_bytes<kFour, 1>(a);
  }
}

/// Adds up the lanes of a block's sums: out [R][dim], zero before.
inline void gather_bytes(const VBytes& map, int planes, int rows, const float* acc, int dim, float* out) {
  const int width = static_cast<int>(map.offset.size()) * planes;
  for (int r = 0; r < rows; ++r) {
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
