// Vector building blocks: decoders of every element, exp, tanh, reductions. Compiled once per target.

#include <cstdint>

#include "cpu/attention/layer.h"
#include "hwy/highway.h"
#include "plan/merge.h"

#if defined(HALFTONE_CPU_VEC_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_VEC_INL_H
#undef HALFTONE_CPU_VEC_INL_H
#else
#define HALFTONE_CPU_VEC_INL_H
#endif

// Loops over arrays of vectors must unroll completely, or the vectors live in memory.
#ifdef __clang__
#define HALFTONE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HALFTONE_UNROLL _Pragma("GCC unroll 32")
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, kMaxLanes>;
using I = hn::RebindToSigned<F>;
using VF = hn::Vec<F>;
using VI = hn::Vec<I>;
#if HWY_TARGET == HWY_SCALAR
inline constexpr int kLanes = 1;
#else
inline constexpr int kLanes = static_cast<int>(HWY_MAX_BYTES / 4 < kMaxLanes ? HWY_MAX_BYTES / 4 : kMaxLanes);
#endif
/// Accumulators that fit into registers beside operands: 32 registers with AVX-512 and NEON, else 16.
inline constexpr int kAccumulators = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON ? 16 : 8;

// --- Decoders: kPlanes vectors of N codes from one slice
// --------------------------------------------------------

/// f16 as f32. Where no instruction does it, Highway makes infinities and NaNs finite; here the exponent is
/// moved by a product, which is exact, and is that of an infinity where it was.
static HWY_INLINE VF from_half(hn::Vec<hn::Rebind<hwy::float16_t, F>> x) {
#if (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2) || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  const hn::RebindToUnsigned<F> word;
  const auto bits = hn::PromoteTo(word, hn::BitCast(hn::Rebind<std::uint16_t, F>(), x));
  const auto magnitude = hn::And(bits, hn::Set(word, 0x7fffu));
  const auto value = hn::Mul(hn::BitCast(F(), hn::ShiftLeft<13>(magnitude)), hn::Set(F(), 0x1p112f));
  const auto finite = hn::Lt(hn::BitCast(I(), magnitude), hn::Set(I(), 0x7c00));
  const auto special = hn::IfThenZeroElse(hn::RebindMask(word, finite), hn::Set(word, 0x7f800000u));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(word, 0x8000u)));
  return hn::BitCast(F(), hn::Or(hn::BitCast(word, value), hn::Or(special, sign)));
#else
  return hn::PromoteTo(F(), x);
#endif
}

template <Element kElement>
struct Decoder;

template <>
struct Decoder<Element::kF32> {
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    out[0] = hn::LoadU(F(), reinterpret_cast<const float*>(p));
  }
};

template <>
struct Decoder<Element::kF16> {
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    const hn::Rebind<hwy::float16_t, F> half;
    out[0] = from_half(hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(p)));
  }
};

template <>
struct Decoder<Element::kBF16> {
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    const hn::Rebind<std::uint16_t, F> half;
    const hn::RebindToUnsigned<F> word;
    const auto wide = hn::PromoteTo(word, hn::LoadU(half, reinterpret_cast<const std::uint16_t*>(p)));
    out[0] = hn::BitCast(F(), hn::ShiftLeft<16>(wide));
  }
};

/// The exponent and mantissa bits, moved to those of an f16, give the value times 2^-8 (subnormals too). 0x7f
/// is the only pattern that carries into bit 14 when its last bit is added: setting that bit makes it an f16
/// NaN.
template <>
struct Decoder<Element::kE4M3> {
  static constexpr float kUnit = 256.0f;  ///< codes are this many times too small
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    const hn::Rebind<std::uint16_t, F> word;
    const hn::Rebind<std::uint8_t, F> byte;
    const hn::Rebind<hwy::float16_t, F> half;
    const auto code = hn::PromoteTo(word, hn::LoadU(byte, p));
    const auto magnitude = hn::ShiftLeft<7>(hn::And(code, hn::Set(word, std::uint16_t{0x7f})));
    const auto sign = hn::ShiftLeft<8>(hn::And(code, hn::Set(word, std::uint16_t{0x80})));
    const auto nan =
        hn::And(hn::Add(magnitude, hn::Set(word, std::uint16_t{0x80})), hn::Set(word, std::uint16_t{0x4000}));
    out[0] = from_half(hn::BitCast(half, hn::Or(hn::Or(magnitude, sign), nan)));
  }
};

