// Products of pairs of bf16, where a processor has them, on every instruction set: the bits of fp32.
#include "tests/attention/targets.h"
//
#include <algorithm>
#include <cmath>

#include "reference/random.h"

namespace halftone::testing {
namespace {

/// A bf16 Q and K as values of bf16 or as codes, in pairs of dims where there is an instruction for them.
TEST_P(Targets, PairsOfKeysHaveTheBitsOfFp32) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  const Mask masks[] = {{}, {.causal = true}, {.causal = true, .window_left = 50}};
  int n = 0;
  for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
    for (const std::string format :
         {"plain", "bf16", "int8-tensor", "int8-static-head", "int8-token-f32", "int8-head", "fp8",
          "fp8-token-head", "int4-token-sym", "int8-head+offset", "int8-g32", "int8-token-asym-f32",
          "fp8-g32", "int4-g32", "int4-row"}) {
      ++n;
      if (head_dim % 32 != 0 && format.ends_with("g32")) continue;
      if (reference::kSanitized && n % 5 != 0) continue;
      AttentionCase row = key_pairs_case();
      row.head_dim = head_dim;
      row.mask = masks[(n + n / 9) % 3];
      if (n % 4 == 0 && !format.ends_with("+offset")) row.softcap = 20.0F;
      row.alibi = n % 5 == 0;
      row.offset_k = format.ends_with("+offset");
      row.k_format = format.substr(0, format.find('+'));
      if (format == "plain") {
        row.k_format = "bf16";
        row.plain = DType::kBFloat16;
      }
      const std::string what = format + ", head_dim " + std::to_string(head_dim);
      const Problem p = make_problem(row);
      // The order of dims of 4 bits is that of the lanes.
      const bool same = !format.starts_with("int4") || has_lanes_of_the_best(GetParam());
      const Outputs here = same ? expect_bits_of_the_best(GetParam(), p, what) : run_on(GetParam(), p);
      if (head_dim <= 96) {
        EXPECT_EQ(judge(p, make_reference(p), here), "") << what;
      }
    }
  }
}

/// A Q that is so large that its sums with codes would overflow, or so small that pairs would lose it, beside
/// scales that make ordinary logits of them.
TEST_P(Targets, OddQueriesMeetOddScales) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  for (const std::string format : {"int8-token-head-f32", "int8-tensor", "fp8-token-head-f32", "fp8",
                                   "int8-g32-f32", "int8-token-asym-f32"}) {
    for (const int exponent : {-127, -116, -60, -40, 60, 100, 110, 121}) {
      AttentionCase row = key_pairs_case();
      row.head_dim = 64;
      row.k_format = format;
      const float unit = std::ldexp(1.0F, exponent);
      const float other = std::ldexp(1.0F, std::clamp(-exponent, -88, 90));
      row.scale = std::ldexp(0.125F, -exponent) / other;
      Problem p = make_problem(row);
      for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, p.q.get(i) * unit);
      for (std::int64_t i = 0; i < p.k.numel(); ++i) p.k.set(i, p.k.get(i) * other);
      p.cache->calibrate(p.k, p.v);
      p.cache = refilled(p, {0xFF});
      const std::string what = format + ", Q of 2^" + std::to_string(exponent);
      const Outputs here = expect_bits_of_the_best(GetParam(), p, what);
      EXPECT_EQ(judge(p, make_reference(p), here), "") << what;
    }
  }
}

/// Weights in bf16 and V in bf16, in pairs of tokens where there is an instruction for them.
TEST_P(Targets, PairsOfWeightsHaveTheBitsOfFp32) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  const Mask masks[] = {{}, {.causal = true}, {.causal = true, .window_left = 50}};
  int n = 0;
  for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
    for (const std::string format : {"plain bf16", "plain f32", "bf16", "fp16", "fp8-token-head", "int8-head",
                                     "int8-token-asym-f32", "int4-g32", "int4-row"}) {
      ++n;
      if (head_dim % 32 != 0 && format == "int4-g32") continue;
      if (reference::kSanitized && n % 5 != 0) continue;
      AttentionCase row = half_int8_case();
      row.head_dim = head_dim;
      row.mask = masks[(n + n / 9) % 3];
      row.q_dtype = n % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
      if (format.starts_with("plain")) {
        row.plain = format == "plain f32" ? DType::kFloat32 : DType::kBFloat16;
      } else {
        row.k_format = format;
      }
      const std::string what = format + ", head_dim " + std::to_string(head_dim);
      const Problem p = make_problem(row);
      const Outputs here = expect_bits_of_the_best(GetParam(), p, what);
      if (head_dim <= 96) {
        EXPECT_EQ(judge(p, make_reference(p), here), "") << what;
      }
    }
  }
}

