// Bit conversions, scale groups, Hadamard and RoPE, each against a formula of its own.
#include "format/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <set>
#include <vector>

#include "format/fp8_row.h"
#include "format/hadamard.h"
#include "format/head_dim.h"
#include "format/rope.h"
#include "format/value_block.h"
#include "reference/cache.h"
#include "reference/random.h"

namespace halftone {
namespace {

using reference::Random;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A binary floating-point type by its definition: sign, `exponent_bits`, `mantissa_bits`.
struct MiniFloat {
  const char* name;
  int exponent_bits, mantissa_bits, top_code;  // top_code: largest finite magnitude
  std::uint32_t (*encode)(float);
  float (*decode)(std::uint32_t);

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  std::uint32_t sign_bit() const { return 1u << (bits() - 1); }
  double magnitude(int code) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    return exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                         : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  }
};

const MiniFloat kF16{"f16",
                     5,
                     10,
                     0x7bff,
                     [](float x) -> std::uint32_t { return codec::f16_from_f32(x); },
                     [](std::uint32_t c) { return codec::f32_from_f16(static_cast<std::uint16_t>(c)); }};
const MiniFloat kBf16{"bf16",
                      8,
                      7,
                      0x7f7f,
                      [](float x) -> std::uint32_t { return codec::bf16_from_f32(x); },
                      [](std::uint32_t c) { return codec::f32_from_bf16(static_cast<std::uint16_t>(c)); }};
const MiniFloat kE4m3{"e4m3",
                      4,
                      3,
                      0x7e,
                      [](float x) -> std::uint32_t { return codec::e4m3_from_f32(x); },
                      [](std::uint32_t c) { return codec::f32_from_e4m3(static_cast<std::uint8_t>(c)); }};

class MiniFloatTest : public ::testing::TestWithParam<MiniFloat> {};
INSTANTIATE_TEST_SUITE_P(All, MiniFloatTest, ::testing::Values(kF16, kBf16, kE4m3),
                         [](const auto& info) { return info.param.name; });

TEST_P(MiniFloatTest, EveryCodeDecodesToItsFormulaAndEncodesBack) {
  const MiniFloat f = GetParam();
  for (int code = 0; code <= f.top_code; ++code) {
    const auto c = static_cast<std::uint32_t>(code);
    ASSERT_EQ(static_cast<double>(f.decode(c)), f.magnitude(code)) << code;
    ASSERT_EQ(static_cast<double>(f.decode(c | f.sign_bit())), -f.magnitude(code)) << code;
    ASSERT_EQ(f.encode(f.decode(c)), c);
    ASSERT_EQ(f.encode(f.decode(c | f.sign_bit())), c | f.sign_bit());
  }
  EXPECT_TRUE(std::signbit(f.decode(f.sign_bit())));
}

TEST_P(MiniFloatTest, RoundsToNearestTiesToEven) {
  const MiniFloat f = GetParam();
  for (int code = 0; code < f.top_code; ++code) {
    const auto low = static_cast<std::uint32_t>(code);
    const double middle = (f.magnitude(code) + f.magnitude(code + 1)) / 2;
    const auto tie = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(tie), middle) << "the tie is exact in fp32";
    const std::uint32_t even = low % 2 == 0 ? low : low + 1;
    ASSERT_EQ(f.encode(tie), even) << code;
    ASSERT_EQ(f.encode(-tie), even | f.sign_bit()) << code;
    ASSERT_EQ(f.encode(std::nextafter(tie, 0.0f)), low) << code;
    ASSERT_EQ(f.encode(std::nextafter(tie, kInf)), low + 1) << code;
  }
}

TEST_P(MiniFloatTest, SmallestInputsRoundToSignedZero) {
  const MiniFloat f = GetParam();
  EXPECT_EQ(f.encode(0.0f), 0u);
  EXPECT_EQ(f.encode(-0.0f), f.sign_bit());
  EXPECT_EQ(f.encode(std::numeric_limits<float>::denorm_min()), 0u);
  EXPECT_EQ(f.encode(-std::numeric_limits<float>::denorm_min()), f.sign_bit());
}

