// The instruction that multiplies pairs of bf16, AVX-512 with BF16, and what keeps its sums those of fp32.

#include <bit>

#include "cpu/attention/vec-inl.h"
#include "cpu/rounding-inl.h"

#if defined(HALFTONE_CPU_PAIR_PRODUCTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_PAIR_PRODUCTS_INL_H
#undef HALFTONE_CPU_PAIR_PRODUCTS_INL_H
#else
#define HALFTONE_CPU_PAIR_PRODUCTS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// bf16 from 2^-56 on are multiples of 2^-63, so that their products, and all sums of those however they are
/// rounded, are multiples of 2^-126: none is subnormal. The upper half of the least one's dword.
inline constexpr std::int32_t kLeastFactor = 0x2380;

/// The same for weights in fp32, and for sums that go on: multiples of 2^-123 from there on.
inline constexpr float kLeastWeight = 0x1p-56f;
inline constexpr float kLeastSum = 0x1p-100f;

/// A weight of the softmax as the value of a bf16, ties to even; 0 below kLeastWeight.
HWY_INLINE VF bf16_weight(VF p) {
  const F d;
  const VF rounded = hn::BitCast(d, hn::And(bf16_in_upper_halves(p), hn::Set(I(), -0x10000)));
  return hn::IfThenZeroElse(hn::Lt(p, hn::Set(d, kLeastWeight)), rounded);
}

/// A sum that goes on: 0 below kLeastSum.
HWY_INLINE VF without_traces(VF sum) {
  return hn::IfThenZeroElse(hn::Lt(hn::Abs(sum), hn::Set(F(), kLeastSum)), sum);
}

#if HWY_TARGET == HWY_AVX3_DL

/// Adds to each lane the product of the upper halves, then that of the lower ones.
HWY_INLINE VF add_pair_products(VF sum, VI a, VI b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
}

/// Whether this processor has the instruction, and rounds and orders its sums as we need it.
inline bool has_pair_products() {
  if (__builtin_cpu_supports("avx512bf16") == 0) return false;
  const VF large = hn::Set(F(), 0x1p24f);
  const auto pair = [](float upper, float lower) HWY_ATTR {
    return hn::Set(I(), static_cast<std::int32_t>((std::bit_cast<std::uint32_t>(upper) & 0xffff0000u) |
                                                  std::bit_cast<std::uint32_t>(lower) >> 16));
  };
  // 2^24 + 1 rounds to 2^24: twice, and before 2^24 is taken away.
  const VF twice = add_pair_products(large, pair(1.0f, 1.0f), pair(1.0f, 1.0f));
  const VF order = add_pair_products(large, pair(1.0f, -0x1p24f), pair(1.0f, 1.0f));
  return hn::GetLane(twice) == 0x1p24f && hn::GetLane(order) == 0.0f;
}

/// Whether numbers were met that products of bf16 cannot take, whose instructions make zeros of subnormal
/// numbers and sums; and whether some that are not finite were.
class OperandCheck {
 public:
  HWY_INLINE OperandCheck() : most_(_mm512_setzero_si512()), least_(_mm512_set1_epi16(-1)) {}

  /// bf16 that count.
  HWY_INLINE void add(__m512i values) {
    const __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
    most_ = _mm512_max_epu16(most_, magnitude);
    least_ = _mm512_min_epu16(least_, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
  }
  bool too_small() const {
    return _mm512_cmplt_epu16_mask(least_, _mm512_set1_epi16(static_cast<short>(kLeastFactor - 1))) != 0;
  }
  bool finite() const { return _mm512_cmpge_epu16_mask(most_, _mm512_set1_epi16(0x7f80)) == 0; }

 private:
  __m512i most_;   ///< magnitudes
  __m512i least_;  ///< likewise, less 1: zeros are the largest
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_PAIR_PRODUCTS_INL_H