/// A V so small, or sums so small beside later ones, that pairs would lose them.
TEST_P(Targets, PairsOfSmallWeightsAndValues) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  int n = 0;
  for (const float unit : {1.0F, 0x1p-40F, 0x1p-52F, 0x1p-60F, 0x1p-100F, 0x1p-130F, 0x1p120F}) {
    for (const int step : {1, 7, 10000}) {  // in all places, some, few
      for (const float scale : {0.0F, 4.0F, 60.0F}) {
        if (++n % 5 != 0 && reference::kSanitized) continue;
        AttentionCase row = half_int8_case();
        row.plain = n % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
        row.mask.causal = step != 7;
        row.scale = scale;
        const Problem p = make_problem(row);
        for (std::int64_t i = 0; i < p.v.numel(); i += step) p.v.set(i, p.v.get(i) * unit);
        expect_bits_of_the_best(GetParam(), p, "case " + std::to_string(n));
      }
    }
  }
}

/// A sum of the first tile that is below 2^-100 once the second one's largest weight is known, beside sums of
/// that tile that are little larger: it must be gone on every target.
TEST_P(Targets, PairsOfVanishingSums) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  AttentionCase row = half_int8_case();
  row.plain = DType::kBFloat16;
  row.requests = {{3, 128}};
  row.scale = 1.0F / static_cast<float>(row.head_dim);
  const Problem p = make_problem(row);
  for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, 1.0F);
  const std::int64_t of_token = std::int64_t{row.kv_heads} * row.head_dim;
  Random random(5);
  for (std::int64_t i = 0; i < p.k.numel(); ++i) {
    const std::int64_t token = i / of_token;
    p.k.set(i, token < 64 ? 0.0F : token == 64 ? 35.25F : 0.703125F);  // logits; weights 2^-51, 1 and 2^-50
    const float v = token < 64 ? 0x1p-54F : token == 64 ? 0.0F : 0x1p-50F;
    p.v.set(i, random.chance(0.5) ? v : -v);
  }
  const Outputs here = expect_bits_of_the_best(GetParam(), p, "sums of 2^-97");
  for (std::int64_t i = 0; i < here.out.numel(); ++i) ASSERT_LT(std::abs(here.out.get(i)), 0x1p-92F);
}

/// Nor do a NaN and an infinity of V reach rows that do not see their token.
TEST_P(Targets, PairsAndValuesThatAreNoNumbers) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  for (const float bad : {kNan, kInf, -kInf}) {
    for (const int token : {3, 40, 64, 199}) {
      AttentionCase row = half_int8_case();
      row.plain = DType::kBFloat16;
      row.requests = {{200, 200}, {30, 90}};
      row.mask.causal = true;
      const Problem p = make_problem(row);
      const Outputs clean = run_problem(p);
      const std::int64_t dim = row.head_dim, heads = row.q_heads;
      p.v.set(std::int64_t{token} * row.kv_heads * dim + 5, bad);
      const Outputs here = expect_bits_of_the_best(GetParam(), p, "token " + std::to_string(token));
      for (std::int64_t query = 0; query < 230; ++query) {
        const std::int64_t at = query * heads * dim + 5;
        const bool sees = query >= token && query < 200;
        ASSERT_EQ(std::isfinite(here.out.get(at)), !sees) << "query " << query << ", token " << token;
        ASSERT_TRUE(sees || here.out.get(at) == clean.out.get(at)) << "query " << query;
        ASSERT_EQ(here.out.get(at + 1), clean.out.get(at + 1)) << "query " << query;
      }
    }
  }
}

/// Where the token's weight is rounded to 0, a row sees nothing of it, whatever its neighbours see.
TEST_P(Targets, PairsAndInfinitiesOfNoWeight) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  AttentionCase row = half_int8_case();
  row.plain = DType::kBFloat16;
  row.requests = {{40, 256}};
  row.scale = 20.0F;
  const Problem p = make_problem(row);
  const Outputs clean = run_problem(p);
  p.v.set(std::int64_t{100} * row.kv_heads * row.head_dim + 5, kInf);
  const Outputs here = expect_bits_of_the_best(GetParam(), p, "an infinity");
  int untouched = 0;
  for (std::int64_t query = 0; query < 40; ++query) {
    const std::int64_t at = query * row.q_heads * row.head_dim + 5;
    untouched += std::isfinite(here.out.get(at)) ? 1 : 0;
    ASSERT_TRUE(std::isinf(here.out.get(at)) || here.out.get(at) == clean.out.get(at)) << "query " << query;
  }
  EXPECT_GT(untouched, 10);
}

INSTANTIATE_TEST_SUITE_P(Host, Targets, ::testing::ValuesIn(targets()), target_name);

}  // namespace
}  // namespace halftone::testing