TEST(ConversionTest, OverflowAndNaN) {
  EXPECT_EQ(codec::f16_from_f32(65519.996f), 0x7bff);
  EXPECT_EQ(codec::f16_from_f32(65520.0f), 0x7c00);
  EXPECT_EQ(codec::f16_from_f32(-kInf), 0xfc00);
  EXPECT_EQ(codec::f32_from_f16(0x7c00), kInf);
  EXPECT_EQ(codec::bf16_from_f32(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(codec::bf16_from_f32(-kInf), 0xff80);
  for (const float nan :
       {kNan, -kNan, std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu)}) {
    EXPECT_EQ(codec::f16_from_f32(nan), 0x7fff);
    EXPECT_EQ(codec::bf16_from_f32(nan), 0x7fff);
    EXPECT_EQ(codec::e4m3_from_f32(nan), 0x7f);
  }
  for (std::uint32_t c = 0x7c01; c <= 0x7fff; ++c) {
    ASSERT_TRUE(std::isnan(codec::f32_from_f16(static_cast<std::uint16_t>(c))));
    ASSERT_TRUE(std::isnan(codec::f32_from_f16(static_cast<std::uint16_t>(c | 0x8000))));
  }
  EXPECT_TRUE(std::isnan(codec::f32_from_e4m3(0x7f)));
  EXPECT_TRUE(std::isnan(codec::f32_from_e4m3(0xff)));
}

TEST(ConversionTest, E4m3SaturatesAt448) {
  for (const float x : {448.0f, 463.9f, 464.0f, 1e4f, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(codec::e4m3_from_f32(x), 0x7e) << x;
    EXPECT_EQ(codec::e4m3_from_f32(-x), 0xfe) << x;
  }
  EXPECT_EQ(codec::f32_from_e4m3(0x7e), 448.0f);
}

TEST(ConversionTest, SixteenBitCodecsSaturateAtTheirLargestFinite) {
  using F16 = codec::Codec<DType::kFloat16>;
  using Bf16 = codec::Codec<DType::kBFloat16>;
  EXPECT_EQ(F16::encode({}, 1e6f), 0x7bff);
  EXPECT_EQ(F16::encode({}, -1e6f), 0xfbff);
  EXPECT_EQ(Bf16::encode({}, std::numeric_limits<float>::max()), 0x7f7f);
  EXPECT_EQ(Bf16::encode({}, -std::numeric_limits<float>::max()), 0xff7f);
  EXPECT_EQ(F16::decode({}, F16::encode({}, 0.5f)), 0.5f);
  EXPECT_EQ(Bf16::decode({}, Bf16::encode({}, 0.5f)), 0.5f);
}

TEST(RoundTest, RoundToIntIsRintOverItsRange) {
  Random random(1);
  for (int i = -2'000'000; i <= 2'000'000; ++i) {
    const float x = static_cast<float>(i) * 0.5f;
    ASSERT_EQ(codec::round_to_int(x), static_cast<int>(std::nearbyint(x)));
  }
  for (int i = 0; i < 100'000; ++i) {
    const float x = static_cast<float>(random.uniform() * 1024 - 512);
    ASSERT_EQ(codec::round_to_int(x), static_cast<int>(std::nearbyint(x))) << x;
  }
}

// --- Scale groups
// --------------------------------------------------------------------------------------------------------

std::vector<KvFormat> quantised_formats() {
  std::vector<KvFormat> formats;
  for (const DType dtype : {DType::kFloat8E4M3, DType::kInt8, DType::kInt4}) {
    for (const bool asymmetric : {false, true}) {
      for (const DType scale : {DType::kFloat16, DType::kFloat32}) {
        if (asymmetric && dtype == DType::kFloat8E4M3) continue;
        formats.push_back({dtype, Granularity::kTokenHead, asymmetric, 0, scale});
      }
    }
  }
  return formats;
}

codec::Range range_of(const std::vector<float>& x) {
  codec::Range r;
  for (const float v : x) r.include(v);
  return r;
}

std::vector<float> round_trip(const KvFormat& format, const codec::Params& p, const std::vector<float>& x) {
  std::vector<float> out;
  codec::with_codec(format, [&](auto c) {
    for (const float v : x) out.push_back(c.decode(p, c.encode(p, v)));
  });
  return out;
}

TEST(GroupTest, ScalesFollowTheRules) {
  const codec::Range r = range_of({-3.0f, 2.0f});
  const auto scale = [&](DType dtype, bool asymmetric) {
    return codec::params_of({dtype, Granularity::kTokenHead, asymmetric, 0, DType::kFloat32}, r).scale;
  };
  EXPECT_EQ(scale(DType::kInt8, false), 3.0f / 127.0f);
  EXPECT_EQ(scale(DType::kInt4, false), 3.0f / 7.0f);
  EXPECT_EQ(scale(DType::kFloat8E4M3, false), 3.0f / 448.0f);
  EXPECT_EQ(scale(DType::kInt8, true), 5.0f / 255.0f);
  EXPECT_EQ(scale(DType::kInt4, true), 5.0f / 15.0f);
  const codec::Params half =
      codec::params_of({DType::kInt4, Granularity::kTokenHead, true}, range_of({0.1f, 1.6f}));
  EXPECT_EQ(half.scale, codec::f32_from_f16(codec::f16_from_f32(0.1f))) << "rounded to f16 before use";
  EXPECT_EQ(half.min, codec::f32_from_f16(codec::f16_from_f32(0.1f)));
  EXPECT_EQ(half.inverse, 1.0f / half.scale);
}

TEST(GroupTest, ScalesHaveAFloorAndACeiling) {
  const KvFormat f16{DType::kInt8, Granularity::kTokenHead};
  KvFormat f32 = f16, asym = f16;
  f32.scale_dtype = DType::kFloat32;
  asym.asymmetric = true;
  EXPECT_EQ(codec::params_of(f16, range_of({1e-9f})).scale, 0x1p-14f);
  EXPECT_EQ(codec::params_of(f16, range_of({1e9f})).scale, 65504.0f);
  EXPECT_EQ(codec::params_of(f32, range_of({1e-38f})).scale, 0x1p-100f);
  EXPECT_EQ(codec::params_of(asym, range_of({-1e6f, 1e6f})).min, -65504.0f);
  for (const float x : {1e-38f, 1e-20f, 1.0f, codec::kMaxInput}) {
    const codec::Params p = codec::params_of(f32, range_of({x}));
    EXPECT_TRUE(std::isfinite(p.inverse) && p.inverse > 0);
    EXPECT_TRUE(std::isfinite(p.scale * 127));
  }
}

TEST(GroupTest, ZerosGiveZeroCodesAndAUsableScale) {
  const std::vector<float> zeros(32, 0.0f);
  for (const KvFormat& f : quantised_formats()) {
    const codec::Params p = codec::params_of(f, range_of(zeros));
    EXPECT_GT(p.scale, 0.0f);
    EXPECT_TRUE(std::isfinite(1 / p.scale));
    codec::with_codec(f, [&](auto c) {
      EXPECT_EQ(c.encode(p, 0.0f), f.dtype == DType::kInt4 && !f.asymmetric ? 8 : 0) << format_name(f);
    });
    for (const float x : round_trip(f, p, zeros)) EXPECT_EQ(x, 0.0f);
  }
}

TEST(GroupTest, AConstantAsymmetricGroupDecodesToItsRoundedMin) {
  for (const DType dtype : {DType::kInt8, DType::kInt4}) {
    for (const float x : {0.1f, -3.3f, 1000.2f, -60000.7f, 1e6f, -1e6f}) {
      const KvFormat f{dtype, Granularity::kTokenHead, true};
      const codec::Params p = codec::params_of(f, range_of({x, x, x}));
      EXPECT_EQ(p.min, codec::f32_from_f16(codec::f16_from_f32(std::clamp(x, -65504.0f, 65504.0f))));
      for (const float y : round_trip(f, p, {x, x})) EXPECT_EQ(y, p.min);
      // With 1 / scale a min that is rounded down, 1000.2 to 1000, would give the largest code.
      codec::with_codec(f, [&](auto c) { EXPECT_EQ(c.encode(p, x), 0) << x; });
    }
  }
}

TEST(GroupTest, MinIsNeverNegativeZeroWhateverTheOrder) {
  const KvFormat f{DType::kInt4, Granularity::kTokenHead, true};
  EXPECT_FALSE(std::signbit(codec::params_of(f, range_of({0.0f, -0.0f, 1.0f})).min));
  EXPECT_FALSE(std::signbit(codec::params_of(f, range_of({-0.0f, 0.0f, 1.0f})).min));
}

TEST(GroupTest, AnOutlierIsExactEnoughAndNothingBecomesNaN) {
  for (const KvFormat& f : quantised_formats()) {
    std::vector<float> x(64, 0.25f);
    x[17] = 1e4f;
    const codec::Params p = codec::params_of(f, range_of(x));
    const std::vector<float> y = round_trip(f, p, x);
    for (const float v : y) ASSERT_TRUE(std::isfinite(v));
    EXPECT_NEAR(y[17], 1e4f, 1e4f * 0x1p-4f) << format_name(f);
  }
}

// |x - x'| of one value: half a step, plus what rounding the params moves the ends of the code range.
double error_bound(const KvFormat& f, const codec::Params& p, const codec::Range& r, float x) {
  const double levels = codec::quantisation_levels(f.dtype, f.asymmetric);
  const double extent = f.asymmetric ? static_cast<double>(r.hi) - r.lo : r.absmax();
  const double shrunk = std::max(0.0, extent / levels - p.scale) * levels;  // clipping at the top
  const double slack = (std::abs(x) + extent) * 0x1p-22;                    // fp32 arithmetic
  const double min_error = f.asymmetric ? std::abs(static_cast<double>(r.lo) - p.min) : 0.0;
  double step = p.scale;
  if (f.dtype == DType::kFloat8E4M3) {
    const double y = std::abs(x) / static_cast<double>(p.scale);
    step *= std::max(0x1p-9, std::exp2(std::floor(std::log2(std::max(y, 0x1p-20))) - 3));
  }
  return step / 2 * (1 + 0x1p-18) + shrunk + min_error + slack;
}

TEST(GroupTest, RandomGroupsStayWithinTheErrorBound) {
  Random random(2);
  for (const KvFormat& f : quantised_formats()) {
    for (int n = 0; n < 2000; ++n) {
      const auto size = static_cast<std::size_t>(random.integer(1, 256));
      const float magnitude =
          std::ldexp(1.0f, static_cast<int>(random.integer(-12, f.scale_dtype == DType::kFloat16 ? 14 : 60)));
      const float offset = static_cast<float>(random.integer(-3, 3)) * magnitude;
      std::vector<float> x(size);
      for (float& v : x) v = random.normal() * magnitude * (random.chance(0.02) ? 20.0f : 1.0f) + offset;
      const codec::Range r = range_of(x);
      if (f.scale_dtype == DType::kFloat16 && f.asymmetric && std::abs(r.lo) > 65504.0f) continue;
      const codec::Params p = codec::params_of(f, r);
      const std::vector<float> y = round_trip(f, p, x);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_LE(std::abs(static_cast<double>(x[i]) - y[i]), error_bound(f, p, r, x[i]))
            << format_name(f) << " x " << x[i] << " decoded " << y[i] << " scale " << p.scale << " min "
            << p.min;
      }
    }
  }
}

TEST(GroupTest, EveryCodeIsReachedAndNoneBeyond) {
  const auto codes = [](DType dtype, bool asymmetric) {
    const KvFormat f{dtype, Granularity::kTokenHead, asymmetric, 0, DType::kFloat32};
    std::set<int> seen;
    codec::with_codec(f, [&](auto c) {
      const codec::Params p = codec::params_of(f, range_of({-1.0f, 1.0f}));
      for (int i = -4000; i <= 4000; ++i) seen.insert(c.encode(p, static_cast<float>(i) / 2000));
    });
    return seen;
  };
  EXPECT_EQ(codes(DType::kInt8, false).size(), 255u);
  EXPECT_FALSE(codes(DType::kInt8, false).contains(0x80)) << "-128 is not a symmetric code";
  EXPECT_EQ(codes(DType::kInt8, true).size(), 256u);
  EXPECT_EQ(codes(DType::kInt4, true).size(), 16u);
  EXPECT_EQ(codes(DType::kInt4, false).size(), 15u);
  EXPECT_FALSE(codes(DType::kInt4, false).contains(0)) << "-8 is not a symmetric code";
}

// The two shortcuts of devices, in their host form.
TEST(GroupTest, QuotientByLevelsNeedsNoDivision) {
  for (const float levels : {127.0f, 7.0f, 448.0f, 255.0f, 15.0f}) {
    for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += bits % 64 == 0 ? 61 : 977) {
      const float extent = codec::float_of(bits);
      for (const DType type : {DType::kFloat16, DType::kFloat32}) {
        ASSERT_EQ(codec::round_scale(type, codec::over_levels(extent, levels)),
                  codec::round_scale(type, extent / levels))
            << extent << " / " << levels;
      }
    }
  }
}

