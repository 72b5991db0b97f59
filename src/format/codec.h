// Codecs: how a float becomes a code of a cache and back, for every element type, with the same bits on CPU
// and GPU.
//
// All arithmetic is fp32, round to nearest even, one operation at a time: hosts compile with
// -ffp-contract=off and devices go through the __f*_rn intrinsics below (never compile with -ftz=true or
// -use_fast_math). A fused multiply-add happens only where ht_fma says so.
//
// Quantisation of one scale group, the values that share one scale:
//   symmetric    scale = absmax / L          code = clamp(rint(x * (1 / scale)))           x' = code * scale
//   asymmetric   scale = (max - min) / L     code = clamp(rint((x - min) * (1 / scale)))   x' = fma(code,
//   scale, min)
// L is 127 (int8), 7 (int4) and 448 (e4m3) if symmetric, 255 (int8) and 15 (int4) if asymmetric. Scale and
// min are first rounded to the dtype in which they are stored, and the rounded ones quantise, so a reader
// sees the same numbers. A group without extent has 0 for 1 / scale (Params::inverse). Sources: see KvFormat.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "format/host_device.h"
#include "halftone/format.h"

namespace halftone::codec {

// --- Arithmetic that no compiler may contract or reorder
// -------------------------------------------------------------

#ifdef __CUDA_ARCH__
HT_HOST_DEVICE inline float ht_mul(float a, float b) { return __fmul_rn(a, b); }
HT_HOST_DEVICE inline float ht_add(float a, float b) { return __fadd_rn(a, b); }
HT_HOST_DEVICE inline float ht_sub(float a, float b) { return __fsub_rn(a, b); }
HT_HOST_DEVICE inline float ht_div(float a, float b) { return __fdiv_rn(a, b); }
HT_HOST_DEVICE inline float ht_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HT_HOST_DEVICE inline std::uint32_t bits_of(float x) { return __float_as_uint(x); }
HT_HOST_DEVICE inline float float_of(std::uint32_t b) { return __uint_as_float(b); }
#else
HT_HOST_DEVICE inline float ht_mul(float a, float b) { return a * b; }
HT_HOST_DEVICE inline float ht_add(float a, float b) { return a + b; }
HT_HOST_DEVICE inline float ht_sub(float a, float b) { return a - b; }
HT_HOST_DEVICE inline float ht_div(float a, float b) { return a / b; }
HT_HOST_DEVICE inline float ht_fma(float a, float b, float c) { return std::fma(a, b, c); }
HT_HOST_DEVICE inline std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
HT_HOST_DEVICE inline float float_of(std::uint32_t b) { return std::bit_cast<float>(b); }
#endif

HT_HOST_DEVICE inline float ht_abs(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
HT_HOST_DEVICE inline bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

/// x limited to [lo, hi]; NaN becomes lo. A zero may get either sign.
HT_HOST_DEVICE inline float clamp(float x, float lo, float hi) {
#ifdef __CUDA_ARCH__
  return fminf(fmaxf(x, lo), hi);
#else
  const float above = x > lo ? x : lo;
  return above < hi ? above : hi;
#endif
}

/// rint(x) for |x| <= 2^22: adding 1.5 * 2^23 leaves the rounded integer in the low mantissa bits.
HT_HOST_DEVICE inline int round_to_int(float x) {
  return static_cast<int>(bits_of(ht_add(x, 12582912.0f))) - 0x4b400000;
}

// --- Element types
// -----------------------------------------------------------------------------------------------------

inline constexpr float kF16Max = 65504.0f;
inline constexpr float kBf16Max = 3.38953138925153547590e38f;
inline constexpr float kE4m3Max = 448.0f;

// Each conversion has one definition in integer arithmetic. Devices use the instruction that gives the same
// bits; tests/cuda/codec_device_test.cu compares the two on all 2^32 inputs.

/// IEEE binary16, round to nearest even, overflow to infinity. Every NaN becomes 0x7fff.
HT_HOST_DEVICE inline std::uint16_t f16_by_definition(float x) {
  const std::uint32_t b = bits_of(x), a = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
  const std::uint32_t normal = (a + 0xfffu + (a >> 13 & 1u) - (112u << 23)) >> 13;
  const float small = float_of(a < 0x38800000u ? a : 0u);  // below 2^-14 the step is 2^-24
  const std::uint32_t tiny = static_cast<std::uint32_t>(round_to_int(ht_mul(small, 16777216.0f)));
  const std::uint32_t finite = a < 0x38800000u ? tiny : normal;
  const std::uint32_t magnitude = a >= 0x477ff000u ? 0x7c00u : finite;
  return static_cast<std::uint16_t>(a > 0x7f800000u ? 0x7fffu : sign | magnitude);
}
HT_HOST_DEVICE inline std::uint16_t f16_from_f32(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  std::uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  return f16_by_definition(x);
#endif
}

HT_HOST_DEVICE inline float f32_from_f16(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, a = h & 0x7fffu;
  const std::uint32_t tiny = bits_of(ht_mul(static_cast<float>(static_cast<int>(a & 0x3ffu)), 0x1p-24f));
  const std::uint32_t normal = (a << 13) + (112u << 23);
  const std::uint32_t special = 0x7f800000u | a << 13;
  return float_of(sign | (a < 0x400u ? tiny : a < 0x7c00u ? normal : special));
}

/// bfloat16, round to nearest even, overflow to infinity. Every NaN becomes 0x7fff.
HT_HOST_DEVICE inline std::uint16_t bf16_by_definition(float x) {
  const std::uint32_t b = bits_of(x);
  const std::uint32_t rounded = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
  return static_cast<std::uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}
HT_HOST_DEVICE inline std::uint16_t bf16_from_f32(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  std::uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  return bf16_by_definition(x);
#endif
}

HT_HOST_DEVICE inline float f32_from_bf16(std::uint16_t h) { return float_of(std::uint32_t{h} << 16); }

/// OCP E4M3, round to nearest even, saturating at +-448 (infinities too). Every NaN becomes 0x7f.
HT_HOST_DEVICE inline std::uint8_t e4m3_by_definition(float x) {
  const std::uint32_t b = bits_of(x), a = b & 0x7fffffffu, sign = b >> 24 & 0x80u;
  const std::uint32_t normal = ((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3);
  const float small = float_of(a < 0x3c800000u ? a : 0u);  // below 2^-6 the step is 2^-9
  const std::uint32_t tiny = static_cast<std::uint32_t>(round_to_int(ht_mul(small, 512.0f)));
  const std::uint32_t finite = a < 0x3c800000u ? tiny : normal;
  const std::uint32_t magnitude = a >= 0x43e00000u ? 0x7eu : finite;
  return static_cast<std::uint8_t>(a > 0x7f800000u ? 0x7fu : sign | magnitude);
}
HT_HOST_DEVICE inline std::uint8_t e4m3_from_f32(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<std::uint8_t>(pair);
#else
  return e4m3_by_definition(x);
#endif
}

/// 0x7f and 0xff decode to NaN.
HT_HOST_DEVICE inline float f32_from_e4m3(std::uint8_t e) {
  const std::uint32_t sign = (e & 0x80u) << 24, a = e & 0x7fu;
  const std::uint32_t tiny = bits_of(ht_mul(static_cast<float>(static_cast<int>(a & 7u)), 0x1p-9f));
  const std::uint32_t normal = (a << 20) + (120u << 23);
  return float_of(sign | (a < 8u ? tiny : a == 0x7fu ? 0x7fc00000u : normal));
}

/// 2^(e - 127); 0xff decodes to NaN.
HT_HOST_DEVICE inline float f32_from_e8m0(std::uint8_t e) {
  return float_of(e == 0 ? 0x00400000u : e == 0xff ? 0x7fc00000u : std::uint32_t{e} << 23);
}
/// Of a normal power of two.
HT_HOST_DEVICE inline std::uint8_t e8m0_from_f32(float x) {
  return static_cast<std::uint8_t>(bits_of(x) >> 23);
}

// --- Scale groups
// ------------------------------------------------------------------------------------------------------

/// Limits of a computed scale. f16 scales stay normal; f32 scales keep 1 / scale and L * scale finite.
inline constexpr float kMinF16Scale = 0x1p-14f;
inline constexpr float kMinF32Scale = 0x1p-100f;
inline constexpr float kMaxF32Scale = 0x1p119f;

/// Largest magnitude of a value, and of a rotary table's entry, that append accepts: RoPE and the Hadamard
/// rotation then stay finite in fp32.
inline constexpr float kMaxInput = 0x1p100f;
inline constexpr float kMaxRotary = 0x1p16f;

/// What quantises one group.
struct Params {
  float scale = 1;
  float min = 0;
  float inverse = 1;  ///< 1 / scale, or 0 for a group without extent, whose codes are all zero
};

/// Extent of a group. Only live values may be included.
struct Range {
  float lo = float_of(0x7f800000u);
  float hi = float_of(0xff800000u);

  HT_HOST_DEVICE void include(float x) {
    lo = x < lo ? x : lo;
    hi = x > hi ? x : hi;
  }
  HT_HOST_DEVICE void include(const Range& r) {
    lo = r.lo < lo ? r.lo : lo;
    hi = r.hi > hi ? r.hi : hi;
  }
  HT_HOST_DEVICE float absmax() const {
    const float a = ht_abs(lo), b = ht_abs(hi);
#ifdef __CUDA_ARCH__
    return fmaxf(a, b);
#else
    return a > b ? a : b;
#endif
  }
};

/// L in the formulas above.
HT_HOST_DEVICE constexpr float quantisation_levels(DType dtype, bool asymmetric) {
  return dtype == DType::kInt8   ? (asymmetric ? 255.0f : 127.0f)
         : dtype == DType::kInt4 ? (asymmetric ? 15.0f : 7.0f)
                                 : kE4m3Max;
}

/// A finite `x` of f16's range, rounded to f16.
HT_HOST_DEVICE inline float round_f16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  float rounded;
  asm("cvt.f32.f16 %0, %1;" : "=f"(rounded) : "h"(f16_from_f32(x)));
  return rounded;
#else
  return f32_from_f16(f16_from_f32(x));
#endif
}

/// The nearest scale that `dtype` stores, within the limits above; of kFloat8E8M0 the next larger one, so
/// that nothing is clipped.
HT_HOST_DEVICE inline float round_scale(DType dtype, float scale) {
  if (dtype == DType::kFloat8E8M0) {
    return float_of((bits_of(clamp(scale, kMinF32Scale, kMaxF32Scale)) + 0x7fffffu) & 0xff800000u);
  }
  return dtype == DType::kFloat16 ? round_f16(clamp(scale, kMinF16Scale, kF16Max))
                                  : clamp(scale, kMinF32Scale, kMaxF32Scale);
}

/// Finite extent / levels for one of quantisation_levels(), without a division: the quotient of the rounded
/// reciprocal, corrected by its exact remainder. It is the correctly rounded one for quotients from 2^-100
/// on, and below the same after round_scale().
HT_HOST_DEVICE inline float over_levels(float extent, float levels) {
  const float reciprocal = 1.0f / levels, quotient = ht_mul(extent, reciprocal);
  return ht_fma(ht_fma(-quotient, levels, extent), reciprocal, quotient);
}

/// 1 / scale, correctly rounded, of what round_scale() returns or is_static_scale() accepts: devices need no
/// path for other magnitudes.
HT_HOST_DEVICE inline float inverse_of(float scale) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
  return ht_fma(inverse, ht_fma(-scale, inverse, 1.0f), inverse);
#else
  return ht_div(1.0f, scale);
#endif
}

/// The nearest min that `dtype` stores; f16 saturates at +-65504. Never -0, so that bits do not depend on
/// order.
HT_HOST_DEVICE inline float round_min(DType dtype, float min) {
  return ht_add(dtype == DType::kFloat16 ? round_f16(clamp(min, -kF16Max, kF16Max)) : min, 0.0f);
}

/// Params of a group of extent `range`, rounded to `format.scale_dtype`.
HT_HOST_DEVICE inline Params params_of(const KvFormat& format, const Range& range) {
  const float extent = format.asymmetric ? ht_sub(range.hi, range.lo) : range.absmax();
  const float levels = quantisation_levels(format.dtype, format.asymmetric);
#ifdef __CUDA_ARCH__
  const float scale = over_levels(extent, levels);
#else
  const float scale = ht_div(extent, levels);
#endif
  Params p;
  p.scale = round_scale(format.scale_dtype, scale);
  p.min = format.asymmetric ? round_min(format.scale_dtype, range.lo) : 0.0f;
  p.inverse = extent > 0 ? inverse_of(p.scale) : 0.0f;
  return p;
}

/// Whether a scale and min that the caller chose can quantise: positive, normal and with a finite inverse,
/// and a finite min.
HT_HOST_DEVICE inline bool is_static_scale(float scale, float min) {
  return scale >= 0x1p-126f && scale <= 0x1p126f && is_finite(min);
}

/// Params from a scale (and min) that the caller chose.
HT_HOST_DEVICE inline Params static_params(float scale, float min) { return {scale, min, inverse_of(scale)}; }

/// A codec turns a value into a code of `Code` type and back. `Params` are ignored by the 16-bit ones, which
/// saturate at their largest finite value.
template <DType kType, bool kAsymmetric = false>
struct Codec;

template <>
struct Codec<DType::kFloat16> {
  using Code = std::uint16_t;
  HT_HOST_DEVICE static Code encode(const Params&, float x) {
    return f16_from_f32(x > kF16Max ? kF16Max : x < -kF16Max ? -kF16Max : x);
  }
  HT_HOST_DEVICE static float decode(const Params&, Code code) { return f32_from_f16(code); }
};

template <>
struct Codec<DType::kBFloat16> {
  using Code = std::uint16_t;
  HT_HOST_DEVICE static Code encode(const Params&, float x) {
    return bf16_from_f32(x > kBf16Max ? kBf16Max : x < -kBf16Max ? -kBf16Max : x);
  }
  HT_HOST_DEVICE static float decode(const Params&, Code code) { return f32_from_bf16(code); }
};

template <>
struct Codec<DType::kFloat8E4M3, false> {
  using Code = std::uint8_t;
  HT_HOST_DEVICE static Code encode(const Params& p, float x) { return e4m3_from_f32(ht_mul(x, p.inverse)); }
  HT_HOST_DEVICE static float decode(const Params& p, Code code) {
    return ht_mul(f32_from_e4m3(code), p.scale);
  }
};

template <>
struct Codec<DType::kInt8, false> {
  using Code = std::uint8_t;  ///< the two's complement byte of -127..127
  static constexpr bool kUnsigned = false;
  HT_HOST_DEVICE static int quantise(const Params& p, float x) {
    return round_to_int(clamp(ht_mul(x, p.inverse), -127.0f, 127.0f));
  }
  HT_HOST_DEVICE static Code encode(const Params& p, float x) { return static_cast<Code>(quantise(p, x)); }
  HT_HOST_DEVICE static float decode(const Params& p, Code code) {
    return ht_mul(static_cast<float>(static_cast<std::int8_t>(code)), p.scale);
  }
};

template <>
struct Codec<DType::kInt4, false> {
  using Code = std::uint8_t;  ///< 1..15 for -7..7
  static constexpr bool kUnsigned = false;
  static constexpr int kBias = 8;
  /// The code less kBias.
  HT_HOST_DEVICE static int quantise(const Params& p, float x) {
    return round_to_int(clamp(ht_mul(x, p.inverse), -7.0f, 7.0f));
  }
  HT_HOST_DEVICE static Code encode(const Params& p, float x) {
    return static_cast<Code>(quantise(p, x) + kBias);
  }
  HT_HOST_DEVICE static float decode(const Params& p, Code code) {
    return ht_mul(static_cast<float>(static_cast<int>(code) - 8), p.scale);
  }
};

template <DType kType>
struct Codec<kType, true> {
  static_assert(kType == DType::kInt8 || kType == DType::kInt4, "asymmetric codes are integers");
  using Code = std::uint8_t;  ///< 0..255 or 0..15
  static constexpr bool kUnsigned = true;
  static constexpr int kBias = 0;
  /// The code less kBias.
  HT_HOST_DEVICE static int quantise(const Params& p, float x) {
    return round_to_int(clamp(ht_mul(ht_sub(x, p.min), p.inverse), 0.0f, quantisation_levels(kType, true)));
  }
  /// quantise() for a scale that f16 holds. Scaling the inverse by a power of two is exact, and turns the
  /// lower clamp into a saturation to [0, 1], which devices have as part of a product. `kWithin`: no value is
  /// above the levels.
  template <bool kWithin = false>
  HT_HOST_DEVICE static std::uint32_t quantise_saturating(const Params& p, float x) {
    constexpr float kRange = quantisation_levels(kType, true) + 1;  // a power of two
    constexpr float kMagic = 12582912.0f / kRange;  // of round_to_int() at steps of 1 / kRange
    const float away = ht_sub(x, p.min), inverse = ht_mul(p.inverse, 1 / kRange);
#ifdef __CUDA_ARCH__
    float share;
    asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(share) : "f"(away), "f"(inverse));
#else
    const float share = clamp(ht_mul(away, inverse), 0.0f, 1.0f);
#endif
    const float rounded = ht_add(share, kMagic), top = kMagic + (kRange - 1) / kRange;
    return bits_of(kWithin || rounded < top ? rounded : top) - bits_of(kMagic);
  }
  HT_HOST_DEVICE static Code encode(const Params& p, float x) { return static_cast<Code>(quantise(p, x)); }
  HT_HOST_DEVICE static float decode(const Params& p, Code code) {
    return ht_fma(static_cast<float>(static_cast<int>(code)), p.scale, p.min);
  }
};

