// Rounding of fp32 to narrower types, in vectors of any length: the bits of codec.h on every target.

#include "hwy/highway.h"

#if defined(HALFTONE_CPU_ROUNDING_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_ROUNDING_INL_H
#undef HALFTONE_CPU_ROUNDING_INL_H
#else
#define HALFTONE_CPU_ROUNDING_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// codec::round_to_int().
template <class V>
HWY_INLINE auto round_to_int(V x) {
  const hn::DFromV<V> d;
  const hn::RebindToSigned<decltype(d)> di;
  return hn::Sub(hn::BitCast(di, hn::Add(x, hn::Set(d, 12582912.0f))), hn::Set(di, 0x4b400000));
}

/// The nearest bf16, ties to even, in the upper halves of lanes, whose lower halves may hold anything. Not of
/// NaN.
template <class V>
HWY_INLINE auto bf16_in_upper_halves(V x) {
  const hn::RebindToSigned<hn::DFromV<V>> di;
  const auto bits = hn::BitCast(di, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 1));
  return hn::Add(bits, hn::Add(odd, hn::Set(di, 0x7fff)));
}

/// codec::bf16_from_f32(), an integer in each lane.
template <class V>
HWY_INLINE auto bf16_bits(V x) {
  const hn::RebindToSigned<hn::DFromV<V>> di;
  const auto magnitude = hn::And(hn::BitCast(di, x), hn::Set(di, 0x7fffffff));
  const auto rounded = hn::And(hn::ShiftRight<16>(bf16_in_upper_halves(x)), hn::Set(di, 0xffff));
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7f800000)), hn::Set(di, 0x7fff), rounded);
}

/// codec::f16_from_f32(), likewise. Highway's own conversion cuts off where there is no instruction for it.
template <class V>
HWY_INLINE auto f16_bits(V x) {
  const hn::DFromV<V> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto bits = hn::BitCast(di, x);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 0x8000));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, hn::Set(di, 0xfff - (112 << 23))), odd));
  // Below 2^-14 the step is 2^-24.
  const auto tiny = round_to_int(hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p24f)));
  const auto finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)), tiny, normal);
  const auto rounded =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x477ff000)), finite, hn::Set(di, 0x7c00));
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7f800000)), hn::Set(di, 0x7fff),
                        hn::Or(sign, rounded));
}

/// Stores what `bits_of` makes of values [i, count), integers that fit into Type, as far as there are whole
/// vectors of `D`. Returns the first one that is left.
template <class D, class BitsOf, class Type>
HWY_INLINE int store_vectors(D d, const float* values, int i, int count, const BitsOf& bits_of, Type* out) {
  const hn::Rebind<Type, D> narrow;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (; i + lanes <= count; i += lanes)
    hn::StoreU(hn::DemoteTo(narrow, bits_of(hn::LoadU(d, values + i))), narrow, out + i);
  return i;
}
/// Of all values.
template <class BitsOf, class Type>
HWY_INLINE void store_narrow(const float* values, int count, const BitsOf& bits_of, Type* out) {
  const int stored = store_vectors(hn::ScalableTag<float>(), values, 0, count, bits_of, out);
  store_vectors(hn::CappedTag<float, 1>(), values, stored, count, bits_of, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_ROUNDING_INL_H
