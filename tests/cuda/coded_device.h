// What tests of arithmetic of 8 bits over caches on the GPU ask for.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cuda/prefill/estimate.h"
#include "tests/attention/prefill_cases.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/coded_dims.h"
#include "tests/cuda/prefill_plans.h"

namespace halftone::testing {

/// Runs rows and counts those that had a kernel, so that no test passes for want of one.
class DeviceCoded : public ::testing::TestWithParam<const char*> {
 protected:
  bool fp8() const { return std::string_view(GetParam()) == "fp8"; }
  /// Whose codes of K are taken as they are, and V that each arithmetic has.
  const char* own_format() const { return fp8() ? "fp8-token-head" : "int8-head"; }
  const char* value_format() const { return fp8() ? "fp8-static-head" : "int8-head"; }
  /// And V that becomes codes of E4M3.
  std::vector<std::string> value_formats() const {
    std::vector<std::string> formats = {value_format()};
    if (fp8()) formats.insert(formats.end(), {"int4-g32", "bf16"});
    return formats;
  }
  bool serves(const Problem& p) {
    const bool has = cuda_runner().serves(p);
    served_ += has ? 1 : 0;
    return has;
  }
  /// By every kernel that serves the row.
  void expect_agrees(const AttentionCase& row) {
    const Problem p = make_problem(row);
    if (!serves(p)) return;
    expect_agrees(p);
    const auto& spec = std::get<KvCacheSpec>(p.problem.kv);
    if (!fp8() || !cuda::has_codes(spec, DType::kFloat8E4M3) || !cuda::has_value_codes(spec)) return;
    for (const AttentionCase& shape : shapes_of(row)) {
      if (shape.name != row.name) expect_agrees(make_problem(shape));
    }
  }
  void expect_agrees(const Problem& p) {
    SCOPED_TRACE(p.row.name);
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "");
    EXPECT_EQ(status_of(outputs), 0);
  }
  /// Causal, four query heads over two KV heads.
  AttentionCase coded_case(const std::string& k_format, const std::string& v_format, CodedDims dims,
                           DType q_dtype, const std::vector<Request>& requests) const {
    AttentionCase row = prefill_case(q_dtype, dims.k, false, requests);
    row.v_head_dim = dims.v;
    row.q_heads = 4;
    row.k_format = k_format;
    row.v_format = v_format;
    row.arithmetic = GetParam();
    row.name = "K " + k_format + ", V " + v_format + ", head_dim " + dims.name() + ", Q " +
               std::string(dtype_name(q_dtype));
    return row;
  }
  /// Makes V of one sign, so that no part of a sum can be missing unseen.
  static void lift_values(Problem& p, float sign = 1.0F) {
    for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, sign * (0.3F + std::abs(p.v.get(i))));
    p.cache = refilled(p, {0xFF});
  }
  /// Of such a V, or a constant one: no output is off by more than `most` of itself. Returns by how much of
  /// it they are too small, on average.
  static double expect_whole(const Reference& reference, const Outputs& outputs, double most) {
    const std::vector<float> out = outputs.out.to_floats();
    double lost = 0, worst = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double off = 1 - static_cast<double>(out[i]) / reference.out[i];
      lost += off;
      worst = std::max(worst, std::abs(off));
    }
    EXPECT_LT(worst, most);
    EXPECT_FALSE(std::isnan(lost));
    return lost / static_cast<double>(out.size());
  }
  /// Whether the plan of such a case reads V in its pages, and turns it over in the kernel.
  bool turns_values(int head_dim, SplitPolicy policy) const {
    return fp8() && head_dim == 128 && policy == SplitPolicy::kFast;
  }
  void TearDown() override {
    const Problem p = make_problem(for_table(decode_case("int8-head")));
    if (is_universal(p)) GTEST_SKIP() << "a build of head_dim 64";
    EXPECT_GT(served_, 0) << "no kernel of " << GetParam() << " is in this build";
  }

 private:
  int served_ = 0;
};

}  // namespace halftone::testing
