// Every instruction set that this machine has, not only the best one: accuracy, and bits that do not depend
// on how work is divided. Highway's dispatch is forced from outside; nothing else of the library's inside is
// used.
//
// ctest: 3 parts
#include "cpu/targets.h"
// Before any Highway header, so that HWY_TARGETS are those of the kernels.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "reference/random.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

/// The kernels run on `target` as long as this lives.
class ForcedTarget {
 public:
  explicit ForcedTarget(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~ForcedTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
};

/// Bits of the targets that were compiled and that this machine has, best first.
std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> result;
  for (std::int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1)
    result.push_back(left & -left);
  return result;
}

std::string target_name(const ::testing::TestParamInfo<std::int64_t>& info) {
  return hwy::TargetName(info.param);
}

/// Which have fused multiply-adds, so that half_int8 has the same bits on all of them.
bool has_fma(std::int64_t target) { return (target & (HWY_NEON | HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL)) != 0; }

/// Whether its vectors are as long as those of the best one.
bool has_lanes_of_the_best(std::int64_t target) {
  constexpr std::int64_t kLong = HWY_AVX3 | HWY_AVX3_DL;
  return ((target & kLong) != 0) == ((targets().front() & kLong) != 0);
}

/// Equal bits, or NaN in both.
void expect_same_values(const Tensor& a, const Tensor& b, const std::string& what) {
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const float x = a.get(i), y = b.get(i);
    const bool same = std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y);
    different += same ? 0 : 1;
  }
  EXPECT_EQ(different, 0) << what;
}

Outputs run_on(std::int64_t target, const Problem& p) {
  const ForcedTarget forced(target);
  return run_problem(p);
}

/// The outputs on `target`, which are those of the best one.
Outputs expect_bits_of_the_best(std::int64_t target, const Problem& p, const std::string& what) {
  const Outputs best = run_problem(p);
  Outputs here = run_on(target, p);
  expect_same_values(best.out, here.out, what + ": out");
  expect_same_values(best.lse, here.lse, what + ": lse");
  return here;
}

AttentionCase half_int8_case() {
  AttentionCase row;
  row.arithmetic = "half_int8";
  row.out_dtype = DType::kFloat32;
  row.requests = {{20, 200}, {70, 70}, {1, 129}, {5, 64}};
  return row;
}

/// Requests of more rows than the direct path takes.
AttentionCase key_pairs_case() {
  AttentionCase row;
  row.out_dtype = DType::kFloat32;
  row.q_heads = 4;
  row.kv_heads = 1;
  row.requests = {{20, 130}, {70, 70}};
  return row;
}

class Targets : public ::testing::TestWithParam<std::int64_t> {};

/// Every third row of the case table, every format among them.
TEST_P(Targets, CaseTable) {
  const ForcedTarget forced(GetParam());
  int n = 0;
  for (const AttentionCase& row : attention_cases()) {
    if (n++ % (reference::kSanitized ? 12 : 3) != 0) continue;
    const Problem p = make_problem(row);
    EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << row.name;
  }
}

TEST_P(Targets, RandomProblems) {
  const ForcedTarget forced(GetParam());
  for (std::uint64_t seed = 10000; seed < (reference::kSanitized ? 10010 : 10060); ++seed) {
    const Problem p = make_problem(random_case(seed));
    EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << "random_case(" << seed << ")";
  }
}

/// Values of an asymmetric K or V that are rounded to codes or to 16 bits must be rounded once before: where
/// one falls on the other side, the output is off by a step of those.
TEST_P(Targets, CodesOfAsymmetricValues) {
  const ForcedTarget forced(GetParam());
  int n = 0;
  for (const char* arithmetic : {"half_int8", "full_int8", "fp8"}) {
    for (const char* format : {"int8-token-asym-f32", "int4-g32"}) {
      for (const DType q_dtype : {DType::kFloat16, DType::kFloat32}) {
        AttentionCase row;
        row.arithmetic = arithmetic;
        row.k_format = format;
        row.q_dtype = q_dtype;
        row.out_dtype = DType::kFloat32;
        row.requests = {{5, 300}, {1, 900}};
        row.seed = static_cast<std::uint64_t>(700 + n++);
        const Problem p = make_problem(row);
        EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << arithmetic << ", " << format;
      }
    }
  }
  for (const std::uint64_t seed : {60U, 138U}) {
    const Problem p = make_problem(random_case(seed));
    EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << "random_case(" << seed << ")";
  }
}

