// Direct path, V of int8 or int4 codes on AVX-512 with VNNI: sums of p * v over the tiles of a chunk, in
// integers.
//
// A token's weight is p times its scale. The weights of a row and scale group become fixed-point numbers (a
// power of two times the weights, rounded) in unsigned digits of 8 bits, and one instruction multiplies 64
// digits with signed codes and adds four products. A chunk's sums are exact; they meet in fp32 once per
// chunk. Three digits hold the largest weight as fp32 does. Two hold it to 2^-16: they are used where the
// output has 16 bits and each token and head has scales of its own (docs/decisions.md: what they may lose).
//
// Rounding is relative to the largest weight. Where scales differ so much that this may be felt, or are
// negative or not finite, the caller is told to sum that chunk in fp32. A scale that tokens or heads share
// does not say how small V of a token is: an attention sink's may be 0, beside which the others must keep
// their weights.

#include "cpu/attention/byte_dots-inl.h"
#include "cpu/attention/tiles.h"
#include "cpu/attention/vec-inl.h"

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

/// Scales and mins of an asymmetric V of a chunk, what is added to its codes in integers (8 bits: after 128
/// was taken away, to make them signed), so that a sum of theirs cancels exactly, and offsets (see
/// ZeroPoint). Zero points and offsets are [group][kChunkTokens], scales and mins per tile [groups][16].
template <bool kFour>
HWY_NOINLINE void load_v_zero_points(const Side& side, const Chunk& chunk, float* scale, float* min,
                                     ByteScratch& s) {
  const F d;
  const int count = side.groups * kTileTokens;
  constexpr int kBias = kFour ? 0 : 128;
  VI offset_bits = hn::Zero(I());
  for (int i = 0; i < chunk.tiles; ++i, scale += count, min += count) {
    const std::uint8_t* params = chunk.tile[i].v_params;
    for (int g = 0; g < side.groups; ++g) {
      const int from = g * kTileTokens, to = g * kChunkTokens + i * kTileTokens;
      if (side.stored_params && !side.f32_params) {
        const auto* scales = reinterpret_cast<const __m256i*>(params + from * 2);
        const auto* mins = reinterpret_cast<const __m256i*>(params + (count + from) * 2);
        hn::StoreU(VF{_mm512_cvtph_ps(_mm256_loadu_si256(scales))}, d, scale + from);
        hn::StoreU(VF{_mm512_cvtph_ps(_mm256_loadu_si256(mins))}, d, min + from);
      } else if (side.stored_params) {
        hn::StoreU(VF{_mm512_loadu_ps(params + from * 4)}, d, scale + from);
        hn::StoreU(VF{_mm512_loadu_ps(params + (count + from) * 4)}, d, min + from);
      }
      // From 1 with 8 bits, for 128 - 0 is no signed byte.
      const ZeroPoint x =
          zero_point(hn::LoadU(d, scale + from), hn::LoadU(d, min + from), kFour ? 0 : 1, kFour ? 15 : 255);
      hn::Store(hn::Sub(hn::Set(I(), kBias), VI{_mm512_cvtps_epi32(x.zero.raw)}), I(), s.v_zero + to);
      hn::Store(x.offset, d, s.v_offset + to);
      offset_bits = hn::Max(offset_bits, hn::And(hn::BitCast(I(), x.offset), hn::Set(I(), 0x7fffffff)));
    }
  }
  s.finite_offsets = hn::AllTrue(I(), hn::Lt(offset_bits, hn::Set(I(), 255 << 23)));
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

/// How the weights of R rows and one group become integers below 2^bits.
template <int R>
struct WeightScale {
  float factor[R];
  float unit[R];  ///< what one of them is worth
};

/// Rounding of weights may be this many times what it is where all tokens have the same scale.
inline constexpr float kScaleSpread = 8;

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

/// The weights of all groups as integers below 2^kBits. False if they cannot be: a weight is not finite or
/// below 0 (which no append() makes), or the largest stands so high above the smallest scale that a row may
/// see that tokens of small scales lose what they bring to the output. (A row with a NaN in p has it in its
/// sum, too.)
template <int R, int kBits>
HWY_INLINE bool weight_scales(const ByteSumArgs& a, WeightScale<R>* out) {
  const F d;
  const I di;
  const int tiles = a.chunk->tiles;
  VI p_bits[4], seen[kChunkTiles];
  HALFTONE_UNROLL
  for (int r = 0; r < 4; ++r) p_bits[r] = hn::Zero(di);
  for (int i = 0; i < tiles; ++i) {
    seen[i] = hn::Zero(di);
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) {
      const VI x = hn::BitCast(di, hn::Load(d, a.p + r * kChunkTokens + i * kTileTokens));
      seen[i] = hn::Or(seen[i], x);
      p_bits[r] = hn::Max(p_bits[r], x);
    }
  }
  const VF largest_p = hn::BitCast(d, largest_of_four(p_bits));
  bool fits = true;
  for (int g = 0; g < a.groups; ++g) {
    VI largest[4];
    HALFTONE_UNROLL
    for (int r = 0; r < 4; ++r) largest[r] = hn::Zero(di);
    const VF huge = hn::Set(d, 0x1p100f);
    VF smallest_scale = huge;
    VI scale_bits = hn::Zero(di);
    float* seen_scales = a.scratch->seen_scale + g * kChunkTokens;
    for (int i = 0; i < tiles; ++i) {
      // What no row sees does not count, whatever its scale.
      const auto mask = hn::RebindMask(d, hn::Ne(seen[i], hn::Zero(di)));
      const VF scale = hn::LoadU(d, a.scale + i * a.scale_stride + g * kTileTokens);
      const VF seen_scale = hn::IfThenElseZero(mask, scale);
      smallest_scale = hn::Min(smallest_scale, hn::IfThenElse(mask, scale, huge));
      scale_bits = hn::Max(scale_bits, hn::And(hn::BitCast(di, seen_scale), hn::Set(di, 0x7fffffff)));
      hn::Store(seen_scale, d, seen_scales + i * kTileTokens);
      HALFTONE_UNROLL
      for (int r = 0; r < R; ++r) {
        const VF p = hn::Load(d, a.p + r * kChunkTokens + i * kTileTokens);
        largest[r] = hn::Max(largest[r], hn::BitCast(di, hn::Mul(p, seen_scale)));
      }
    }
    const VI largest_weight = largest_of_four(largest);
    const VF limit = hn::Mul(largest_p, hn::Mul(hn::MinOfLanes(d, smallest_scale), hn::Set(d, kScaleSpread)));
    fits &= hn::AllTrue(d, hn::Le(hn::BitCast(d, largest_weight), limit));
    fits &= hn::AllTrue(di, hn::Lt(scale_bits, hn::Set(di, 255 << 23)));
    // The largest is below 2^(exponent - 126): times 2^(kBits + 126 - exponent) it is below 2^kBits.
    const VI exponent = hn::Max(hn::ShiftRight<23>(largest_weight), hn::Set(di, kBits));
    HWY_ALIGN float factors[kMaxLanes];
    HWY_ALIGN float units[kMaxLanes];
    hn::Store(hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(hn::Set(di, 253 + kBits), exponent))), d, factors);
    hn::Store(hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(exponent, hn::Set(di, kBits - 1)))), d, units);
    // Not even rounded up may it reach 2^kBits. In 24 bits it is exact.
    constexpr float kRoom = kBits < 24 ? 1.0f - 1.0f / (1 << kBits) : 1.0f;
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) {
      out[g].factor[r] = factors[r] * kRoom;
      out[g].unit[r] = units[r] * (1 / kRoom);
    }
  }
  return fits;
}