template <DType kType>
void expect_saturating_codes() {
  using Codec = codec::Codec<kType, true>;
  Random random(9);
  for (int i = 0; i < 300000; ++i) {
    const float spread = std::ldexp(1.0f, static_cast<int>(random.integer(-40, 60)));
    const float a = random.normal() * spread, b = a + random.normal() * spread;
    codec::Range range;
    range.include(a);
    range.include(b);
    const codec::Params p = codec::params_of({kType, Granularity::kTokenHead, true}, range);
    const float share = static_cast<float>(random.integer(-2, 34)) / 32;
    for (const float x : {a, b, a + (b - a) * share, kInf, -kInf, kNan, -0.0f}) {
      ASSERT_EQ(Codec::quantise_saturating(p, x), static_cast<std::uint32_t>(Codec::quantise(p, x)))
          << x << " in " << range.lo << " to " << range.hi;
    }
  }
}

TEST(GroupTest, SaturatingCodesAreTheClampedOnes) {
  expect_saturating_codes<DType::kInt8>();
  expect_saturating_codes<DType::kInt4>();
}

TEST(GroupTest, FbgemmRowsHaveTheirPublishedSizes) {
  EXPECT_EQ(sizeof(codec::FbgemmInt4Row<128, 1>), 68u);
  EXPECT_EQ(sizeof(codec::FbgemmInt4Row<128, 4>), 80u);
  const codec::FbgemmInt4Row<128, 4> row{};
  EXPECT_EQ(reinterpret_cast<const char*>(row.nibbles) - reinterpret_cast<const char*>(&row), 16);
}

