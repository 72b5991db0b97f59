// Blocked path by tiles of bf16 (AMX): K, Q and V as operands.
//
// A value of Q or K is the sum of parts, each the upper half of the bits that those before it leave: one of a
// bf16 or a code, two of an f16, three of an fp32. V, whose rounding no output of 16 bits shows, has two at
// most, of which the second one is rounded.
// Tiles are 1 KB each, in the order in which sums take them:
//   K, left:   [16 tokens][32 dims] tiles of [token][dim]
//   Q, right:  [16 rows][32 dims] tiles of [two dims][row]
//   V, left:   [16 dims][32 tokens] tiles of [dim][token], of each 16 tokens in the order of pair_place()
//   P, right:  [16 rows][32 tokens] tiles of [two tokens][row], likewise
#include <cstddef>

#include "cpu/attention/matrix_tiles-inl.h"
#include "cpu/attention/pair_products-inl.h"
#include "cpu/attention/tiles.h"

#if defined(HALFTONE_CPU_TILE_OPERANDS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_TILE_OPERANDS_INL_H
#undef HALFTONE_CPU_TILE_OPERANDS_INL_H
#else
#define HALFTONE_CPU_TILE_OPERANDS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

/// bf16 of a row of a tile.
inline constexpr int kStepValues = kTileBytes / 2;
inline constexpr int kTileValues = kTileRows * kStepValues;
inline constexpr int kSpanSteps = kSpanTokens / kStepValues;  ///< of 32 tokens

/// Where the pair of tokens 2 i and 2 i + 1 of a tile of 16 stands among its eight: V in codes keeps pairs i
/// and i + 4 together.
constexpr int pair_place(int i) { return i % 4 * 2 + i / 4; }
constexpr int pair_at_place(int place) { return place / 2 + place % 2 * 4; }

/// bf16 of `low` in the lower halves of dwords, of `high` in the upper ones.
HWY_INLINE __m512i pair_upper_halves(__m512i low, __m512i high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}

/// What the upper halves leave of 16 finite values.
HWY_INLINE __m512 left_of_upper_halves(__m512i x) {
  const __m512 upper = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-0x10000)));
  return _mm512_sub_ps(_mm512_castsi512_ps(x), upper);
}

// Rounding to bf16, ties to even; in assembly, since the attributes of Highway's target leave AVX-512 BF16
// out.

/// In dwords, `low` in the lower halves.
HWY_INLINE __m512i rounded_pairs(__m512 low, __m512 high) {
  alignas(64) static constexpr std::uint16_t kTurns[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i values;  // all low ones first
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(values) : "v"(low), "v"(high));
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), values);
}
HWY_INLINE __m256i rounded_values(__m512 x) {
  __m256i values;
  asm("vcvtneps2bf16 %1, %0" : "=v"(values) : "v"(x));
  return values;
}

/// The parts of 32 values, `join(low, high)` of each, `distance` behind one another.
template <class Join, class To>
HWY_INLINE void store_parts(__m512i low, __m512i high, int parts, std::ptrdiff_t distance, const Join& join,
                            OperandCheck& check, To* to) {
  const __m512i upper = join(low, high);
  check.add(upper);
  _mm512_store_si512(to, upper);
  for (int part = 1; part < parts; ++part) {
    low = _mm512_castps_si512(left_of_upper_halves(low));
    high = _mm512_castps_si512(left_of_upper_halves(high));
    _mm512_store_si512(to + part * distance, join(low, high));
  }
}

/// Tokens of K. A part of a value is kPart bf16 behind the one before.
class KeyPacker {
 public:
  static constexpr int kPart = kSpanTokens * kTiledWidth;

  KeyPacker(int parts, int steps, std::uint16_t* out) : parts_(parts), steps_(steps), out_(out) {}

  /// Token `token` of the span, `width` values, whole vectors.
  HWY_INLINE void pack(int token, const float* x, int width) {
    for (int i = 0; i < width; i += kStepValues) {
      const __m512i low = _mm512_loadu_si512(x + i);
      const __m512i high = i + kLanes < width ? _mm512_loadu_si512(x + i + kLanes) : _mm512_setzero_si512();
      store_parts(
          low, high, parts_, kPart, [](__m512i a, __m512i b) HWY_ATTR { return pick_upper(a, b); }, check_,
          place(token, i));
    }
  }

  /// The same of bf16.
  HWY_INLINE void copy(int token, const std::uint8_t* x, int width) {
    for (int i = 0; i < width; i += kStepValues) {
      const __mmask32 mask = width - i >= kStepValues ? ~__mmask32{0} : 0xffff;
      const __m512i values = _mm512_maskz_loadu_epi16(mask, x + i * 2);
      check_.add(values);
      _mm512_store_si512(place(token, i), values);
    }
  }

