// Steps in one call, attention that appends, against the same steps by append() and then run().
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "testing/runner.h"
#include "testing/step.h"
#include "tests/kv_of.h"

namespace halftone::testing {

inline constexpr std::array kPoliciesOfSteps = {SplitPolicy::kReproducible, SplitPolicy::kFast,
                                                SplitPolicy::kBatchInvariant};
inline constexpr std::array kRopesOfSteps = {RopePairing::kNone, RopePairing::kHalf,
                                             RopePairing::kInterleaved};

/// What a step leaves behind.
struct After {
  Outputs outputs;
  Tensor pages, lengths;
};

/// append(), then run() of a plan that does not.
inline After in_two_calls(const Runner& runner, Problem p) {
  const Tensor cu = cumulative_queries(p.row);
  Tensor status(DType::kInt32, {1});
  status.fill_bytes(0);
  runner.append(*p.cache, append_args(p, cu, status), status);
  for (std::size_t i = 0; i < p.row.requests.size(); ++i) {
    p.cache->lengths.as<std::int32_t>()[i] = p.row.requests[i].kv_len;
  }
  p.row.step = {};
  p.problem.appends = false;
  After after{runner.run(p), p.cache->pages.clone(), p.cache->lengths.clone()};
  after.outputs.status.as<std::int32_t>()[0] |= status.as<std::int32_t>()[0];
  return after;
}

/// run() with the arguments that `change` makes of the problem's, where the backend finds these.
inline After in_one_call(const Runner& runner, const Problem& p, bool advance,
                         const std::function<void(AttentionArgs&)>& change = {}) {
  PlacedRun placed(runner, p);
  placed.args.append.advance = advance;
  if (change) change(placed.args);
  placed.schedule();
  placed.run();
  After after{placed.outputs(), p.cache->pages.clone(), p.cache->lengths.clone()};
  const PagedKv& cache = cache_of(placed.args);
  placed.read(cache.pages, after.pages);
  placed.read(cache.lengths, after.lengths);
  return after;
}

/// The same bytes of pages, lengths, outputs and status either way. Returns what the one call leaves.
inline After expect_same_step(const Runner& runner, Problem p, bool advance = true,
                              const std::function<void(AttentionArgs&)>& change = {}) {
  auto before = std::make_unique<Cache>(p.cache->clone());
  After one = in_one_call(runner, p, advance, change);
  const Tensor lengths = before->lengths.clone();
  const bool lse = p.row.lse;
  p.cache = std::move(before);
  const After two = in_two_calls(runner, std::move(p));
  EXPECT_TRUE(same_bytes(two.pages, one.pages));
  EXPECT_TRUE(same_bytes(advance ? two.lengths : lengths, one.lengths));
  EXPECT_TRUE(same_bytes(two.outputs.out, one.outputs.out));
  EXPECT_TRUE(!lse || same_bytes(two.outputs.lse, one.outputs.lse));
  EXPECT_TRUE(same_bytes(two.outputs.status, one.outputs.status));
  return one;
}

/// Steps of an engine: one schedule, layers that share their lengths, of which the first, the last or every
/// one advances; the next step counts on.
class EngineSteps {
 public:
  static constexpr int kLayers = 3;

  /// Over caches of the row's kind; `steps`: at most 20.
  EngineSteps(const Runner& runner, AttentionCase row, int steps) : runner_(runner), steps_(steps) {
    row.requests = {{1, 16}, {2, 60}, {3, 126}};
    row.page_size = 16;
    row.mask.causal = true;
    row.slack = 200;
    row = appending(row);
    for (int layer = 0; layer < kLayers; ++layer) {
      row.seed = static_cast<std::uint64_t>(layer) + 1;
      Problem p = make_problem(row);
      Random random(row.seed);
      Cache roomy(p.cache->spec, std::array{100, 200, 300}, random);
      roomy.lengths = p.cache->lengths.clone();
      roomy.pages.fill_bytes(0);  // stored zeros
      p.cache = std::make_unique<Cache>(std::move(roomy));
      layers_.push_back(std::move(p));
    }
  }

  /// `advancing`: the layer that does it, kLayers: all.
  void expect_each_token_in_its_place(int advancing) {
    const Plan plan = runner_.plan(layers_[0]);
    std::vector<Cache> expected;
    for (const Problem& p : layers_) expected.push_back(p.cache->clone());
    std::vector<std::unique_ptr<PlacedRun>> runs;
    for (const Problem& p : layers_) {
      runs.push_back(std::make_unique<PlacedRun>(runner_, p, plan));
      const TensorView& lengths = cache_of(runs[0]->args).lengths;
      cache_of(runs.back()->args).lengths = runs.back()->args.lengths.kv_lengths = lengths;
      runs.back()->args.append.advance = advancing == kLayers || advancing + 1U == runs.size();
    }
    for (int step = 0; step < steps_; ++step) {
      runs[0]->schedule();
      for (const auto& run : runs) halftone::run(plan, run->args, runs[0]->space());
    }
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      expect_layer(layers_[layer], expected[layer], *runs[layer]);
    }
  }

 private:
  /// The same steps of a layer by append(), and attention after the last one.
  void expect_layer(const Problem& p, Cache& expected, const PlacedRun& run) const {
    Tensor status(DType::kInt32, {1});
    status.fill_bytes(0);
    const Tensor cu = cumulative_queries(p.row);
    AppendArgs args = append_args(p, cu, status);
    args.advance = true;
    for (int step = 0; step < steps_; ++step) runner_.append(expected, args, status);
    Problem twin = make_problem(p.row);
    twin.row.step = {};
    twin.problem.appends = false;
    twin.cache = std::make_unique<Cache>(std::move(expected));
    const Outputs want = runner_.run(twin), got = run.outputs();
    EXPECT_TRUE(same_bytes(want.out, got.out));
    EXPECT_TRUE(same_bytes(want.lse, got.lse));
    const Tensor pages = p.cache->pages.clone(), lengths = p.cache->lengths.clone();
    run.read(cache_of(run.args).pages, pages);
    run.read(cache_of(run.args).lengths, lengths);
    EXPECT_TRUE(same_bytes(twin.cache->pages, pages));
    EXPECT_TRUE(same_bytes(twin.cache->lengths, lengths));
  }

  const Runner& runner_;
  int steps_;
  std::vector<Problem> layers_;
};

inline void expect_steps_of_an_engine(const Runner& runner, const AttentionCase& row, int steps) {
  for (const int advancing : {0, EngineSteps::kLayers - 1, EngineSteps::kLayers}) {
    SCOPED_TRACE(row.name + ", advanced by " + std::to_string(advancing));
    EngineSteps(runner, row, steps).expect_each_token_in_its_place(advancing);
  }
}

}  // namespace halftone::testing