/// Products of a subnormal number and a large one are as large as others, in Q and in K; instructions that
/// take the one for a zero are not enough.
TEST_P(Targets, SubnormalNumbersCount) {
  const ForcedTarget forced(GetParam());
  for (const bool in_q : {false, true}) {
    AttentionCase row;
    row.plain = DType::kBFloat16;
    row.requests = {{70, 200}, {300, 300}};
    row.mask.causal = true;
    row.out_dtype = DType::kFloat32;
    const Problem p = make_problem(row);
    const auto times = [](const Tensor& x, float factor, std::int64_t step) {
      for (std::int64_t i = 0; i < x.numel(); i += step) x.set(i, x.get(i) * factor);
    };
    times(p.q, in_q ? 0x1p-127F : 0x1p124F, 1);
    times(p.k, in_q ? 0x1p124F : 0x1p-127F, 1);
    EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << (in_q ? "in Q" : "in K");
    const Outputs outputs = run_problem(p);
    double spread = 0;  // of the logits: the LSE is not that of zeros
    for (std::int64_t i = 0; i < row.q_heads; ++i)
      spread = std::max(spread, std::abs(outputs.lse.get(i) - std::log(131.0)));
    EXPECT_GT(spread, 1e-3) << (in_q ? "in Q" : "in K");
  }
}

/// Nor are subnormal products of normal numbers zeros: `scale` may make any logit of them.
TEST_P(Targets, SubnormalProductsCount) {
  const ForcedTarget forced(GetParam());
  for (const float unit : {0x1p-64F, 0x1p-60F}) {
    AttentionCase row;
    row.plain = DType::kBFloat16;
    row.requests = {{70, 200}, {300, 300}};
    row.mask.causal = true;
    row.out_dtype = DType::kFloat32;
    row.scale = 0.125F / (unit * unit);
    const Problem p = make_problem(row);
    for (const Tensor* x : {&p.q, &p.k}) {
      for (std::int64_t i = 0; i < x->numel(); ++i) x->set(i, x->get(i) * unit);
    }
    EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << unit;
  }
}

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

/// Where Q of query 3 and head 1 begins, a row in which tests put odd values.
std::int64_t odd_row(const AttentionCase& row) { return (std::int64_t{3} * row.q_heads + 1) * row.head_dim; }

/// Outputs with `odd` in that row: no other row's bits are changed, and its own is NaN where `odd` is no
/// finite number. `p` is as before afterwards.
Outputs expect_an_odd_row_alone(const Problem& p, const Outputs& clean, float odd, const std::string& what) {
  const std::int64_t dim = p.row.head_dim, at = odd_row(p.row);
  const float before = p.q.get(at + 7);
  p.q.set(at + 7, odd);
  Outputs here = run_problem(p);
  p.q.set(at + 7, before);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < here.out.numel(); ++i) {
    const bool own = i >= at && i < at + dim;
    if (own && !std::isfinite(odd)) {
      EXPECT_TRUE(std::isnan(here.out.get(i))) << what << ", " << odd;
    }
    different += !own && here.out.get(i) != clean.out.get(i) ? 1 : 0;
  }
  EXPECT_EQ(different, 0) << what << ", " << odd;
  return here;
}

/// Of a row that is too large or too small, or no number, its neighbours see nothing.
TEST_P(Targets, OddQueriesAndTheirNeighbours) {
  const ForcedTarget forced(GetParam());
  for (const std::string format : {"int8-head", "fp8-token-head", "bf16"}) {
    AttentionCase row = key_pairs_case();
    row.k_format = format;
    const Problem p = make_problem(row);
    const Outputs clean = run_problem(p);
    for (const float odd : {0x1p-130F, 0x1p-70F, 0x1p115F, 0x1p127F, kInf, -kInf, kNan}) {
      (void)expect_an_odd_row_alone(p, clean, odd, format);
    }
  }
}

