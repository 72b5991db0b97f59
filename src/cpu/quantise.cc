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

/// codec::e4m3_by_definition().
template <class V>
HWY_INLINE auto e4m3_bits(V x) {
  const hn::DFromV<V> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto bits = hn::BitCast(di, x);
  const auto a = hn::And(bits, hn::Set(di, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(di, 0x80));
  const auto odd = hn::And(hn::ShiftRight<20>(a), hn::Set(di, 1));
  const auto normal =
      hn::Sub(hn::ShiftRight<20>(hn::Add(a, hn::Add(odd, hn::Set(di, 0x7ffff)))), hn::Set(di, 120 << 3));
  const auto is_small = hn::Lt(a, hn::Set(di, 0x3c800000));
  const auto small = hn::BitCast(d, hn::IfThenElseZero(is_small, a));
  const auto finite = hn::IfThenElse(is_small, round_to_int(hn::Mul(small, hn::Set(d, 512.0f))), normal);
  const auto magnitude = hn::IfThenElse(hn::Lt(a, hn::Set(di, 0x43e00000)), finite, hn::Set(di, 0x7e));
  return hn::IfThenElse(hn::Gt(a, hn::Set(di, 0x7f800000)), hn::Set(di, 0x7f), hn::Or(sign, magnitude));
}

template <class V>
HWY_INLINE V limited(V x, float low, float high) {
  const hn::DFromV<V> d;
  return hn::Min(hn::Max(x, hn::Set(d, low)), hn::Set(d, high));
}

/// Codec::quantise() and, of 4 bits, the bias.
template <class Byte>
struct Integers {
  using Type = Byte;
  float min, inverse, low, high;
  int bias;
  template <class V>
  HWY_INLINE auto operator()(V x) const {
    const hn::DFromV<V> d;
    const auto steps = hn::Mul(hn::Sub(x, hn::Set(d, min)), hn::Set(d, inverse));
    return hn::Add(round_to_int(limited(steps, low, high)), hn::Set(hn::RebindToSigned<decltype(d)>(), bias));
  }
};
struct E4m3 {
  using Type = std::uint8_t;
  float inverse;
  template <class V>
  HWY_INLINE auto operator()(V x) const {
    return e4m3_bits(hn::Mul(x, hn::Set(hn::DFromV<V>(), inverse)));
  }
};
template <DType kDType>
struct Halves {
  using Type = std::uint16_t;
  template <class V>
  HWY_INLINE auto operator()(V x) const {
    if constexpr (kDType == DType::kBFloat16) {
      return bf16_bits(limited(x, -codec::kBf16Max, codec::kBf16Max));
    } else {
      return f16_bits(limited(x, -codec::kF16Max, codec::kF16Max));
    }
  }
};

template <class Code>
HWY_INLINE void store_codes(const float* x, int count, const Code& code, void* codes) {
  store_narrow(x, count, code, static_cast<typename Code::Type*>(codes));
}

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
  const hn::ScalableTag<float> d;
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
