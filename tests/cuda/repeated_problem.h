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

inline std::vector<double> values_of(const Tensor& x) {
  const std::vector<float> values = x.to_floats();
  return {values.begin(), values.end()};
}

/// Whether every row of `many` is that of `out` and `lse` with the same query, but for rounding: up to
/// `limit` of the largest output.
inline void expect_rows(const std::vector<double>& out, const std::vector<double>& lse, const Outputs& many,
                        double more_lse, const std::string& what, double limit = 2e-3) {
  const auto worst = [](const std::vector<double>& expected, const Tensor& actual, double more) {
    double result = 0;
    for (std::int64_t i = 0; i < actual.numel(); ++i) {
      const double wanted = expected[static_cast<std::size_t>(i) % expected.size()] + more;
      const double error = std::abs(double{actual.get(i)} - wanted);
      result = error <= result ? result : error;  // NaN counts
    }
    return result;
  };
  double largest = 0;
  for (const double x : out) largest = std::max(largest, std::abs(x));
  EXPECT_LE(worst(out, many.out, 0), limit * largest) << what;
  EXPECT_LE(worst(lse, many.lse, more_lse), 1e-3) << what << ", LSE";
}

}  // namespace halftone::testing
