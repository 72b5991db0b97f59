#include "cpu/quantise.h"

#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/quantise.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/rounding-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

using F = hn::ScalableTag<float>;
using One = hn::CappedTag<float, 1>;
template <class D>
using Ints = hn::Vec<hn::RebindToSigned<D>>;

/// codec::round_to_int().
template <class D>
HWY_INLINE Ints<D> rounded(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  return hn::Sub(hn::BitCast(di, hn::Add(x, hn::Set(d, 12582912.0f))), hn::Set(di, 0x4b400000));
}

/// codec::e4m3_by_definition().
template <class D>
HWY_INLINE Ints<D> e4m3_bits(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, x);
  const auto a = hn::And(bits, hn::Set(di, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(di, 0x80));
  const auto odd = hn::And(hn::ShiftRight<20>(a), hn::Set(di, 1));
  const auto normal =
      hn::Sub(hn::ShiftRight<20>(hn::Add(a, hn::Add(odd, hn::Set(di, 0x7ffff)))), hn::Set(di, 120 << 3));
  const auto is_small = hn::Lt(a, hn::Set(di, 0x3c800000));
  const auto small = hn::BitCast(d, hn::IfThenElseZero(is_small, a));
  const auto finite = hn::IfThenElse(is_small, rounded(d, hn::Mul(small, hn::Set(d, 512.0f))), normal);
  const auto magnitude = hn::IfThenElse(hn::Lt(a, hn::Set(di, 0x43e00000)), finite, hn::Set(di, 0x7e));
  return hn::IfThenElse(hn::Gt(a, hn::Set(di, 0x7f800000)), hn::Set(di, 0x7f), hn::Or(sign, magnitude));
}

/// Codes of whole vectors from value `i` on; the first value that is left. `code`: of a vector, its integers,
/// which fit into Code::Type.
template <class D, class Code>
HWY_INLINE int store_codes(D d, const float* x, int i, int count, const Code& code, void* codes) {
  using Type = typename Code::Type;
  const hn::Rebind<Type, D> narrow;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::DemoteTo(narrow, code(d, hn::LoadU(d, x + i))), narrow, static_cast<Type*>(codes) + i);
  }
  return i;
}
template <class Code>
HWY_INLINE void store_codes(const float* x, int count, const Code& code, void* codes) {
  const int stored = store_codes(F(), x, 0, count, code, codes);
  store_codes(One(), x, stored, count, code, codes);
}

template <class D>
HWY_INLINE hn::Vec<D> limited(D d, hn::Vec<D> x, float low, float high) {
  return hn::Min(hn::Max(x, hn::Set(d, low)), hn::Set(d, high));
}

/// Codec::quantise() and, of 4 bits, the bias.
template <class Byte>
struct Integers {
  using Type = Byte;
  float min, inverse, low, high;
  int bias;
  template <class D>
  HWY_INLINE Ints<D> operator()(D d, hn::Vec<D> x) const {
    const hn::RebindToSigned<D> di;
    const auto steps = hn::Mul(hn::Sub(x, hn::Set(d, min)), hn::Set(d, inverse));
    return hn::Add(rounded(d, limited(d, steps, low, high)), hn::Set(di, bias));
  }
};
struct E4m3 {
  using Type = std::uint8_t;
  float inverse;
  template <class D>
  HWY_INLINE Ints<D> operator()(D d, hn::Vec<D> x) const {
    return e4m3_bits(d, hn::Mul(x, hn::Set(d, inverse)));
  }
};
template <DType kDType>
struct Halves {
  using Type = std::uint16_t;
  template <class D>
  HWY_INLINE Ints<D> operator()(D d, hn::Vec<D> x) const {
    if constexpr (kDType == DType::kBFloat16) {
      return bf16_bits(limited(d, x, -codec::kBf16Max, codec::kBf16Max));
    } else {
      return f16_bits(limited(d, x, -codec::kF16Max, codec::kF16Max));
    }
  }
};

void EncodeRow(DType dtype, bool asymmetric, const codec::Params& params, const float* x, int count,
               void* codes) {
  const float levels = codec::quantisation_levels(dtype, asymmetric);
  if (dtype == DType::kBFloat16) {
    store_codes(x, count, Halves<DType::kBFloat16>(), codes);
  } else if (dtype == DType::kFloat16) {
    store_codes(x, count, Halves<DType::kFloat16>(), codes);
  } else if (dtype == DType::kFloat8E4M3) {
    store_codes(x, count, E4m3{params.inverse}, codes);
  } else if (asymmetric) {
    store_codes(x, count, Integers<std::uint8_t>{params.min, params.inverse, 0.0f, levels, 0}, codes);
  } else if (dtype == DType::kInt4) {
    constexpr int kBias = codec::Codec<DType::kInt4>::kBias;
    store_codes(x, count, Integers<std::uint8_t>{0.0f, params.inverse, -levels, levels, kBias}, codes);
  } else {
    store_codes(x, count, Integers<std::int8_t>{0.0f, params.inverse, -levels, levels, 0}, codes);
  }
}

codec::Range RowRange(const float* x, int count) {
  codec::Range range;
  int i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128  // no vectors, and no infinities of all lanes
  const F d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto low = hn::Set(d, range.lo), high = hn::Set(d, range.hi);
  for (; i + lanes <= count; i += lanes) {
    const auto values = hn::LoadU(d, x + i);  // a NaN in the first operand leaves the second one
    low = hn::Min(values, low), high = hn::Max(values, high);
  }
  range = {hn::GetLane(hn::MinOfLanes(d, low)), hn::GetLane(hn::MaxOfLanes(d, high))};
#endif
  for (; i < count; ++i) range.include(x[i]);
  return range;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halftone::cpu {

HWY_EXPORT(EncodeRow);
HWY_EXPORT(RowRange);

codec::Range row_range(const float* x, int count) { return HWY_DYNAMIC_DISPATCH(RowRange)(x, count); }

void encode_row(DType dtype, bool asymmetric, const codec::Params& params, const float* x, int count,
                void* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeRow)(dtype, asymmetric, params, x, count, codes);
}

}  // namespace halftone::cpu
#endif  // HWY_ONCE