  void clear(int token, int width) {
    for (int part = 0; part < parts_; ++part) {
      for (int i = 0; i < width; i += kStepValues)
        _mm512_store_si512(place(token, i) + part * kPart, _mm512_setzero_si512());
    }
  }

  bool too_small() const { return check_.too_small(); }

 private:
  std::uint16_t* place(int token, int i) const {
    return out_ + (token / kTileRows * steps_ + i / kStepValues) * kTileValues +
           token % kTileRows * kStepValues;
  }
  static HWY_INLINE __m512i pick_upper(__m512i low, __m512i high) {
    alignas(64) static constexpr std::uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                           23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                           45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(low, _mm512_load_si512(kOdd), high);
  }

  const int parts_;
  const int steps_;  ///< of 32 dims
  std::uint16_t* const out_;
  OperandCheck check_;
};

/// 16 rows of Q, `x` [16][width] values in the order of K's columns; a part is kQueryPart dwords behind the
/// one before.
inline constexpr int kQueryPart = kMaxRows * kTiledWidth / 2;
HWY_INLINE void pack_queries(const float* x, int width, int parts, OperandCheck& check, std::int32_t* out) {
  for (int i = 0; i < width; i += kLanes) {
    // A vector of 16 dims of each row makes eight rows of dwords.
    __m512i v[16];
    HALFTONE_UNROLL
    for (int r = 0; r < 16; ++r) v[r] = _mm512_loadu_si512(x + r * width + i);
    transpose_dwords(v);
    HALFTONE_UNROLL
    for (int pair = 0; pair < 8; ++pair) {
      store_parts(
          v[2 * pair], v[2 * pair + 1], parts, kQueryPart,
          [](__m512i a, __m512i b) HWY_ATTR { return pair_upper_halves(a, b); }, check,
          out + (i / 2 + pair) * kLanes);
    }
  }
}

/// Tiles of V.
class ValuePacker {
 public:
  static constexpr int kPart = kMaxDim * kSpanTokens;

  /// One part: values are rounded.
  ValuePacker(int dims, int parts, std::uint16_t* out) : dims_(dims), parts_(parts), out_(out) {}

