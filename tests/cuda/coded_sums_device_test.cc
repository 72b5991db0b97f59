// Sums of arithmetic of 8 bits on the GPU: what products of E4M3 lose, sums that move to others, offsets that
// rise, against the double oracle of the codes.
#include <cmath>
#include <cstdint>
#include <string>

#include "tests/cuda/coded_device.h"

namespace halftone::testing {
namespace {

/// Sums of E4M3 products keep some 13 bits: what a tile adds to O would be lost, or rounded towards 0 each
/// time, once O is a few thousand times as large.
TEST_P(DeviceCoded, LongContextsKeepTheirSums) {
  for (const CodedDims dims : kCodedDims) {
    if (dims.k != 128 && !fp8()) continue;
    const int keys = dims.k == 128 ? 100'000 : 30'000;
    AttentionCase row = coded_case("fp8", "fp8", dims, DType::kBFloat16, {{40, keys}});
    row.q_heads = row.kv_heads = 1;
    row.data = Data::kConstant;
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Reference reference = make_reference(p, false);
    for (const int workers : {0, 1}) {  // one cuts nothing
      p.problem.workers = workers;
      expect_whole(reference, run_on_device(p), 0.005);
    }
  }
}

/// What sums of E4M3 products lose is towards 0: it adds up where all values of V have one sign, and only
/// there.
TEST_P(DeviceCoded, SumsOfOneSign) {
  for (const CodedDims dims : kCodedDims) {
    for (const SplitPolicy policy : {SplitPolicy::kFast, SplitPolicy::kBatchInvariant}) {
      AttentionCase row = coded_case("fp8", "fp8", dims, DType::kBFloat16, {{40, 12'000}});
      row.q_heads = row.kv_heads = 1;
      row.workers = 1;  // cuts nothing
      row.policy = policy;
      for (const float sign : {1.0F, -1.0F}) {
        Problem p = make_problem(row);
        if (!serves(p)) continue;
        lift_values(p, sign);
        const bool turns = turns_values(dims.k, policy);
        const double lost = expect_whole(make_reference(p, false), run_on_device(p), turns ? 0.026 : 0.035);
        EXPECT_LT(lost, turns ? 0.018 : 0.028) << "head_dim " << dims.name();
        EXPECT_GT(lost, -0.002) << "head_dim " << dims.name();
      }
    }
  }
}

/// The keys that come first, which are the last ones, weigh most, as a recent past does: what they add to O
/// must not make it lose the rest.
TEST_P(DeviceCoded, SumsOfARecentPast) {
  for (const CodedDims dims : kCodedDims) {
    for (const double slope : {1.0 / 1024, 1.0 / 256}) {  // base 2, of a key
      AttentionCase row = coded_case("fp8", "fp8", dims, DType::kBFloat16, {{40, 12'000}});
      row.q_heads = row.kv_heads = 1;
      row.workers = 1;
      row.alibi = true;
      Problem p = make_problem(row);
      if (!serves(p)) continue;
      lift_values(p);
      p.alibi_slopes.set(0, static_cast<float>(slope / 1.442695));
      const double lost = expect_whole(make_reference(p, false), run_on_device(p), 0.045);
      EXPECT_LT(lost, 0.036) << "head_dim " << dims.name() << ", slope " << slope;
    }
  }
}

/// A worker that has several items keeps the sums of each apart, in the same places after each other,
/// whatever was there before. Requests without sums of earlier tiles lie between, and some whose first tile
/// moves.
TEST_P(DeviceCoded, SumsOfOneItemAfterTheOther) {
  for (const CodedDims dims : kCodedDims) {
    AttentionCase row = coded_case(own_format(), value_format(), dims, DType::kBFloat16,
                                   {{200, 3400}, {9, 500}, {70, 2500}, {40, 1536}, {20, 1280}, {30, 1024}});
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    lift_values(p);
    SCOPED_TRACE(row.name);
    const Reference reference = make_reference(p, false);
    for (const SplitPolicy policy : {SplitPolicy::kFast, SplitPolicy::kBatchInvariant}) {
      p.problem.workers = 2;
      p.problem.policy = policy;
      const Plan plan = plan_on_device(p);
      if (turns_values(dims.k, policy)) {
        EXPECT_EQ(plan.info().row_block, 128);
      }
      DeviceRun device(p, plan, 0x7F);
      device.schedule();
      device.run();
      const Outputs outputs = device.outputs();
      EXPECT_EQ(judge_device(p, outputs), "") << row.name;
      expect_whole(reference, outputs, 0.04);
      device.run();
      expect_same_bits(outputs, device.outputs(), row.name + ", once more");
      if (policy != SplitPolicy::kBatchInvariant) continue;  // else no unit is cut
      p.problem.workers = 0;
      expect_same_bits(outputs, run_on_device(p), row.name + ", a worker for each");
    }
  }
}

/// Keys are walked from the last to the first: logits that rise that way, by powers of two that E4M3 holds,
/// that a float holds and that none does, tile after tile, beside rows whose logits fall. O of E4M3 moves on
/// twice or more, the second time with offsets that are a little larger, or much.
TEST_P(DeviceCoded, LogitsThatRise) {
  for (const CodedDims dims : kCodedDims) {
    for (const float step : {0.5F, 4.0F, 30.0F, 140.0F}) {  // base 2, of 96 keys
      AttentionCase row = coded_case("fp8", value_format(), dims, DType::kBFloat16, {{70, 3300}, {5, 300}});
      row.q_heads = row.kv_heads = 1;
      Problem p = make_problem(row);
      if (!serves(p)) continue;
      const float log2 =
          std::sqrt(static_cast<float>(dims.k)) * 1.442695F;  // of a logit, where all dims are 1
      const std::int64_t tokens = p.k.shape()[0];
      for (std::int64_t i = 0; i < p.k.numel(); ++i) {
        const std::int64_t left = tokens - i / dims.k;
        p.k.set(i, static_cast<float>(left) / 96.0F * step / log2);
      }
      for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, i / dims.k % 3 == 0 ? -1.0F : 1.0F);
      lift_values(p);
      SCOPED_TRACE(row.name + ", steps of " + std::to_string(step));
      const Reference reference = make_reference(p, false);
      for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kFast,
                                       SplitPolicy::kBatchInvariant}) {  // the last cuts none
        p.problem.policy = policy;
        const Outputs outputs = run_on_device(p);
        EXPECT_EQ(judge_device(p, outputs), "");
        expect_whole(reference, outputs, 0.07);  // a row may be of one key, whose P is rounded
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, DeviceCoded, ::testing::Values("half_int8", "fp8"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace halftone::testing