// --- Hadamard and RoPE
// -------------------------------------------------------------------------------------------------------

TEST(HadamardTest, IsTheBlockDiagonalSylvesterMatrix) {
  Random random(3);
  for (const int dim : kHeadDims) {
    const int block = hadamard::block_size(dim);
    EXPECT_EQ(block, dim == 80 ? 16 : dim == 96 ? 32 : dim == 192 ? 64 : dim);
    std::vector<float> x(static_cast<std::size_t>(dim));
    for (float& v : x) v = random.normal();
    std::vector<float> y = x;
    hadamard::rotate(y.data(), dim);
    std::vector<double> exact(x.begin(), x.end());
    reference::rotate_rows(exact, dim);
    double norm_x = 0, norm_y = 0;
    for (int i = 0; i < dim; ++i) {
      double expected = 0;
      const int start = i / block * block;
      for (int j = 0; j < block; ++j) {
        const bool negative = std::popcount(static_cast<unsigned>(j & (i - start))) % 2 != 0;
        expected += (negative ? -1.0 : 1.0) * x[static_cast<std::size_t>(start + j)];
      }
      expected /= std::sqrt(static_cast<double>(block));
      ASSERT_NEAR(y[static_cast<std::size_t>(i)], expected, 2e-6) << dim << " " << i;
      ASSERT_NEAR(exact[static_cast<std::size_t>(i)], expected, 1e-13) << dim << " " << i;
      norm_x += x[static_cast<std::size_t>(i)] * x[static_cast<std::size_t>(i)];
      norm_y += y[static_cast<std::size_t>(i)] * y[static_cast<std::size_t>(i)];
    }
    EXPECT_NEAR(norm_y / norm_x, 1.0, 1e-5);
    hadamard::rotate(y.data(), dim);
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(y[i], x[i], 4e-6) << "its own inverse";
  }
}