/// Calls `use(Codec<...>{})` with the codec of `format`, which check_format has accepted.
template <class Use>
auto with_codec(const KvFormat& format, Use&& use) {
  switch (format.dtype) {
    case DType::kFloat16:
      return use(Codec<DType::kFloat16>{});
    case DType::kFloat8E4M3:
      return use(Codec<DType::kFloat8E4M3>{});
    case DType::kInt8:
      return format.asymmetric ? use(Codec<DType::kInt8, true>{}) : use(Codec<DType::kInt8>{});
    case DType::kInt4:
      return format.asymmetric ? use(Codec<DType::kInt4, true>{}) : use(Codec<DType::kInt4>{});
    default:
      return use(Codec<DType::kBFloat16>{});
  }
}

/// FBGEMM gen_ai INT4 row (genai_attention, "int4 row-wise" and "group-wise"): f16 scale and shift per group,
/// then nibbles with the even dim low; x = q * scale + shift.
struct FbgemmScaleShift {
  std::uint16_t scale;
  std::uint16_t shift;
};
template <int kDim, int kGroups>
struct FbgemmInt4Row {
  FbgemmScaleShift groups[kGroups];
  std::uint8_t nibbles[kDim / 2];
};
static_assert(sizeof(FbgemmInt4Row<128, 1>) == 68 && alignof(FbgemmInt4Row<128, 1>) == 2);
static_assert(sizeof(FbgemmInt4Row<128, 4>) == 80);

}  // namespace halftone::codec
