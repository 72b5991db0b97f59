// Batches of long and short requests: each is computed by the kernel that fits its own rows, on every
// backend.
#include <cstring>

#include "reference/sanitizer.h"
#include "tests/attention/select.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

/// 4 packed rows per query.
AttentionCase mixed_case(const std::string& format, SplitPolicy policy,
                         const std::vector<Request>& requests) {
  AttentionCase row;
  row.requests = requests;
  row.q_heads = 4;
  row.kv_heads = 1;
  row.k_format = format;
  row.mask.causal = true;
  row.policy = policy;
  row.workers = 7;
  row.cu_q = true;
  return row;
}

class Passes : public OnRunners {
 protected:
  /// The most queries of a request that the first of two passes serves, under bounds that need both.
  int short_queries(const std::string& format) const {
    AttentionCase row = mixed_case(format, SplitPolicy::kReproducible, {{1, 10}});
    row.slack = 1000;
    const PlanInfo info = runner().plan(attention_problem(row)).info();
    EXPECT_EQ(info.passes.size(), 2U) << runner().name();
    return info.passes.front().max_rows / info.group;
  }
};
HALFTONE_ON_EVERY_RUNNER(Passes);

/// A request alone, among single tokens, and beside a prompt of 4,096 tokens; under the batch's bounds and
/// its own.
TEST_P(Passes, BatchInvariantBitsDoNotDependOnLongNeighbours) {
  const int prompt = reference::kSanitized ? 500 : 4096;
  for (const char* format : {"int8-head", "bf16", "int4-g32"}) {
    const int most = short_queries(format);
    const Problem p = make_problem(mixed_case(
        format, SplitPolicy::kBatchInvariant,
        {{1, 700}, {prompt, prompt}, {most, 900}, {0, 50}, {most + 1, 900}, {1, 9000}, {1, 0}, {40, 2100}}));
    const Outputs expected = run(p);
    const auto expect_same = [&](const std::vector<std::size_t>& chosen, bool own_bounds) {
      const Problem s = select(p, chosen, own_bounds);
      const Outputs actual = run(s);
      for (std::size_t n = 0; n < chosen.size(); ++n) {
        ASSERT_EQ(request_bytes(p, expected.out, chosen[n]), request_bytes(s, actual.out, n))
            << format << ", request " << chosen[n] << " in a batch of " << chosen.size()
            << (own_bounds ? ", own bounds" : "");
        ASSERT_EQ(request_bytes(p, expected.lse, chosen[n]), request_bytes(s, actual.lse, n)) << format;
      }
    };
    for (const bool own_bounds : {true, false}) {
      for (const std::size_t request : {0U, 2U, 4U, 5U, 7U}) expect_same({request}, own_bounds);
      expect_same({5, 0, 6, 0}, own_bounds);
      expect_same({7, 2, 5, 4}, own_bounds);
    }
    expect_same({5, 1}, true);
  }
}

/// Lengths on both sides of the threshold, empty requests, and all requests in one of the two passes.
TEST_P(Passes, MixedBatchesAreWithinTolerance) {
  for (const char* format : {"int8-head", "bf16", "fp8-static-head", "int4-g32"}) {
    const int most = short_queries(format);
    const std::vector<std::vector<Request>> batches = {
        {{1, 700}, {300, 300}, {1, 33}, {most, 200}, {most + 1, 200}, {0, 40}, {1, 1300}, {0, 0}, {64, 500}},
        {{200, 100}, {1, 0}, {2, 1}, {0, 0}, {1, 5000}},
        {{1, 100}, {most, 900}, {0, 7}, {1, 2500}},  // under bounds for prompts
        {{most + 1, 50}, {100, 700}, {33, 33}},
        {{0, 100}, {0, 0}},
    };
    for (const SplitPolicy policy :
         {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      for (std::size_t n = 0; n < batches.size(); ++n) {
        AttentionCase row = mixed_case(format, policy, batches[n]);
        row.slack = 300;
        row.sinks = n == 0;
        row.mask.window_left = n == 3 ? 60 : -1;
        const Problem p = make_problem(row);
        const Plan plan = runner().plan(p);
        EXPECT_EQ(plan.info().passes.size(), 2U);
        EXPECT_EQ(judge(p, runner().run(p, plan)), "") << format << ", batch " << n;
      }
    }
  }
}

/// Without a pass for the requests of few queries, of which there are some after all.
TEST_P(Passes, RequestsShorterThanExpectedAreServed) {
  for (const char* format : {"int8-head", "bf16"}) {
    const int most = short_queries(format);
    Problem p =
        make_problem(mixed_case(format, SplitPolicy::kReproducible,
                                {{1, 700}, {300, 300}, {most, 200}, {0, 40}, {most + 1, 200}, {1, 0}}));
    ASSERT_EQ(runner().plan(p).info().passes.size(), 2U);
    p.problem.min_q_len = most + 1;
    const Plan plan = runner().plan(p);
    EXPECT_EQ(plan.info().passes.size(), 1U) << plan.describe();
    EXPECT_EQ(judge(p, runner().run(p, plan)), "") << format;
  }
}

/// One plan and one workspace, whose steps are of prompts, of single tokens and of both; layers in a chain.
TEST_P(Passes, OneWorkspaceServesEveryMixOfSteps) {
  const std::string format = "int8-head";
  const std::vector<Request> longest = {{60, 400}, {60, 900}, {60, 64}, {60, 1500}};
  const std::vector<std::vector<std::int32_t>> steps = {{1, 1, 1, 1}, {60, 1, 0, 1}, {60, 60, 60, 60},
                                                        {0, 0, 0, 0}, {1, 2, 20, 1}, {0, 60, 0, 0},
                                                        {1, 1, 1, 1}};
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    const Problem whole = make_problem(mixed_case(format, policy, longest));
    const Plan plan = runner().plan(whole);
    ASSERT_EQ(plan.info().passes.size(), 2U);
    const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
    workspace.fill_bytes(0xff);
    const std::unique_ptr<Place> there = runner().place();
    const TensorView space = there->add(workspace.view());
    for (const std::vector<std::int32_t>& lengths : steps) {
      Problem p = select(whole, {0, 1, 2, 3}, false);
      std::vector<std::int32_t> cu_q = {0};
      for (std::size_t r = 0; r < lengths.size(); ++r) {
        p.row.requests[r].q_len = lengths[r];
        cu_q.push_back(cu_q.back() + lengths[r]);
      }
      p.cu_q = Tensor::of({5}, cu_q);
      p.q = Tensor::of(p.row.q_dtype, {cu_q.back(), p.row.q_heads, p.row.head_dim},
                       std::vector<float>(static_cast<std::size_t>(cu_q.back() * 4 * 128), 0.25F));
      const Outputs expected = runner().run(p, plan), actual = make_outputs(p);
      AttentionArgs args = there->add(arguments(p, actual));
      schedule(plan, args.lengths, space);
      for (int layer = 0; layer < 5; ++layer) {
        args.cache_settled = layer > 0;
        halftone::run(plan, args, space);
      }
      there->finish();
      there->read(args.out, actual.out);
      there->read(args.lse, actual.lse);
      EXPECT_TRUE(same_bytes(expected.out, actual.out)) << "step of " << cu_q.back();
      EXPECT_TRUE(same_bytes(expected.lse, actual.lse)) << "step of " << cu_q.back();
      EXPECT_EQ(judge(p, actual), "") << "step of " << cu_q.back();
    }
  }
}

}  // namespace
}  // namespace halftone::testing