template <>
struct Decoder<Element::kI8> {
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    const hn::Rebind<std::int8_t, F> byte;
    const auto code = hn::LoadU(byte, reinterpret_cast<const std::int8_t*>(p));
    out[0] = hn::ConvertTo(F(), hn::PromoteTo(I(), code));
  }
};

template <>
struct Decoder<Element::kU8> {
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    const hn::Rebind<std::uint8_t, F> byte;
    out[0] = hn::ConvertTo(F(), hn::PromoteTo(I(), hn::LoadU(byte, p)));
  }
};

/// The high nibbles stay where they are, so the second plane is kHighNibble times too large: a shift would
/// compete with the multiply-adds for execution ports.
inline constexpr int kHighNibble = 16;

template <>
struct Decoder<Element::kU4> {
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    const hn::Rebind<std::uint8_t, F> byte;
    const VI code = hn::PromoteTo(I(), hn::LoadU(byte, p));
    out[0] = hn::ConvertTo(F(), hn::And(code, hn::Set(I(), 15)));
    out[1] = hn::ConvertTo(F(), hn::And(code, hn::Set(I(), 15 * kHighNibble)));
  }
};

template <>
struct Decoder<Element::kI4> {
  static HWY_INLINE void load(const std::uint8_t* p, VF* out) {
    const hn::Rebind<std::uint8_t, F> byte;
    const VI code = hn::PromoteTo(I(), hn::LoadU(byte, p));
    const VI low = hn::And(code, hn::Set(I(), 15)), high = hn::And(code, hn::Set(I(), 15 * kHighNibble));
    out[0] = hn::ConvertTo(F(), hn::Sub(low, hn::Set(I(), 8)));
    out[1] = hn::ConvertTo(F(), hn::Sub(high, hn::Set(I(), 8 * kHighNibble)));
  }
};

/// What all codes of an element must be multiplied with besides their scale.
constexpr float code_unit(Element element) {
  return element == Element::kE4M3 ? Decoder<Element::kE4M3>::kUnit : 1.0f;
}
/// Likewise for the codes of one plane.
constexpr float plane_unit(int plane) { return plane == 0 ? 1.0f : 1.0f / kHighNibble; }

// --- Functions

/// e^x for x <= 0, to about one unit in the last place; 0 below -87.3 (the smallest normal number), NaN for
/// NaN. 2^n * e^r with |r| <= ln(2)/2 and a polynomial of degree 6 (relative error 1e-8).
HWY_INLINE VF exp_nonpositive(VF x) {
  const F d;
  const VF n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504088896341f)));
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440054690583e-4f), r);
  VF y = hn::Set(d, 1.3926183588e-03f);
  y = hn::MulAdd(y, r, hn::Set(d, 8.3631790527e-03f));
  y = hn::MulAdd(y, r, hn::Set(d, 4.1666554617e-02f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.6666576990e-01f));
  y = hn::MulAdd(y, r, hn::Set(d, 0.5f));
  y = hn::Add(hn::MulAdd(hn::Mul(r, r), y, r), hn::Set(d, 1.0f));
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  const VF power{_mm512_scalef_ps(y.raw, n.raw)};
#else
  const VI exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(I(), n), hn::Set(I(), 127)));
  const VF power = hn::Mul(y, hn::BitCast(d, exponent));
#endif
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)), power);
}