/// Adds p * offset of a chunk. kSelect: offsets may be infinite or NaN, and count only where p is not 0.
template <int R, bool kSelect>
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
        const VF x = kSelect ? hn::IfThenElseZero(hn::Ne(p, hn::Zero(d)), offsets) : offsets;
        sum[r] = hn::MulAdd(p, x, sum[r]);
      }
    }
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) hn::Store(sum[r], d, sums + r * kLanes);
  }
}

/// Weights of a class, digit by digit, in the lanes of its vectors.
template <Element kElement, int R, int kDigits>
HWY_INLINE void class_weights(const ByteSumArgs& a, const WeightScale<R>* scales) {
  const F d;
  const I di;
  ByteScratch& s = *a.scratch;
  const int tiles = a.chunk->tiles, group_a = a.cls->group_a, group_b = a.cls->group_b;
  const bool two = group_b != group_a;
  const float* scales_a = s.seen_scale + group_a * kChunkTokens;
  const float* scales_b = s.seen_scale + group_b * kChunkTokens;
  const WeightScale<R>&first = scales[group_a], &second = scales[group_b];
  const hn::Mask<F> second_lanes{static_cast<__mmask16>(a.cls->second)};
  VF factor_a[R], factor_b[R];
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) {
    const VF x = hn::IfThenElse(second_lanes, hn::Set(d, second.unit[r]), hn::Set(d, first.unit[r]));
    hn::Store(hn::Mul(x, hn::Set(d, byte_code_unit(kElement))), d, s.unit + r * kLanes);
    factor_a[r] = hn::Set(d, first.factor[r]);
    factor_b[r] = hn::Set(d, second.factor[r]);
  }
  // Byte i of a pattern is a digit of token[i]; in dwords of `second`, of the second weights.
  const __m512i four = _mm512_slli_epi32(_mm512_loadu_si512(a.map->token.data()), 2);
  const __m512i token =
      _mm512_mask_or_epi32(four, static_cast<__mmask16>(a.cls->second), four, _mm512_set1_epi8(64));
  __m512i index[kDigits];  // the highest digit first
  HALFTONE_UNROLL
  for (int digit = 0; digit < kDigits; ++digit)
    index[digit] = _mm512_add_epi8(token, _mm512_set1_epi8(static_cast<char>(kDigits - 1 - digit)));
  VI start[kDigits][R];
  HALFTONE_UNROLL
  for (int i = 0; i < kDigits * R; ++i) start[i / R][i % R] = hn::Zero(di);
  for (int i = 0; i < tiles; ++i) {
    VI zero = hn::Zero(di);
    if constexpr (asymmetric(kElement)) {
      const std::int32_t* zeros = s.v_zero + i * kTileTokens;
      const __m512i zero_a = _mm512_load_si512(zeros + group_a * kChunkTokens);
      const __m512i zero_b = _mm512_load_si512(zeros + group_b * kChunkTokens);
      zero = VI{_mm512_permutex2var_epi8(zero_a, token, zero_b)};
    }
    std::uint8_t* pattern = s.pattern + i * R * kDigits * 64;
    const VF scale_a = hn::Load(d, scales_a + i * kTileTokens),
             scale_b = hn::Load(d, scales_b + i * kTileTokens);
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r, pattern += kDigits * 64) {
      const VF p = hn::Load(d, a.p + r * kChunkTokens + i * kTileTokens);
      const auto weight = [&](VF scale, VF factor)
                              HWY_ATTR { return _mm512_cvtps_epi32(hn::Mul(hn::Mul(p, scale), factor).raw); };
      const __m512i weight_a = weight(scale_a, factor_a[r]);
      const __m512i weight_b = two ? weight(scale_b, factor_b[r]) : weight_a;
      HALFTONE_UNROLL
      for (int digit = 0; digit < kDigits; ++digit) {
        const __m512i digits = _mm512_permutex2var_epi8(weight_a, index[digit], weight_b);
        _mm512_store_si512(pattern + digit * 64, digits);
        if constexpr (asymmetric(kElement))
          start[digit][r] = add_byte_products(start[digit][r], VI{digits}, zero);
      }
    }
  }
  if constexpr (asymmetric(kElement)) {
    HALFTONE_UNROLL
    for (int i = 0; i < kDigits * R; ++i) hn::Store(start[i / R][i % R], di, s.v_start + i * kLanes);
  }
}

