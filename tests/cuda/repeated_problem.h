// Problems with lists that repeat a smaller one, whose outputs theirs must agree with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "testing/cases.h"
#include "testing/cuda/limits.h"

namespace halftone::testing {

/// `rows` rows: those of `x` over and over.
inline Tensor repeated_rows(const Tensor& x, std::int64_t rows) {
  std::vector<std::int64_t> shape = x.shape();
  const std::size_t row = x.bytes().size() / static_cast<std::size_t>(shape[0]);
  const auto have = static_cast<std::size_t>(shape[0]);
  shape[0] = rows;
  Tensor y(x.dtype(), shape);
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
    std::memcpy(y.bytes().data() + i * row, x.bytes().data() + i % have * row, row);
  }
  return y;
}

/// The problem with its queries over and over, `batch` of them, and each list `times` times in a row: the
/// output is the same, and the LSE larger by log(times).
inline Problem repeated(const Problem& p, int batch, int times) {
  Problem many;
  many.row = p.row;
  many.problem = p.problem;
  many.problem.batch = batch;
  many.row.requests = uniform_requests(batch, 1, p.row.requests[0].kv_len);
  many.cache = std::make_unique<Cache>(p.cache->clone());
  many.q = repeated_rows(p.q, batch);
  const std::int64_t top_k = p.indices.shape()[1];
  many.problem.listed.top_k = many.row.lists.top_k = static_cast<int>(top_k) * times;
  const Tensor lists = repeated_rows(p.indices, batch);
  many.indices = Tensor(DType::kInt32, {batch, top_k * times});
  for (std::int64_t i = 0; i < many.indices.numel(); ++i) {
    const std::int64_t query = i / (top_k * times);
    many.indices.as<std::int32_t>()[static_cast<std::size_t>(i)] =
        lists.as<std::int32_t>()[static_cast<std::size_t>(query * top_k + i % top_k)];
  }
  return many;
}

/// Whether the outputs of a repeated() problem, which a plan says it serves like `info`, are what the
/// reference of the few says, by the limits of that kernel.
inline void expect_repeated(const Problem& few, const Reference& exact, const Problem& many,
                            const PlanInfo& info, const Outputs& outputs, const std::string& what) {
  const auto queries = static_cast<std::size_t>(few.total_q());
  const auto batch = static_cast<std::size_t>(many.total_q());
  const auto repeat = [&](const auto& x) {
    auto y = x;
    y.resize(x.size() / queries * batch);
    for (std::size_t i = x.size(); i < y.size(); ++i) y[i] = y[i - x.size()];
    return y;
  };
  Reference all = exact;
  all.out = repeat(exact.out), all.plain_out = repeat(exact.plain_out);
  all.lse = repeat(exact.lse), all.plain_lse = repeat(exact.plain_lse);
  if (!exact.row_slack.empty()) all.row_slack = repeat(exact.row_slack);
  const double more = std::log(many.problem.listed.top_k / few.problem.listed.top_k);
  for (double& x : all.lse) x += more;
  for (float& x : all.plain_lse) x += static_cast<float>(more);
  EXPECT_EQ(judge(many, all, outputs, lse_slack(few, info), out_slack(few, info)), "") << what;
}

/// Whether every row of `many` is that of `few` with the same query, but for rounding: up to `limit` of the
/// largest output.
inline void expect_rows(const Outputs& few, const Outputs& many, double more_lse, const std::string& what,
                        double limit = 2e-3) {
  const std::int64_t out = few.out.numel(), lse = few.lse.numel();
  double largest = 0, worst = 0, worst_lse = 0;
  for (std::int64_t i = 0; i < out; ++i) largest = std::max(largest, std::abs(double{few.out.get(i)}));
  for (std::int64_t i = 0; i < many.out.numel(); ++i) {
    const double error = std::abs(double{many.out.get(i)} - few.out.get(i % out));
    worst = error <= worst ? worst : error;  // NaN counts
  }
  for (std::int64_t i = 0; i < many.lse.numel(); ++i) {
    const double error = std::abs(double{many.lse.get(i)} - few.lse.get(i % lse) - more_lse);
    worst_lse = error <= worst_lse ? worst_lse : error;
  }
  EXPECT_LE(worst, limit * largest) << what;
  EXPECT_LE(worst_lse, 1e-3) << what << ", LSE";
}

}  // namespace halftone::testing