/// A rotated Q against codes, as fixed-point numbers where there are products of bytes: as accurate as fp32,
/// whatever the row holds beside numbers of ordinary size, and rows do not depend on each other.
TEST_P(Targets, RotatedQueriesAreAsAccurate) {
  const ForcedTarget forced(GetParam());
  int n = 0;
  for (const int head_dim : {64, 80, 128, 192, 256, 512}) {
    for (const std::string format : {"int8-head", "int8-static-head", "int8-token-asym-f32", "int4-token-sym",
                                     "int4-row", "int8-g128", "int4-g32"}) {
      ++n;
      if (head_dim % 128 != 0 && format == "int8-g128") continue;
      if (head_dim % 32 != 0 && format == "int4-g32") continue;
      if (reference::kSanitized && n % 5 != 0) continue;
      AttentionCase row = key_pairs_case();
      row.head_dim = head_dim;
      row.k_format = format;
      row.rotate_k = true;
      row.rotate_v = n % 2 == 0;
      row.mask.causal = n % 3 == 0;
      const Problem p = make_problem(row);
      const std::string what = format + ", head_dim " + std::to_string(head_dim);
      const Outputs clean = run_problem(p);
      EXPECT_EQ(judge(p, make_reference(p), clean), "") << what;
      for (const float odd : {0x1p-130F, 0x1p-20F, 0x1p3F, 0x1p115F, kInf, kNan}) {
        const Outputs here = expect_an_odd_row_alone(p, clean, odd, what);
        if (!(std::abs(odd) <= 8.0F)) continue;
        const float before = p.q.get(odd_row(row) + 7);
        p.q.set(odd_row(row) + 7, odd);
        EXPECT_EQ(judge(p, make_reference(p), here), "") << what << ", " << odd;
        p.q.set(odd_row(row) + 7, before);
      }
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

/// Sums of codes of 8 bits are exact: in fp32, four bytes at a time, and by tiles, which items of few rows do
/// not take.
TEST_P(Targets, SumsOfCodesAreTheSame) {
  if (!has_fma(GetParam())) GTEST_SKIP() << "no fused multiply-adds";
  int n = 0;
  for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
    for (const std::string format : {"plain bf16", "int8-head", "int4-row"}) {
      if (++n % 4 != 0 && reference::kSanitized) continue;
      AttentionCase row = half_int8_case();
      row.arithmetic = "full_int8";
      row.head_dim = head_dim;
      row.mask.causal = n % 2 == 0;
      row.requests = {{20, 200}, {70, 77}, {1, 129}, {33, 300}};
      if (format.starts_with("plain")) {
        row.plain = DType::kBFloat16;
      } else {
        row.k_format = format;
      }
      const Problem p = make_problem(row);
      expect_bits_of_the_best(GetParam(), p, format + ", head_dim " + std::to_string(head_dim));
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

/// Appended bytes and dequantised values are the same everywhere.
TEST_P(Targets, SameBytesInTheCache) {
  for (const std::string& format : typical_formats()) {
    AttentionCase row;
    row.requests = {{1, 50}, {1, 17}};
    row.k_format = format;
    row.rotate_k = row.rotate_v = true;
    const Problem best = make_problem(row);
    const reference::Dequantised expected = dequantised(*best.cache);
    const ForcedTarget forced(GetParam());
    const Problem here = make_problem(row);
    const reference::Dequantised actual = dequantised(*here.cache);
    EXPECT_TRUE(same_bytes(best.cache->pages, here.cache->pages)) << format;
    EXPECT_TRUE(same_bytes(expected.k, actual.k) && same_bytes(expected.v, actual.v)) << format;
  }
}

TEST_P(Targets, BatchInvariantBits) {
  const ForcedTarget forced(GetParam());
  for (const std::string& format : typical_formats()) {
    AttentionCase row;
    row.requests = {{1, 700}, {3, 33}, {1, 0}, {20, 90}};
    row.k_format = format;
    row.mask.causal = true;
    row.policy = SplitPolicy::kBatchInvariant;
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
    for (const int workers : {1, 5, 64}) {
      expect_same_bits(expected, run_problem(p, [&](AttentionProblem& a) { a.workers = workers; }), format);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Host, Targets, ::testing::ValuesIn(targets()), target_name);

}  // namespace
}  // namespace halftone::testing