/// A vectors of V.
template <Element kElement, int R, int kDigits, int A>
HWY_INLINE void sum_block(const ByteSumArgs& a, int vector) {
  constexpr int P = planes_of(kElement);
  const F d;
  const I di;
  const ByteScratch& s = *a.scratch;
  const std::int32_t* offset = a.map->offset.data() + vector;
  const VI shuffle = hn::LoadU(di, reinterpret_cast<const std::int32_t*>(a.map->shuffle.data()));
  VI sum[kDigits][A][P][R];
  HALFTONE_UNROLL
  for (int i = 0; i < kDigits * A * P * R; ++i) {
    const int digit = i / (A * P * R), r = i % R;
    sum[digit][i / (P * R) % A][i / R % P][r] =
        asymmetric(kElement) ? hn::Load(di, s.v_start + (digit * R + r) * kLanes) : hn::Zero(di);
  }
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
        const VI low = hn::Set(di, 0x0f0f0f0f);
        code[i][0] = hn::And(bytes, low);
        code[i][1] = hn::And(hn::ShiftRight<4>(bytes), low);
      } else {
        code[i][0] = kElement == Element::kU8 ? hn::Xor(bytes, sign) : bytes;
      }
    }
    HALFTONE_UNROLL
    for (int i = 0; i < R * kDigits; ++i, pattern += 64) {
      const VI weight = hn::Load(di, reinterpret_cast<const std::int32_t*>(pattern));
      HALFTONE_UNROLL
      for (int j = 0; j < A * P; ++j) {
        VI& x = sum[i % kDigits][j / P][j % P][i / kDigits];
        x = add_byte_products(x, weight, code[j / P][j % P]);
      }
    }
  }
  float* acc = a.acc + vector * (P * R * kLanes);
  HALFTONE_UNROLL
  for (int i = 0; i < A * P * R; ++i) {
    const int v = i / (P * R), plane = i / R % P, r = i % R;
    VF x = hn::Load(d, acc + i * kLanes);
    if (a.alpha != nullptr) x = hn::Mul(x, hn::Set(d, a.alpha[r]));
    const VF unit = hn::Load(d, s.unit + r * kLanes);
    const VI low = hn::Add(hn::ShiftLeft<8>(sum[kDigits - 2][v][plane][r]), sum[kDigits - 1][v][plane][r]);
    x = hn::MulAdd(hn::ConvertTo(d, low), unit, x);
    if constexpr (kDigits == 3)
      x = hn::MulAdd(hn::ConvertTo(d, sum[0][v][plane][r]), hn::Mul(unit, hn::Set(d, 0x1p16f)), x);
    hn::Store(x, d, acc + i * kLanes);
  }
}

