// What each split policy promises about bits, on every backend, and that every split count is accurate.
#include <omp.h>

#include <numeric>

#include "halftone/attention.h"
#include "reference/sanitizer.h"
#include "tests/attention/select.h"
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

struct ThreadCount {
  explicit ThreadCount(int n) : saved(omp_get_max_threads()) { omp_set_num_threads(n); }
  ~ThreadCount() { omp_set_num_threads(saved); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;
  int saved;
};

AttentionCase mixed_case(const std::string& format, SplitPolicy policy) {
  AttentionCase row;
  row.requests = {{1, 700}, {1, 33}, {1, 1200}, {1, 1}, {1, 0}, {1, 512}, {1, 64}};
  row.k_format = format;
  row.out_dtype = DType::kFloat32;
  row.policy = policy;
  row.workers = 6;
  row.cu_q = true;
  return row;
}

std::vector<AttentionCase> policy_cases(SplitPolicy policy) {
  std::vector<AttentionCase> rows;
  for (const char* format : {"bf16", "fp8-static-head", "int8-head", "int4-g32", "int4-row"}) {
    rows.push_back(mixed_case(format, policy));
  }
  AttentionCase ragged = mixed_case("int8-g32", policy);
  ragged.requests = {{1, 400}, {5, 300}, {30, 130}, {1, 900}, {2, 2}, {64, 200}};
  ragged.mask.causal = true;
  ragged.sinks = true;
  rows.push_back(ragged);
  ragged.mask.window_left = 100;
  ragged.alibi = true;
  ragged.rotate_k = ragged.rotate_v = true;
  rows.push_back(ragged);
  ragged.plain = DType::kBFloat16;
  rows.push_back(ragged);
  return rows;
}

constexpr const char* kLongFormats[] = {"int4-g32", "int8-head", "fp8", "bf16", "int8-g32-f32"};

class Policies : public OnRunners {
 protected:
  /// Of the kernels for few rows, which on a GPU write 16 bits.
  std::vector<AttentionCase> cases(SplitPolicy policy) const {
    std::vector<AttentionCase> rows = policy_cases(policy);
    for (AttentionCase& row : rows) {
      if (!runner().checks_values()) row.out_dtype = DType::kBFloat16;
    }
    return rows;
  }
  Outputs run_with(const Problem& p, const std::function<void(AttentionProblem&)>& change) const {
    AttentionProblem problem = p.problem;
    change(problem);
    return runner().run(p, runner().plan(problem));
  }
  Outputs run_on(const Problem& p, int workers) const {
    return run_with(p, [&](AttentionProblem& a) { a.workers = workers; });
  }
};
HALFTONE_ON_EVERY_RUNNER(Policies);

TEST_P(Policies, ReproducibleRepeatsBits) {
  std::vector<AttentionCase> rows = cases(SplitPolicy::kReproducible);
  for (const char* format : kLongFormats) {
    for (const int q_len : {1, 12}) {
      for (const int workers : {0, 9}) {  // 9: a unit of several workers, the last of which has other items
        AttentionCase row;
        row.k_format = format;
        row.requests = {{q_len, 5000}, {q_len, 33}, {q_len, 12000}, {q_len, 2000}};
        row.workers = workers;
        rows.push_back(row);
      }
    }
  }
  for (const AttentionCase& row : rows) {
    const Problem p = make_problem(row, row.plain ? Fill::kAppend : Fill::kTiled);
    const Outputs expected = run(p);
    for (int repeat = 0; repeat < (reference::kSanitized ? 1 : 5); ++repeat)
      expect_same_bits(expected, run(p), row.k_format);
  }
}

/// The plan fixes the workers; how many threads carry them does not matter.
TEST(Reproducible, SameBitsForEveryThreadCount) {
  for (const AttentionCase& row : policy_cases(SplitPolicy::kReproducible)) {
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
    for (const int threads : {1, 2, 3, 8}) {
      const ThreadCount guard(threads);
      expect_same_bits(expected, run_problem(p), row.k_format + ", " + std::to_string(threads) + " threads");
    }
  }
}

TEST_P(Policies, BatchInvariantBitsForEveryWorkerAndThreadCount) {
  for (const AttentionCase& row : cases(SplitPolicy::kBatchInvariant)) {
    const Problem p = make_problem(row);
    const Outputs expected = run(p);
    for (const int workers : {1, 2, 3, 17, 133, 5000}) {
      const ThreadCount guard(1 + workers % 4);
      expect_same_bits(expected, run_on(p, workers),
                       row.k_format + ", " + std::to_string(workers) + " workers");
    }
  }
}

/// Whether a split is its worker's only item or one of many.
TEST_P(Policies, BatchInvariantBitsOfLongRequestsForEveryWorkerCount) {
  for (const char* format : kLongFormats) {
    for (const int head_dim : {64, 96, 128, 256}) {
      if (runner().checks_values() && head_dim != 64) continue;  // the CPU has one kernel for all
      for (const int q_len : {1, 2, 6}) {
        AttentionCase row;
        row.k_format = format;
        row.head_dim = head_dim;
        row.q_heads = 8;
        row.kv_heads = 1;
        row.policy = SplitPolicy::kBatchInvariant;
        row.requests = {{q_len, 13000}, {q_len, 4100}, {q_len, 7}, {q_len, 30000}};
        const Problem p = make_problem(row, Fill::kTiled);
        const Outputs expected = run_on(p, 1);
        for (const int workers : {2, 3, 17, 133}) {
          expect_same_bits(expected, run_on(p, workers),
                           std::string(format) + ", head_dim " + std::to_string(head_dim) + ", " +
                               std::to_string(q_len) + " queries, " + std::to_string(workers) + " workers");
        }
      }
    }
  }
}

/// Alone, in random subsets, at any position, under the batch's bounds or bounds of its own.
TEST_P(Policies, BatchInvariantBitsAloneAndInAnyBatch) {
  Random random(11);
  for (const AttentionCase& row : cases(SplitPolicy::kBatchInvariant)) {
    const Problem p = make_problem(row);
    const Outputs expected = run(p);
    std::vector<std::vector<std::size_t>> batches;
    for (std::size_t i = 0; i < row.requests.size(); ++i) batches.push_back({i});
    for (int n = 0; n < 6; ++n) {
      std::vector<std::size_t> order(row.requests.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      random.shuffle(order);
      order.resize(static_cast<std::size_t>(random.integer(1, static_cast<std::int64_t>(order.size()))));
      batches.push_back(order);
      order.push_back(order.front());  // one request twice: its pages are shared
      batches.push_back(order);
    }
    for (const bool own_bounds : {false, true}) {
      for (const auto& batch : batches) {
        const Problem s = select(p, batch, own_bounds);
        const Outputs actual = run_on(s, static_cast<int>(random.integer(1, 40)));
        for (std::size_t n = 0; n < batch.size(); ++n) {
          ASSERT_EQ(request_bytes(p, expected.out, batch[n]), request_bytes(s, actual.out, n))
              << row.k_format << ", request " << batch[n] << " in a batch of " << batch.size()
              << (own_bounds ? ", own bounds" : "");
          ASSERT_EQ(request_bytes(p, expected.lse, batch[n]), request_bytes(s, actual.lse, n))
              << row.k_format;
        }
      }
    }
  }
}

TEST_P(Policies, BatchInvariantBitsOfALongRequestAloneAndInCompany) {
  for (const char* format : kLongFormats) {
    AttentionCase row;
    row.k_format = format;
    row.policy = SplitPolicy::kBatchInvariant;
    row.requests = {{1, 9000}, {3, 4100}, {1, 7}, {1, 20000}};
    row.cu_q = true;
    const Problem batch = make_problem(row, Fill::kTiled), alone = select(batch, {0}, true);
    EXPECT_EQ(request_bytes(alone, run(alone).out, 0), request_bytes(batch, run(batch).out, 0)) << format;
  }
}

/// A request that decodes one more token under new bounds keeps the split boundaries of its prefix.
TEST_P(Policies, BatchInvariantBitsDoNotDependOnBounds) {
  for (const AttentionCase& row : cases(SplitPolicy::kBatchInvariant)) {
    const Problem p = make_problem(row);
    const Outputs expected = run(p);
    for (const int longer : {1, 1000, 200000}) {
      expect_same_bits(expected, run_with(p, [&](AttentionProblem& a) { a.max_kv_len += longer; }),
                       row.k_format + ", max_kv_len + " + std::to_string(longer));
    }
    expect_same_bits(expected, run_with(p, [](AttentionProblem& a) { a.max_q_len += 300; }),
                     row.k_format + ", max_q_len + 300");
  }
}

class SplitCounts : public ::testing::TestWithParam<SplitPolicy> {};

/// 1, 2, 3, 17, 133 workers and more than there are tiles, for one request and for a few.
TEST_P(SplitCounts, WithinTolerance) {
  for (const std::vector<Request>& requests :
       {std::vector<Request>{{1, 2500}}, std::vector<Request>{{1, 1500}, {3, 130}, {1, 16}, {1, 0}}}) {
    AttentionCase row;
    row.requests = requests;
    row.k_format = "int8-head";
    row.kv_heads = 1;
    row.out_dtype = DType::kFloat32;
    row.policy = GetParam();
    row.sinks = true;
    row.page_size = 16;
    const Problem p = make_problem(row);
    const Reference reference = make_reference(p);
    for (const int workers : {1, 2, 3, 17, 133, 20000, 65536}) {
      const Outputs outputs = run_problem(p, [&](AttentionProblem& a) { a.workers = workers; });
      EXPECT_EQ(judge(p, reference, outputs), "") << workers << " workers";
    }
  }
}

/// The fast policy may give other bits each time, never another accuracy.
TEST_P(SplitCounts, RepeatedRunsStayWithinTolerance) {
  for (const AttentionCase& row : policy_cases(GetParam())) {
    const Problem p = make_problem(row);
    const Reference reference = make_reference(p);
    for (int repeat = 0; repeat < (reference::kSanitized ? 2 : 5); ++repeat) {
      const ThreadCount guard(1 + repeat);
      EXPECT_EQ(judge(p, reference, run_problem(p)), "") << row.k_format;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SplitCounts,
                         ::testing::Values(SplitPolicy::kFast, SplitPolicy::kReproducible,
                                           SplitPolicy::kBatchInvariant),
                         [](const auto& info) {
                           return info.param == SplitPolicy::kFast           ? "Fast"
                                  : info.param == SplitPolicy::kReproducible ? "Reproducible"
                                                                             : "BatchInvariant";
                         });

}  // namespace
}  // namespace halftone::testing
