// Blocked path, 16 bits: a rotated Q against K as integer codes, on AVX-512 with VNNI.
//
// A rotation leaves numbers of Q that no 16 bits hold, so that pairs of bf16 (key_pairs-inl.h) cannot take
// them. Before its factor they are sums of the values of bf16 of a row: fixed-point numbers of 24 bits hold
// these exactly unless the row has some that are far smaller than others. Such a number is three signed
// digits of 8 bits, and codes are unsigned bytes: one instruction multiplies four dims of each lane with a
// digit, three do what takes four in fp32. Sums of digits are exact and meet in fp32 once per group.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/attention/byte_products-inl.h"
#include "cpu/attention/int8_rows-inl.h"
#include "cpu/attention/key_products-inl.h"
#include "cpu/attention/tile_source-inl.h"
#include "format/hadamard.h"

#if defined(HALFTONE_CPU_ROTATED_KEYS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_ROTATED_KEYS_INL_H
#undef HALFTONE_CPU_ROTATED_KEYS_INL_H
#else
#define HALFTONE_CPU_ROTATED_KEYS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

inline constexpr int kQueryDigits = 3;

/// What meeting in fp32 costs is small beside the products of so many dims, not of fewer.
inline constexpr int kLeastDigitDims = 128;

/// Whether RotatedKeys serves a layer. A row has one exponent, so its dims are rotated as one block: else
/// those of a small block would lose digits to a large one.
inline bool takes_digits(const Layer& layer) {
  return layer.bf16_sums_q && layer.k.element >= Element::kI8 &&
         layer.head_dim >= kLeastDigitDims * layer.k.groups &&
         hadamard::block_size(layer.head_dim) == layer.head_dim;
}

/// What a group's sums are multiplied with before they meet its scale and min, which may be far above 1.
inline constexpr float kGroupUnit = 0x1p-16f;

/// Four tokens of K, as rows of `width` bytes, against V vectors of rows. q: [dword][digit][rows];
/// start: [group][digit][rows]. Digits after the first count 2^-8 each. With kScale as in score_groups().
template <int V, bool kScale, bool kMin>
HWY_INLINE void score_digits(const KeyGroups& groups, const std::uint8_t* k, int width, const float* q,
                             const std::int32_t* start, int rows, float* scores) {
  const F d;
  const I di;
  const int count = static_cast<int>(groups.map->groups.size());
  for (int g = 0; g < count; ++g) {
    VI acc[kQueryDigits][4][V];
    HALFTONE_UNROLL
    for (int i = 0; i < kQueryDigits * 4 * V; ++i) {
      const std::int32_t* const from = start + (g * kQueryDigits + i / (4 * V)) * rows + i % V * kLanes;
      acc[i / (4 * V)][i / V % 4][i % V] = hn::Load(di, from);
    }
    for (const KRange& range : groups.map->groups[g]) {
      for (int column = range.first; column < range.first + range.count; column += 4) {
        VI digits[kQueryDigits][V];
        HALFTONE_UNROLL
        for (int i = 0; i < kQueryDigits * V; ++i) {
          const float* const from = q + (column / 4 * kQueryDigits + i / V) * rows + i % V * kLanes;
          digits[i / V][i % V] = hn::BitCast(di, hn::Load(d, from));
        }
        HALFTONE_UNROLL
        for (int t = 0; t < 4; ++t) {
          std::int32_t codes;
          std::memcpy(&codes, k + t * width + column, sizeof codes);
          const VI x = hn::Set(di, codes);
          HALFTONE_UNROLL
          for (int i = 0; i < kQueryDigits * V; ++i) {
            VI& sum = acc[i / V][t][i % V];
            sum = add_byte_products(sum, x, digits[i / V][i % V]);
          }
        }
      }
    }
    HALFTONE_UNROLL
    for (int t = 0; t < 4; ++t) {
      VF dots[V];
      HALFTONE_UNROLL
      for (int v = 0; v < V; ++v) {
        const VF low = hn::ConvertTo(d, acc[2][t][v]), middle = hn::ConvertTo(d, acc[1][t][v]);
        const VF high = hn::MulAdd(middle, hn::Set(d, 0x1p-8f), hn::ConvertTo(d, acc[0][t][v]));
        dots[v] = hn::MulAdd(low, hn::Set(d, 0x1p-16f), high);
        if constexpr (kScale) dots[v] = hn::Mul(dots[v], hn::Set(d, kGroupUnit));
      }
      if constexpr (kScale) {
        add_group<V, kMin>(groups, t, g, rows, dots, scores);
      } else {
        HALFTONE_UNROLL
        for (int v = 0; v < V; ++v) hn::Store(dots[v], d, scores + t * rows + v * kLanes);
      }
    }
  }
}