/// Vectors of one sum_block(): as many as their sums fit into registers.
constexpr int byte_sum_vectors(bool four, int rows) { return 8 / rows / (four ? 2 : 1); }

/// Adds p * v of a chunk to the sums, or returns false and leaves them alone: see weight_scales().
template <Element kElement, int R, int kDigits>
HWY_NOINLINE bool sum_bytes(ByteSumArgs a) {
  constexpr int A = byte_sum_vectors(four_bits(kElement), R);
  WeightScale<R> scales[kMaxGroups];
  if (!weight_scales<R, 8 * kDigits>(a, scales)) return false;
  if constexpr (asymmetric(kElement)) {
    if (a.scratch->finite_offsets) {
      sum_offsets<R, false>(a);
    } else {
      sum_offsets<R, true>(a);
    }
  }
  for (const VByteClass& cls : a.map->classes) {
    a.cls = &cls;
    class_weights<kElement, R, kDigits>(a, scales);
    int i = 0;
    for (; i + A <= cls.count; i += A) sum_block<kElement, R, kDigits, A>(a, cls.first + i);
    if constexpr (A > 1) {
      for (; i < cls.count; ++i) sum_block<kElement, R, kDigits, 1>(a, cls.first + i);
    }
  }
  return true;
}

/// How often sum_bytes() calls Prefetcher::advance() for one tile, at least.
inline int byte_sum_advances(const VBytes& map, bool four, int rows) {
  return static_cast<int>(map.offset.size()) / byte_sum_vectors(four, rows);
}

using ByteSumFunction = bool (*)(ByteSumArgs);

template <Element kElement, int kDigits>
ByteSumFunction sum_bytes_rows(int rows) {
  return rows == 4   ? sum_bytes<kElement, 4, kDigits>
         : rows == 2 ? sum_bytes<kElement, 2, kDigits>
                     : sum_bytes<kElement, 1, kDigits>;
}

template <int kDigits>
ByteSumFunction sum_bytes_digits(Element element, int rows) {
  return element == Element::kI8   ? sum_bytes_rows<Element::kI8, kDigits>(rows)
         : element == Element::kI4 ? sum_bytes_rows<Element::kI4, kDigits>(rows)
         : element == Element::kU8 ? sum_bytes_rows<Element::kU8, kDigits>(rows)
                                   : sum_bytes_rows<Element::kU4, kDigits>(rows);
}

/// V of the problem's cache, as `element`.
inline ByteSumFunction sum_bytes_of(Element element, int rows, const AttentionProblem& problem) {
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  const bool own_scales = spec != nullptr && (spec->v_format.granularity == Granularity::kTokenHead ||
                                              spec->v_format.granularity == Granularity::kGroup);
  return problem.out_dtype != DType::kFloat32 && own_scales ? sum_bytes_digits<2>(element, rows)
                                                            : sum_bytes_digits<3>(element, rows);
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

/// Multiplies the sums of a block, [n][rows][16], with alpha [rows].
inline void scale_sums(float* sums, int n, int rows, const float* alpha) {
  for (int i = 0; i < n * rows; ++i) {
    for (int lane = 0; lane < 16; ++lane) sums[i * 16 + lane] *= alpha[i % rows];
  }
}

/// Adds x [rows][dim] to the sums of a block, each dim to one of its lanes, and leaves x zero.
inline void add_to_bytes(const VBytes& map, int rows, int dim, float* x, float* acc) {
  const int width = static_cast<int>(map.dims.size()) / 16;
  for (int i = 0; i < width * 16; ++i) {
    for (int r = 0; r < rows; ++r) {
      float& from = x[r * dim + map.dims[i]];
      acc[(i / 16 * rows + r) * 16 + i % 16] += from;
      from = 0;
    }
  }
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_BYTE_SUMS_INL_H