/// tanh to a few units in the last place: an odd polynomial up to 0.625, 1 - 2 / (e^2|x| + 1) beyond.
HWY_INLINE VF tanh_of(VF x) {
  const F d;
  const VF a = hn::Abs(x);
  const VF z = hn::Mul(x, x);
  VF p = hn::Set(d, 2.2924763093e-03f);
  p = hn::MulAdd(p, z, hn::Set(d, -8.3436560877e-03f));
  p = hn::MulAdd(p, z, hn::Set(d, 2.1768805103e-02f));
  p = hn::MulAdd(p, z, hn::Set(d, -5.3959240062e-02f));
  p = hn::MulAdd(p, z, hn::Set(d, 1.3333303420e-01f));
  p = hn::MulAdd(p, z, hn::Set(d, -3.3333333169e-01f));
  const VF near = hn::MulAdd(hn::Mul(p, z), x, x);
  const VF e = exp_nonpositive(hn::Mul(a, hn::Set(d, -2.0f)));
  const VF one = hn::Set(d, 1.0f);
  const VF far = hn::CopySignToAbs(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  return hn::IfThenElse(hn::Gt(a, hn::Set(d, 0.625f)), far, near);
}

/// The four results of reducing v[0] to v[3] over their lanes with `op`: the first values of out [kMaxLanes].
template <class Op>
HWY_INLINE void reduce_four(const VF* v, [[maybe_unused]] Op op, float* out) {
  const F d;
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) hn::StoreU(v[i], d, out + i);
#else
  const hn::RepartitionToWide<F> pair;
  const VF a = op(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  const VF b = op(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));
  const auto low = hn::InterleaveLower(pair, hn::BitCast(pair, a), hn::BitCast(pair, b));
  const auto high = hn::InterleaveUpper(pair, hn::BitCast(pair, a), hn::BitCast(pair, b));
  VF x = op(hn::BitCast(d, low), hn::BitCast(d, high));  // in every block of 128 bits
  if constexpr (kLanes >= 16) x = op(x, hn::ConcatLowerUpper(d, x, x));
  if constexpr (kLanes >= 8) x = op(x, hn::SwapAdjacentBlocks(x));
  hn::StoreU(x, d, out);
#endif
}

struct MaxOp {
  HWY_INLINE VF operator()(VF a, VF b) const { return hn::Max(a, b); }
};
struct AddOp {
  HWY_INLINE VF operator()(VF a, VF b) const { return hn::Add(a, b); }
};

/// The sums over lanes of 16 vectors, in two steps. First, of each four vectors: per block of 128 bits, four
/// partial sums, kBlockSums floats.
inline constexpr int kBlockSums = kLanes < 4 ? 4 : kLanes;
HWY_INLINE void store_block_sums(const VF* v, float* out) {
  const F d;
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) hn::StoreU(v[i], d, out + i);
#else
  const hn::RepartitionToWide<F> pair;
  const VF a = hn::Add(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  const VF b = hn::Add(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));
  const auto low = hn::InterleaveLower(pair, hn::BitCast(pair, a), hn::BitCast(pair, b));
  const auto high = hn::InterleaveUpper(pair, hn::BitCast(pair, a), hn::BitCast(pair, b));
  hn::Store(hn::Add(hn::BitCast(d, low), hn::BitCast(d, high)), d, out);
#endif
}

/// Then, of four such results, 16 sums.
HWY_INLINE void store_sums(const float* blocks, float* out) {
  const F d;
#if HWY_TARGET == HWY_SCALAR || HWY_MAX_BYTES == 16
  for (int i = 0; i < 16; i += kLanes) hn::StoreU(hn::Load(d, blocks + i), d, out + i);
#else
  const VF v0 = hn::Load(d, blocks), v1 = hn::Load(d, blocks + kLanes);
  const VF v2 = hn::Load(d, blocks + 2 * kLanes), v3 = hn::Load(d, blocks + 3 * kLanes);
  if constexpr (kLanes == 8) {
    hn::StoreU(hn::Add(hn::ConcatLowerLower(d, v1, v0), hn::ConcatUpperUpper(d, v1, v0)), d, out);
    hn::StoreU(hn::Add(hn::ConcatLowerLower(d, v3, v2), hn::ConcatUpperUpper(d, v3, v2)), d, out + 8);
  } else {
    // Blocks of a: v0 twice, v2 twice; of b: v1, v3.
    const VF a = hn::Add(hn::ConcatLowerLower(d, v2, v0), hn::ConcatUpperUpper(d, v2, v0));
    const VF b = hn::Add(hn::ConcatLowerLower(d, v3, v1), hn::ConcatUpperUpper(d, v3, v1));
    const VF even = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
    const VF odd = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
    hn::StoreU(hn::Add(even, odd), d, out);
  }
#endif
}

