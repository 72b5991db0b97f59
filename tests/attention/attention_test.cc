// Attention against the double-precision oracle on the dequantised cache: the whole case table and random
// problems.
//
// ctest: 3 parts
// sanitizers: optimised
#include "halftone/attention.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "reference/sanitizer.h"
#include "testing/cases.h"

namespace halftone::testing {
namespace {

/// Relative rms error that storing N(0, 1) values may cost, by width; generous, for it guards against
/// misplaced values, not against imprecise ones.
double storage_error_limit(const KvFormat& format) {
  switch (format.dtype) {
    case DType::kBFloat16:
      return 0.004;
    case DType::kFloat16:
      return 0.0005;
    case DType::kFloat8E4M3:
      return 0.05;
    case DType::kInt8:
      return 0.03;
    default:
      return 0.3;
  }
}

double relative_error(const Tensor& truth, const Tensor& actual) {
  const std::vector<float> t = truth.to_floats(), a = actual.to_floats();
  double error = 0, power = 0;
  for (std::size_t i = 0; i < t.size(); ++i) {
    const double e = a[i] - t[i];
    error += e * e;
    power += static_cast<double>(t[i]) * t[i];
  }
  return std::sqrt(error / power);
}

/// dequantize() against the exact values: two roundings of code * scale + min, and those of a rotation's
/// stages.
void expect_rounded(const Tensor& actual, const std::vector<double>& exact, bool rotated) {
  const auto dim = static_cast<std::size_t>(actual.shape()[2]);
  const std::vector<float> x = actual.to_floats();
  ASSERT_EQ(x.size(), exact.size());
  for (std::size_t row = 0; row < exact.size(); row += dim) {
    double largest = 0;
    for (std::size_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(exact[row + d]));
    const double limit = std::ldexp(largest, rotated ? -19 : -22);
    for (std::size_t i = row; i < row + dim; ++i) {
      if (std::abs(x[i] - exact[i]) <= limit) continue;  // the macro is slow
      ASSERT_NEAR(x[i], exact[i], limit) << "element " << i;
    }
  }
}

/// The oracle works on what the pages hold, so that must be what was appended and what dequantize() returns.
void expect_cache_holds_input(const Problem& p) {
  if (!p.cache || p.k.numel() == 0) return;
  const reference::Dequantised d = dequantised(*p.cache);
  const reference::ExactValues exact = exact_values(*p.cache);
  expect_rounded(d.k, exact.k, p.row.rotate_k);
  expect_rounded(d.v, exact.v, p.row.rotate_v);
  const double rotary = p.row.rope_dim != 0 ? storage_error_limit({}) : 0;  // bf16
  const auto limit = [&](const KvFormat& format) { return std::max(storage_error_limit(format), rotary); };
  if (p.row.data == Data::kNormal) {
    EXPECT_LT(relative_error(p.k, d.k), limit(p.cache->spec.k_format)) << p.row.k_format;
  }
  EXPECT_LT(relative_error(p.v, d.v), limit(p.cache->spec.v_format)) << p.row.v_format;
}

void expect_within_tolerance(const AttentionCase& row) {
  const Problem p = make_problem(row);
  const Outputs outputs = run_problem(p);
  if (!row.step.appends) expect_cache_holds_input(p);
  EXPECT_EQ(judge(p, make_reference(p), outputs), "");
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0);
}

class AttentionTable : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionTable, WithinTolerance) { expect_within_tolerance(GetParam()); }

std::string test_name(const ::testing::TestParamInfo<AttentionCase>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionTable, ::testing::ValuesIn(attention_cases()), test_name);

