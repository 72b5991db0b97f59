// What each split policy promises about bits, and that every split count is accurate.
#include <gtest/gtest.h>
#include <omp.h>

#include <numeric>

#include "halftone/attention.h"
#include "reference/sanitizer.h"
#include "testing/cases.h"

namespace halftone::testing {
namespace {

struct ThreadCount {
  explicit ThreadCount(int n) : saved(omp_get_max_threads()) { omp_set_num_threads(n); }
  ~ThreadCount() { omp_set_num_threads(saved); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;
  int saved;
};

/// The requests `chosen` of `p`, in that order, over copies of the same tensors.
Problem select(const Problem& p, const std::vector<std::size_t>& chosen, bool own_bounds) {
  AttentionCase row = p.row;
  row.requests.clear();
  for (const std::size_t i : chosen) row.requests.push_back(p.row.requests[i]);
  row.cu_q = true;
  Problem s;
  s.row = row;
  s.problem = p.problem;
  s.problem.batch = static_cast<int>(chosen.size());
  std::vector<std::int64_t> first_q = {0}, first_kv = {0};
  for (const Request& r : p.row.requests) {
    first_q.push_back(first_q.back() + r.q_len);
    first_kv.push_back(first_kv.back() + r.kv_len);
  }
  std::vector<std::int32_t> cu_q = {0}, cu_kv = {0}, table, lengths;
  std::vector<float> q, k, v;
  const auto copy_rows = [](const Tensor& x, std::int64_t begin, std::int64_t end, std::vector<float>& to) {
    const std::int64_t row_size = x.shape()[1] * x.shape()[2];
    for (std::int64_t e = begin * row_size; e < end * row_size; ++e) to.push_back(x.get(e));
  };
  if (own_bounds) s.problem.max_q_len = s.problem.max_kv_len = 1;
  for (const std::size_t i : chosen) {
    const Request& r = p.row.requests[i];
    cu_q.push_back(cu_q.back() + r.q_len);
    cu_kv.push_back(cu_kv.back() + r.kv_len);
    copy_rows(p.q, first_q[i], first_q[i + 1], q);
    if (own_bounds) {
      s.problem.max_q_len = std::max(s.problem.max_q_len, r.q_len);
      s.problem.max_kv_len = std::max(s.problem.max_kv_len, r.kv_len);
    }
    if (p.row.plain) {
      copy_rows(p.k, first_kv[i], first_kv[i + 1], k);
      copy_rows(p.v, first_kv[i], first_kv[i + 1], v);
      continue;
    }
    const auto columns = static_cast<std::size_t>(p.cache->block_table.shape()[1]);
    const auto source = p.cache->block_table.as<std::int32_t>().subspan(i * columns, columns);
    table.insert(table.end(), source.begin(), source.end());
    lengths.push_back(r.kv_len);
  }
  const auto batch = static_cast<std::int64_t>(chosen.size());
  s.cu_q = Tensor::of({batch + 1}, cu_q);
  s.q = Tensor::of(p.row.q_dtype, {cu_q.back(), row.q_heads, row.head_dim}, q);
  s.alibi_slopes = p.alibi_slopes.clone();
  s.sinks = p.sinks.clone();
  if (!p.row.plain) {
    s.cache = std::make_unique<Cache>(p.cache->clone());
    s.cache->block_table = Tensor::of({batch, p.cache->block_table.shape()[1]}, table);
    s.cache->lengths = Tensor::of({batch}, lengths);
  } else {
    s.cu_kv = Tensor::of({batch + 1}, cu_kv);
    s.k = Tensor::of(*p.row.plain, {cu_kv.back(), row.kv_heads, row.head_dim}, k);
    s.v = Tensor::of(*p.row.plain, {cu_kv.back(), row.kv_heads, p.problem.v_dim()}, v);
  }
  return s;
}

/// The bytes of one request's rows.
std::vector<std::uint8_t> request_bytes(const Problem& p, const Tensor& x, std::size_t request) {
  std::int64_t first = 0;
  for (std::size_t i = 0; i < request; ++i) first += p.row.requests[i].q_len;
  const std::size_t row = x.bytes().size() / static_cast<std::size_t>(p.total_q());
  const auto bytes = x.bytes().subspan(static_cast<std::size_t>(first) * row,
                                       static_cast<std::size_t>(p.row.requests[request].q_len) * row);
  return {bytes.begin(), bytes.end()};
}

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
  for (const char* format : {"bf16", "fp8-head", "int8-head", "int4-g32", "int4-row"}) {
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

TEST(Reproducible, RepeatsBits) {
  for (const AttentionCase& row : policy_cases(SplitPolicy::kReproducible)) {
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
    for (int repeat = 0; repeat < 5; ++repeat) {
      const Outputs actual = run_problem(p);
      ASSERT_TRUE(same_bytes(expected.out, actual.out)) << row.k_format;
      ASSERT_TRUE(same_bytes(expected.lse, actual.lse)) << row.k_format;
    }
  }
}

/// The plan fixes the workers; how many threads carry them does not matter.
TEST(Reproducible, SameBitsForEveryThreadCount) {
  for (const AttentionCase& row : policy_cases(SplitPolicy::kReproducible)) {
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
    for (const int threads : {1, 2, 3, 8}) {
      const ThreadCount guard(threads);
      const Outputs actual = run_problem(p);
      ASSERT_TRUE(same_bytes(expected.out, actual.out)) << row.k_format << ", " << threads << " threads";
      ASSERT_TRUE(same_bytes(expected.lse, actual.lse)) << row.k_format << ", " << threads << " threads";
    }
  }
}

TEST(BatchInvariant, SameBitsForEveryWorkerAndThreadCount) {
  for (const AttentionCase& row : policy_cases(SplitPolicy::kBatchInvariant)) {
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
    for (const int workers : {1, 2, 3, 17, 133, 5000}) {
      const ThreadCount guard(1 + workers % 4);
      const Outputs actual = run_problem(p, [&](AttentionProblem& a) { a.workers = workers; });
      ASSERT_TRUE(same_bytes(expected.out, actual.out)) << row.k_format << ", " << workers << " workers";
      ASSERT_TRUE(same_bytes(expected.lse, actual.lse)) << row.k_format << ", " << workers << " workers";
    }
  }
}

/// Alone, in random subsets, at any position, under the batch's bounds or bounds of its own.
TEST(BatchInvariant, SameBitsAloneAndInAnyBatch) {
  Random random(11);
  for (const AttentionCase& row : policy_cases(SplitPolicy::kBatchInvariant)) {
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
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
        const Outputs actual =
            run_problem(s, [&](AttentionProblem& a) { a.workers = static_cast<int>(random.integer(1, 40)); });
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

/// A request that decodes one more token under new bounds keeps the split boundaries of its prefix.
TEST(BatchInvariant, BoundsAreNotPartOfTheResult) {
  for (const AttentionCase& row : policy_cases(SplitPolicy::kBatchInvariant)) {
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
    for (const int longer : {1, 1000, 200000}) {
      const Outputs actual = run_problem(p, [&](AttentionProblem& a) { a.max_kv_len += longer; });
      ASSERT_TRUE(same_bytes(expected.out, actual.out)) << row.k_format << ", max_kv_len + " << longer;
    }
    const Outputs actual = run_problem(p, [](AttentionProblem& a) { a.max_q_len += 300; });
    ASSERT_TRUE(same_bytes(expected.out, actual.out)) << row.k_format << ", max_q_len + 300";
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
    for (int repeat = 0; repeat < (kSanitized ? 2 : 5); ++repeat) {
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