/// Where takes_digits().
class RotatedKeys : public TileSource {
 public:
  static constexpr bool kCodes = true;
  static constexpr bool kBytes = true;
  static constexpr bool kSums = true;

  RotatedKeys(const Layer& layer, const Item& item, Scratch& scratch)
      : TileSource(layer, item, scratch),
        one_scale_(layer.k.groups == 1 && !layer.k.has_min),
        bias_(layer.k.element == Element::kI8   ? 128
              : layer.k.element == Element::kI4 ? 8
                                                : 0) {}

  void begin_queries(int rows) const {
    std::fill_n(s_.q, width() / 4 * kQueryDigits * rows, 0.0f);
    std::fill_n(starts(), groups() * kQueryDigits * rows, 0);
    std::fill_n(s_.codes.q_sums, groups() * rows, 0.0f);
    std::fill_n(s_.codes.q_scale, rows, 1.0f);
  }

  void take_query(const Strip& strip, int r) const {
    const int dims = width(), row = r - strip.first;
    alignas(64) float x[CodeScratch::kMaxWidth];
    const std::int16_t* const dim_of = layer_.maps->k.dims.data();
    for (int i = 0; i < dims; ++i) x[i] = dim_of[i] < 0 ? 0.0f : s_.row[dim_of[i]];
    const std::uint32_t largest = largest_bits(x, dims);
    if (largest >= 0x7f800000u) {  // an infinity or a NaN
      s_.codes.q_scale[r] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    const int exponent = exponent_of(largest);
    const float factor = hadamard::factor(hadamard::block_size(layer_.head_dim));
    s_.codes.q_scale[r] = std::ldexp(factor, (one_scale_ ? 16 : 32) - exponent);
    Digits digits;
    make_digits(x, exponent, digits);
    float* const q = s_.q + strip.first * (dims / 4) * kQueryDigits + row;
    for (int i = 0; i < dims / 4; ++i) {
      for (int digit = 0; digit < kQueryDigits; ++digit) {
        std::memcpy(q + (i * kQueryDigits + digit) * strip.rows, &digits.of[digit][4 * i], 4);
      }
    }
    store_sums(strip, row, digits);
  }

  void decode_k(float* out) const {
    decode_codes(out);
    // Added to a whole number, it leaves that and the bias in the low bits.
    const VF low_bits = hn::Set(F(), 0x1.8p23f + static_cast<float>(bias_));
    const int count = chunk_.tiles * kTileTokens * width();
    for (int i = 0; i < count; i += kLanes) {
      const VI code = hn::BitCast(I(), hn::Add(hn::Load(F(), out + i), low_bits));
      _mm_store_si128(reinterpret_cast<__m128i*>(s_.codes.k + i), _mm512_cvtepi32_epi8(code.raw));
    }
  }

  template <int C>
  HWY_INLINE void score_bytes_of(const Strip& strip, int token, int column, float* scores) const {
    constexpr int V = std::min(C, 2);
    const auto score = one_scale_         ? score_digits<V, false, false>
                       : layer_.k.has_min ? score_digits<V, true, true>
                                          : score_digits<V, true, false>;
    for (int at = column; at < column + C * kLanes; at += V * kLanes, scores += V * kLanes) {
      const KeyGroups params{&layer_.maps->k, s_.k_scale + token * groups(), s_.k_min + token * groups(),
                             s_.codes.q_sums + strip.first * groups() + at};
      score(params, s_.codes.k + token * width(), width(),
            s_.q + strip.first * (width() / 4) * kQueryDigits + at,
            starts() + strip.first * groups() * kQueryDigits + at, strip.rows, scores);
    }
  }

  HWY_INLINE VF scaled(VF dot, VF q_scale, int token) const {
    const VF product = hn::Mul(dot, q_scale);  // first: it is far larger than the product of the two scales
    return one_scale_ ? hn::Mul(product, hn::Set(F(), s_.k_scale[token])) : product;
  }

 private:
  /// Of a row, then zeros up to whole vectors of bytes.
  struct alignas(64) Digits {
    std::int8_t of[kQueryDigits][(CodeScratch::kMaxWidth + 63) / 64 * 64];
  };

  int groups() const { return layer_.k.groups; }
  std::int32_t* starts() const { return s_.codes.q; }
  static_assert(kMaxRows * kMaxGroups * kQueryDigits <= sizeof(CodeScratch::q) / 4);

  /// Of the power of two that makes `largest` a fixed-point number of at most 127 in each digit.
  static int exponent_of(std::uint32_t largest) {
    const int biased = std::max(1, static_cast<int>(largest >> 23));
    const std::uint32_t mantissa =
        (largest & 0x7fffffu) | 0x800000u;  // twice the number before it is rounded
    return 22 - (biased - 127) - (mantissa > 0xfefefeu ? 1 : 0);
  }

  void make_digits(const float* x, int exponent, Digits& digits) const {
    const hn::Rebind<std::int8_t, F> byte;
    for (int i = width(); i % (4 * kLanes) != 0; i += kLanes) {
      for (auto& of : digits.of) hn::Store(hn::Zero(byte), byte, of + i);
    }
    const VF factor = hn::Set(F(), std::ldexp(1.0f, std::min(exponent, 126)));
    const VF rest = hn::Set(F(), std::ldexp(1.0f, exponent - std::min(exponent, 126)));  // of subnormal rows
    for (int i = 0; i < width(); i += kLanes) {
      VI left = hn::NearestInt(hn::Mul(hn::Mul(hn::Load(F(), x + i), factor), rest));
      for (int digit = kQueryDigits - 1; digit >= 0; --digit) {
        const VI value = hn::ShiftRight<24>(hn::ShiftLeft<24>(left));
        left = hn::ShiftRight<8>(hn::Sub(left, value));
        hn::Store(hn::DemoteTo(byte, value), byte, digits.of[digit] + i);
      }
    }
  }

  /// Where the sums of each group begin, which takes back the bias of the codes, and what its min multiplies.
  void store_sums(const Strip& strip, int row, const Digits& digits) const {
    const I di;
    alignas(64) std::int32_t sums[kQueryDigits][(CodeScratch::kMaxWidth + 63) / 64 * kLanes];  // of four dims
    for (int i = 0; i < width(); i += 4 * kLanes) {
      for (int digit = 0; digit < kQueryDigits; ++digit) {
        const VI four{_mm512_load_si512(&digits.of[digit][i])};
        hn::Store(add_byte_products(hn::Zero(di), hn::Set(di, 0x01010101), four), di, &sums[digit][i / 4]);
      }
    }
    for (int g = 0; g < groups(); ++g) {
      std::int32_t sum[kQueryDigits] = {};
      for (const KRange& range : layer_.maps->k.groups[g]) {
        for (int i = range.first / 4; i < (range.first + range.count) / 4; ++i) {
          for (int digit = 0; digit < kQueryDigits; ++digit) sum[digit] += sums[digit][i];
        }
      }
      const int at = strip.first * groups() + g * strip.rows;
      std::int32_t* const start = starts() + at * kQueryDigits + row;
      for (int digit = 0; digit < kQueryDigits; ++digit) start[digit * strip.rows] = -bias_ * sum[digit];
      s_.codes.q_sums[at + row] =
          static_cast<float>(std::int64_t{sum[0]} * 65536 + sum[1] * 256 + sum[2]) * 0x1p-16f * kGroupUnit;
    }
  }

  const bool one_scale_;  ///< one symmetric scale per token, which multiplies a logit
  const int bias_;        ///< what makes a code unsigned
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_ROTATED_KEYS_INL_H