TEST(Attention, RandomProblems) {
  const char* wanted = std::getenv("HALFTONE_FUZZ_CASES");
  const char* first = std::getenv("HALFTONE_FUZZ_SEED");
  const std::uint64_t count = wanted ? std::strtoull(wanted, nullptr, 10) : reference::kSanitized ? 60 : 400;
  const std::uint64_t begin = first ? std::strtoull(first, nullptr, 10) : 0;
  for (std::uint64_t seed = begin; seed < begin + count; ++seed) {
    SCOPED_TRACE("repeat with HALFTONE_FUZZ_SEED=" + std::to_string(seed) + " HALFTONE_FUZZ_CASES=1");
    try {
      expect_within_tolerance(random_case(seed));
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
    if (HasFailure()) return;
  }
}

/// One call without a caller's workspace gives the same bits as plan, schedule and run.
TEST(Attention, AttendEqualsPlanScheduleRun) {
  for (const char* name : {"format-int8-head-d128", "plain-f32-d64", "prefill-300-of-700"}) {
    const Problem p = make_problem(find_case(name));
    const Outputs expected = run_problem(p);
    const Outputs actual = make_outputs(p);
    attend(p.problem, arguments(p, actual));
    EXPECT_TRUE(same_bytes(expected.out, actual.out)) << name;
    EXPECT_TRUE(same_bytes(expected.lse, actual.lse)) << name;
  }
}

/// A paged bf16 cache and plain bf16 tensors hold the same values, and one schedule serves several layers.
TEST(Attention, PagedBf16EqualsPlainTensors) {
  for (const Mask mask : {Mask{}, Mask{.causal = true}, Mask{.causal = true, .window_left = 20}}) {
    AttentionCase row;
    row.requests = {{1, 100}, {7, 65}, {40, 200}, {2, 0}};
    row.k_format = "bf16";
    row.mask = mask;
    row.out_dtype = DType::kFloat32;
    const Problem paged = make_problem(row);
    row.plain = DType::kBFloat16;
    Problem plain = make_problem(row);
    plain.q = paged.q.clone();
    const reference::Dequantised d = dequantised(*paged.cache);
    plain.k = Tensor::of(DType::kBFloat16, d.k.shape(), d.k.to_floats());
    plain.v = Tensor::of(DType::kBFloat16, d.v.shape(), d.v.to_floats());
    const Reference reference = make_reference(plain);
    EXPECT_EQ(judge(plain, reference, run_problem(plain)), "");
    EXPECT_EQ(judge(paged, reference, run_problem(paged)), "");
  }
}

TEST(Attention, OneScheduleServesSeveralLayers) {
  AttentionCase row = find_case("format-int4-g32-d128");
  const Problem first = make_problem(row);
  row.seed += 1;
  const Problem second = make_problem(row);
  const Plan plan = halftone::plan(first.problem);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  schedule(plan, first.lengths(), workspace.view());
  for (int step = 0; step < 2; ++step) {
    for (const Problem* p : {&first, &second}) {
      const Outputs outputs = make_outputs(*p);
      run(plan, arguments(*p, outputs), workspace.view());
      EXPECT_TRUE(same_bytes(outputs.out, run_problem(*p).out));
    }
  }
}

/// Lengths grow under one plan: schedule again, never plan again.
TEST(Attention, DecodeStepsUnderOnePlan) {
  AttentionCase row;
  row.requests = {{1, 15}, {1, 62}, {1, 127}};
  row.k_format = "int8-head";
  row.page_size = 16;
  row.out_dtype = DType::kFloat32;
  row.slack = 200;
  Problem p = make_problem(row);
  Random random(5);
  std::vector<int> capacities(3, 300);
  p.cache = std::make_unique<Cache>(p.cache->spec, capacities, random);
  const Plan plan = halftone::plan(p.problem);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  for (Request& r : p.row.requests) r.kv_len = 0;
  for (int step = 0; step < 40; ++step) {
    const std::vector<int> counts = {step % 3, 1, step % 7};
    const int tokens = counts[0] + counts[1] + counts[2];
    std::vector<float> x(static_cast<std::size_t>(tokens * row.kv_heads * row.head_dim));
    fill(random, Data::kNormal, x, row.kv_heads, row.head_dim);
    const Tensor k = Tensor::of(DType::kBFloat16, {tokens, row.kv_heads, row.head_dim}, x);
    fill(random, Data::kNormal, x, row.kv_heads, row.head_dim);
    const Tensor v = Tensor::of(DType::kBFloat16, {tokens, row.kv_heads, row.head_dim}, x);
    p.cache->append(counts, k, v);
    for (std::size_t i = 0; i < 3; ++i) p.row.requests[i].kv_len += counts[i];
    const Outputs outputs = make_outputs(p);
    schedule(plan, p.lengths(), workspace.view());
    run(plan, arguments(p, outputs), workspace.view());
    ASSERT_EQ(judge(p, make_reference(p), outputs), "") << "step " << step;
  }
}

}  // namespace
}  // namespace halftone::testing
