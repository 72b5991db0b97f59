// Every instruction set that this machine has: accuracy, and bits that do not depend on how work is divided.
//
// ctest: 2 parts
#include "tests/attention/targets.h"
//
#include <algorithm>
#include <cmath>

#include "cpu/element.h"
#include "cpu/quantise.h"
#include "format/codec.h"

namespace halftone::testing {
namespace {

/// Against one oracle on every target.
void expect_agrees_on_targets(const AttentionCase& row, const std::string& name) {
  const Problem p = make_problem(row);
  const Reference reference = make_reference(p);
  for (const std::int64_t target : targets()) {
    EXPECT_EQ(judge(p, reference, run_on(target, p)), "") << name << ", " << hwy::TargetName(target);
  }
}

/// A share of problems for each parameter.
constexpr int kShares = 6;
class ProblemsOnTargets : public ::testing::TestWithParam<int> {};

/// Every third row of the case table, every format among them.
TEST_P(ProblemsOnTargets, CaseTable) {
  constexpr int kEach = reference::kSanitized ? 12 : 3;
  int n = 0;
  for (const AttentionCase& row : attention_cases()) {
    if (n++ % (kEach * kShares) == kEach * GetParam()) expect_agrees_on_targets(row, row.name);
  }
}

TEST_P(ProblemsOnTargets, RandomProblems) {
  for (int i = GetParam(); i < (reference::kSanitized ? 10 : 60); i += kShares) {
    const auto seed = static_cast<std::uint64_t>(10000 + i);
    expect_agrees_on_targets(random_case(seed), "random_case(" + std::to_string(seed) + ")");
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

/// A key that has nearly all of the weight and no V, as an attention sink: the others keep theirs, also where
/// no scale of its own says how small its V is.
TEST_P(Targets, ASinkWithoutValues) {
  for (const char* v : {"int8-tensor", "int8-static-head", "int8-token", "int8-token-f32", "int8-head",
                        "int8-g32", "int8-tensor-asym", "int4-row", "int4-g32"}) {
    for (const float gap : {6.0F, 10.0F, 12.0F}) {
      AttentionCase row;
      row.head_dim = 64;
      row.q_heads = 4;
      row.kv_heads = 2;
      row.requests = {{1, 130}, {3, 300}};
      row.k_format = "bf16";
      row.v_format = v;
      row.q_dtype = DType::kBFloat16;
      Problem p = make_problem(row);
      const std::int64_t width = std::int64_t{row.kv_heads} * row.head_dim;
      for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, 1.0F);
      for (std::int64_t i = 0; i < p.k.numel(); ++i) {
        const std::int64_t token = i / width;
        const bool sink = token == 0 || token == 130;
        p.k.set(i, sink ? gap / 8 : 0.0F);
        p.v.set(i, sink ? 0.0F : 0.5F + std::abs(p.v.get(i)));
      }
      p.cache->calibrate(p.k, p.v);
      p.cache = refilled(p, {0xFF});
      EXPECT_EQ(judge(p, make_reference(p), run_on(GetParam(), p)), "") << v << ", " << gap;
    }
  }
}

/// f16 that is not finite is not on targets that have no instruction for f16 either.
TEST_P(Targets, InfinitiesAndNans) {
  for (const DType plain : {DType::kFloat16, DType::kBFloat16}) {
    AttentionCase row;
    row.plain = plain;
    row.requests = {{1, 40}, {20, 60}};
    row.out_dtype = DType::kFloat32;
    const Problem p = make_problem(row);
    p.v.set(5, INFINITY);
    p.v.set(7, -INFINITY);
    p.v.set(40 * p.v.view().shape[1] * p.v.view().shape[2] + 9, NAN);  // of the second request
    const Outputs best = run_problem(p), here = run_on(GetParam(), p);
    int infinities = 0, nans = 0;
    for (std::int64_t i = 0; i < best.out.numel(); ++i) {
      const float x = best.out.get(i), y = here.out.get(i);
      infinities += std::isinf(x) ? 1 : 0, nans += std::isnan(x) ? 1 : 0;
      ASSERT_EQ(std::isnan(x), std::isnan(y)) << i;
      ASSERT_EQ(std::isinf(x), std::isinf(y)) << i;
      if (std::isinf(x)) {
        ASSERT_EQ(x, y) << i;
      }
    }
    EXPECT_GT(infinities, 0);
    EXPECT_GT(nans, 0);
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

/// Rows of any length are rounded to 16 bits as codec.h has it.
TEST_P(Targets, RowsAreRoundedAsByCodecs) {
  const ForcedTarget forced(GetParam());
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 0x10000; upper += reference::kSanitized ? 7 : 1) {
    for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x0fffU, 0x1000U, 0x1001U, 0x2000U, 0x3000U, 0x4000U,
                                      0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      values.push_back(codec::float_of(upper << 16 | lower));
    }
  }
  values.pop_back();
  std::vector<std::uint16_t> stored(values.size());
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    cpu::store_row(dtype, values.data(), static_cast<int>(values.size()), stored.data());
    int different = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float x = values[i];
      different += stored[i] != (dtype == DType::kFloat16 ? codec::f16_from_f32(x) : codec::bf16_from_f32(x));
    }
    EXPECT_EQ(different, 0) << dtype_name(dtype);
  }
}

/// Values of every size, steps of a scale and halves of steps among them.
std::vector<float> values_around(const codec::Params& params) {
  std::vector<float> values = {0.0F, -0.0F, 1e30F, -1e30F, 0x1p-140F, -0x1p-140F, INFINITY, -INFINITY};
  for (int i = -600; i <= 600; ++i) {
    const float half_steps = params.min + params.scale * static_cast<float>(i) / 2;
    for (const float x : {half_steps, std::nextafter(half_steps, 1e9F), std::nextafter(half_steps, -1e9F)})
      values.push_back(x);
  }
  for (int i = -40; i <= 40; ++i)
    values.push_back(params.scale * static_cast<float>(i) * 0x1p-10F);  // E4M3's
  for (std::uint32_t upper = 0; upper < 0x7f80; upper += 13) {
    values.push_back(codec::float_of(upper << 16 | 0x8000U));
    values.push_back(codec::float_of(upper << 16 | 0x80010000U));
  }
  return values;
}

TEST_P(Targets, RowsBecomeTheCodesOfCodecs) {
  const ForcedTarget forced(GetParam());
  for (const char* name :
       {"int8-head", "int8-token-head-asym", "int4-row", "int4-g32-sym", "fp8-token-head", "bf16", "fp16"}) {
    const KvFormat format = parse_format(name);
    for (const codec::Params& params : {codec::Params{0.75F, 0.0F, 1 / 0.75F},
                                        {1.0F, -3.5F, 1.0F},
                                        {0.011F, 0.25F, 1 / 0.011F},
                                        {1.0F, 0.0F, 0.0F}}) {
      if (!format.asymmetric && params.min != 0.0F) continue;
      std::vector<float> values = values_around(params);
      if (dtype_bits(format.dtype) != 16) values.push_back(NAN);
      codec::with_codec(format, [&](auto own) {
        std::vector<typename decltype(own)::Code> codes(values.size());
        cpu::encode_row(format.dtype, format.asymmetric, params, values.data(),
                        static_cast<int>(values.size()), codes.data());
        for (std::size_t i = 0; i < values.size(); ++i)
          ASSERT_EQ(codes[i], own.encode(params, values[i]))
              << name << ", " << values[i] << ", scale " << params.scale;
      });
    }
  }
}

TEST_P(Targets, ExtentsOfRows) {
  const ForcedTarget forced(GetParam());
  Random random(3);
  for (const int count : {1, 7, 8, 16, 31, 32, 80, 128}) {
    for (int end = 0; end < count; ++end) {
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& x : values) x = random.normal();
      values[static_cast<std::size_t>(end)] = -9.0F;
      values[static_cast<std::size_t>(count - 1 - end)] += 20.0F;
      codec::Range expected;
      for (const float x : values) expected.include(x);
      const codec::Range range = cpu::row_range(values.data(), count);
      ASSERT_EQ(range.lo, expected.lo) << count;
      ASSERT_EQ(range.hi, expected.hi) << count;
      values[static_cast<std::size_t>((end + 3) % count)] = NAN;
      expected = {};
      for (const float x : values) expected.include(x);
      const codec::Range without = cpu::row_range(values.data(), count);
      ASSERT_EQ(without.lo, expected.lo) << count;
      ASSERT_EQ(without.hi, expected.hi) << count;
    }
  }
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
INSTANTIATE_TEST_SUITE_P(Share, ProblemsOnTargets, ::testing::Range(0, kShares));

}  // namespace
}  // namespace halftone::testing