  /// The tile of 16 tokens from `token` of the span on, bf16, a token at each of `rows`.
  HWY_INLINE void turn_bf16(int token, const std::uint8_t* const (&rows)[kTileTokens]) {
    for (int d = 0; d < dims_; d += kLanes) {
      __m512i v[16];
      HALFTONE_UNROLL
      for (int place = 0; place < 8; ++place) {
        const int pair = pair_at_place(place);
        const auto load = [&](int t) HWY_ATTR {
          return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[t] + d * 2)));
        };
        v[place] = _mm512_or_si512(load(2 * pair), _mm512_slli_epi32(load(2 * pair + 1), 16));
        check_.add(v[place]);
      }
      store(token, d, 0, v);
    }
  }

  /// The same of values, [token][dim].
  HWY_INLINE void turn_rows(int token, const float* x) {
    for (int d = 0; d < dims_; d += kLanes) {
      __m512i v[16], rest[16];
      HALFTONE_UNROLL
      for (int place = 0; place < 8; ++place) {
        const float* const first = x + 2 * pair_at_place(place) * dims_ + d;
        const __m512i low = _mm512_loadu_si512(first), high = _mm512_loadu_si512(first + dims_);
        if (parts_ == 1) {
          v[place] = rounded_pairs(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high));
        } else {
          v[place] = pair_upper_halves(low, high);
          rest[place] = rounded_pairs(left_of_upper_halves(low), left_of_upper_halves(high));
        }
        check_.add(v[place]);
      }
      store(token, d, 0, v);
      if (parts_ == 2) store(token, d, 1, rest);
    }
  }

  /// The same of a decoded tile in the order of its codes, the quads of a class.
  HWY_INLINE void turn_quads(int token, const float* x, const QuadClass& quads) {
    if (quads.word[0] < 0) return turn_single(token, x, quads);
    const __m512i order =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quads.shuffle.data())));
    for (std::size_t quad = 0; quad < quads.base.size(); ++quad) {
      std::uint16_t* const to = place(token, quads.first_dim[quad], 0);
      HALFTONE_UNROLL
      for (int w = 0; w < 4; ++w) {  // pairs w and w + 4 of four dims
        const float* from = x + quads.base[quad] + quads.word[w];
        const __m512i found = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + quads.second)), 1);
        const __m512i values = _mm512_permutexvar_epi32(order, found);
        const __m256i first = first_part(values);
        store_four(first, to + w * 4);
        if (parts_ == 2) store_four(rounded_values(left_of_upper_halves(values)), to + kPart + w * 4);
      }
    }
  }

  /// The same of a tile of 8-bit codes as they lie, of quads whose 16 are adjacent: the codes, or times
  /// `scale` [token] unless it is null.
  template <Element kElement>
  HWY_INLINE void turn_codes(int token, const std::uint8_t* codes, const QuadClass& quads,
                             const float* scale) {
    const __m512i order =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quads.shuffle.data())));
    __m512 scales[4];
    for (int w = 0; w < 4; ++w) {
      alignas(64) float of_tokens[kLanes];
      for (int i = 0; i < kLanes; ++i) of_tokens[i] = scale == nullptr ? 1.0f : scale[four_tokens(w)[i % 4]];
      scales[w] = _mm512_load_ps(of_tokens);
    }
    for (std::size_t quad = 0; quad < quads.base.size(); ++quad) {
      std::uint16_t* const to = place(token, quads.first_dim[quad], 0);
      HALFTONE_UNROLL
      for (int w = 0; w < 4; ++w) {
        VF found;
        Decoder<kElement>::load(codes + quads.base[quad] + quads.word[w], &found);
        const __m512 values = _mm512_mul_ps(_mm512_permutexvar_ps(order, found.raw), scales[w]);
        const __m256i rounded = rounded_values(values);
        check_.add(_mm512_broadcast_i64x4(rounded));
        store_four(rounded, to + w * 4);
      }
    }
  }

  /// A tile that no row sees.
  void clear(int token) {
    for (int part = 0; part < parts_; ++part) {
      for (int d = 0; d < dims_; ++d)
        _mm256_store_si256(reinterpret_cast<__m256i*>(place(token, d, part)), _mm256_setzero_si256());
    }
  }

  bool too_small() const { return check_.too_small(); }
  bool finite() const { return check_.finite(); }

  /// Where a part has the token that is `token`-th in the order of tiles.
  static int index(int token, int dim) {
    return (dim / kTileRows * kSpanSteps + token / kStepValues) * kTileValues +
           dim % kTileRows * kStepValues + token % kStepValues;
  }

 private:
  std::uint16_t* place(int token, int dim, int part) const { return out_ + part * kPart + index(token, dim); }

  /// Eight rows of pairs of 16 dims from `dim` on.
  HWY_INLINE void store(int token, int dim, int part, __m512i (&v)[16]) const {
    HALFTONE_UNROLL
    for (int i = 8; i < 16; ++i) v[i] = _mm512_setzero_si512();
    transpose_dwords(v);
    std::uint16_t* const to = place(token, dim, part);
    HALFTONE_UNROLL
    for (int d = 0; d < 16; ++d) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + d * kStepValues), _mm512_castsi512_si256(v[d]));
    }
  }

  HWY_INLINE __m256i first_part(__m512i values) {
    const __m256i first = parts_ == 1 ? rounded_values(_mm512_castsi512_ps(values))
                                      : _mm512_cvtepi32_epi16(_mm512_srli_epi32(values, 16));
    check_.add(_mm512_broadcast_i64x4(first));
    return first;
  }

  /// Four tokens of each of four dims.
  static HWY_INLINE void store_four(__m256i halves, std::uint16_t* to) {
    const __m128i low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), low);
    _mm_storeh_pd(reinterpret_cast<double*>(to + kStepValues), _mm_castsi128_pd(low));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * kStepValues), high);
    _mm_storeh_pd(reinterpret_cast<double*>(to + 3 * kStepValues), _mm_castsi128_pd(high));
  }

  void turn_single(int token, const float* x, const QuadClass& quads) {
    for (std::size_t quad = 0; quad < quads.base.size(); ++quad) {
      for (int d = 0; d < 4; ++d) {
        alignas(64) float values[kTileTokens];
        for (int t = 0; t < kTileTokens; ++t) {
          const int pair = pair_at_place(t / 2);
          values[t] = x[quads.base[quad] + quads.token[2 * pair + t % 2] + quads.dim[d]];
        }
        const __m512i found = _mm512_load_si512(values);
        const int dim = quads.first_dim[quad] + d;
        store_row(first_part(found), place(token, dim, 0));
        if (parts_ == 2) store_row(rounded_values(left_of_upper_halves(found)), place(token, dim, 1));
      }
    }
  }
  static HWY_INLINE void store_row(__m256i values, std::uint16_t* to) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), values);
  }

  const int dims_;
  const int parts_;
  std::uint16_t* const out_;
  OperandCheck check_;
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_TILE_OPERANDS_INL_H