/// `count` scales or mins, a multiple of 16, times `factor`.
HWY_INLINE void load_params(bool f32, const std::uint8_t* p, int count, float factor, float* out) {
  const VF unit = hn::Set(F(), factor);
  for (int i = 0; i < count; i += kLanes) {
    VF x;
    if (f32) {
      Decoder<Element::kF32>::load(p + i * 4, &x);
    } else {
      Decoder<Element::kF16>::load(p + i * 2, &x);
    }
    hn::StoreU(hn::Mul(x, unit), F(), out + i);
  }
}

/// Scales and mins of one tile of `side`, 16 * groups each; static ones were filled in before.
HWY_INLINE void load_tile_params(const Side& side, const std::uint8_t* params, float* scale, float* min) {
  if (!side.stored_params) return;
  const int count = kTileTokens * side.groups;
  load_params(side.f32_params, params, count, code_unit(side.element), scale);
  if (side.has_min)
    load_params(side.f32_params, params + count * (side.f32_params ? 4 : 2), count, 1.0f, min);
}

/// What every logit goes through after q.k: scale, softcap, ALiBi.
struct ScoreTransform {
  explicit HWY_INLINE ScoreTransform(const Layer& layer)
      : scale(layer.plan->scale), softcap(layer.plan->problem.softcap), alibi(layer.plan->problem.alibi) {}

  HWY_INLINE bool only_multiplies() const { return softcap <= 0 && !alibi; }
  /// The order of logits is that of dots.
  HWY_INLINE bool only_scales() const { return only_multiplies() && scale > 0; }

  HWY_INLINE VF apply(VF dot, VF slope, VI position, VI token) const {
    const F d;
    VF x = hn::Mul(dot, hn::Set(d, scale));
    if (softcap > 0) x = hn::Mul(tanh_of(hn::Div(x, hn::Set(d, softcap))), hn::Set(d, softcap));
    if (alibi) {
      x = hn::NegMulAdd(slope, hn::ConvertTo(d, hn::Abs(hn::Sub(position, token))), x);
    }
    return x;
  }

  float scale;
  float softcap;
  bool alibi;
};

/// `max`, or x if it is larger: a NaN is never a maximum.
HWY_INLINE VF larger(VF x, VF max) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  return hn::Max(x, max);  // of a NaN and a number the second one
#else
  return hn::IfThenElse(hn::Gt(x, max), x, max);
#endif
}

/// A maximum, or 0 where there is none.
HWY_INLINE VF shift_of(VF max) {
  return hn::IfThenZeroElse(hn::Eq(max, hn::Set(F(), planning::kMinusInfinity)), max);
}

/// Keys [begin, end) that rows see.
struct SeenKeys {
  VI begin;
  VI end;

  /// Logits of tokens, or -inf where the row does not see the token, or none does.
  HWY_INLINE VF masked(VF logit, VI token, bool excluded) const {
    const VF minus_infinity = hn::Set(F(), planning::kMinusInfinity);
    if (excluded) return minus_infinity;
    const auto sees = hn::AndNot(hn::Lt(token, begin), hn::Lt(token, end));
    return hn::IfThenElse(hn::RebindMask(F(), sees), logit, minus_infinity);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_VEC_INL_H