TEST(RopeTest, PairsAndAnglesFollowTheDefinition) {
  for (const RopePairing pairing : {RopePairing::kHalf, RopePairing::kInterleaved}) {
    constexpr int kHalf = 3;
    std::vector<float> x = {1, 2, 3, 4, 5, 6, 7, 8}, cos(kHalf), sin(kHalf);
    std::vector<double> expected(x.begin(), x.end());
    for (int i = 0; i < kHalf; ++i) {
      const double angle = std::numbers::pi / (i + 2.5);
      cos[static_cast<std::size_t>(i)] = static_cast<float>(std::cos(angle));
      sin[static_cast<std::size_t>(i)] = static_cast<float>(std::sin(angle));
      const auto a = static_cast<std::size_t>(pairing == RopePairing::kHalf ? i : 2 * i);
      const auto b = static_cast<std::size_t>(pairing == RopePairing::kHalf ? i + kHalf : 2 * i + 1);
      expected[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
      expected[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
    }
    rope::rotate(pairing, x.data(), cos.data(), sin.data(), kHalf);
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], expected[i], 2e-6);
    EXPECT_EQ(x[6], 7.0f) << "dims beyond rotary_dim pass";
    EXPECT_EQ(x[7], 8.0f);
  }
}

TEST(Fp8Row, ScaleIsTheSmallestPowerOfTwoThatFits) {
  for (int exponent = -149; exponent <= 127; ++exponent) {
    for (const double mantissa : {1.0, 1.25, 1.75, 1.7500001192092896, 1.875, 1.9999998807907104}) {
      const auto absmax = static_cast<float>(std::ldexp(mantissa, exponent));
      if (!(absmax > 0)) continue;
      const fp8_row::Row row = fp8_row::row_of(codec::bits_of(absmax));
      int power = 0;
      ASSERT_EQ(std::frexp(row.scale, &power), 0.5F) << absmax;
      ASSERT_EQ(row.scale * row.inverse, 1.0F) << absmax;
      ASSERT_LE(absmax / row.scale, 448.0F) << absmax;
      ASSERT_TRUE(row.scale == 0x1p-126F || absmax / (row.scale / 2) > 448.0F) << absmax;
      ASSERT_EQ(fp8_row::code_of(row, -absmax), codec::e4m3_from_f32(-absmax / row.scale)) << absmax;
    }
  }
  EXPECT_EQ(fp8_row::row_of(0).scale, 1.0F);
  EXPECT_TRUE(std::isnan(fp8_row::row_of(0x7f800000U).scale));
  EXPECT_EQ(fp8_row::code_of(fp8_row::row_of(0x7fc00000U), std::numeric_limits<float>::infinity()), 0);
}

TEST(ValueBlock, CountedTokensBeginAtTheFirstQuerysWindow) {
  EXPECT_EQ(value_block::first_counted(300, 10, -1), 0);
  EXPECT_EQ(value_block::first_counted(300, 10, 0), 290);
  EXPECT_EQ(value_block::first_counted(300, 10, 40), 250);
  EXPECT_EQ(value_block::first_counted(300, 10, 290), 0);
  EXPECT_EQ(value_block::first_counted(5, 10, 3), 0);
  EXPECT_EQ(value_block::first_counted(1 << 30, 1, (1LL << 31) - 1), 0);
}

}  // namespace
}  // namespace halftone
