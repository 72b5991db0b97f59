// What the adversarial tests share: refusals that write nothing, twins compared bit by bit, and problems by
// hand.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "halftone/attention.h"
#include "halftone/error.h"
#include "reference/sanitizer.h"
#include "testing/cases.h"
#include "tests/expect_error.h"
#include "tests/kv_of.h"

namespace halftone::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

/// Every byte still 0xFF, as make_outputs() left it.
inline bool untouched(const Tensor& t) {
  for (const std::uint8_t byte : t.bytes()) {
    if (byte != 0xFF) return false;
  }
  return t.guards_intact();
}

/// A plan with a scheduled workspace, ready to run: the starting point of most refusals.
struct Prepared {
  explicit Prepared(const Problem& p) : plan(halftone::plan(p.problem)) {
    workspace = Tensor(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
    schedule(plan, p.lengths(), workspace.view());
    outputs = make_outputs(p);
    args = arguments(p, outputs);
  }

  /// run() with `change` applied to the arguments must fail and leave the outputs alone.
  void refuses(ErrorCode code, std::initializer_list<std::string_view> words,
               const std::function<void(AttentionArgs&)>& change) const {
    AttentionArgs changed = args;
    change(changed);
    expect_error(code, words, [&] { run(plan, changed, workspace.view()); });
    EXPECT_TRUE(untouched(outputs.out)) << "a refusal wrote to out";
    EXPECT_TRUE(!outputs.lse.present() || untouched(outputs.lse)) << "a refusal wrote to lse";
  }

  Plan plan;
  Tensor workspace;
  Outputs outputs;
  AttentionArgs args;
};

inline void expect_same_bits(const Outputs& a, const Outputs& b, const std::string& what) {
  EXPECT_TRUE(same_bytes(a.out, b.out)) << what << ": out differs";
  EXPECT_TRUE(same_bytes(a.lse, b.lse)) << what << ": lse differs";
}

/// Rows [begin, end) of an output tensor, as bytes.
inline std::vector<std::uint8_t> row_bytes(const Tensor& x, std::int64_t begin, std::int64_t end) {
  const std::int64_t row = static_cast<std::int64_t>(x.bytes().size()) / x.shape()[0];
  const auto part =
      x.bytes().subspan(static_cast<std::size_t>(begin * row), static_cast<std::size_t>((end - begin) * row));
  return {part.begin(), part.end()};
}

/// Z: rows [begin, end) are zero with LSE -inf.
inline void expect_empty_rows(const Problem& p, const Outputs& o, std::int64_t begin, std::int64_t end) {
  const std::int64_t dim = p.problem.v_dim(), heads = p.row.q_heads;
  for (std::int64_t i = begin * heads * dim; i < end * heads * dim; ++i) ASSERT_EQ(o.out.get(i), 0.0F);
  for (std::int64_t i = begin * heads; i < end * heads && p.row.lse; ++i) ASSERT_EQ(o.lse.get(i), -kInf);
}

/// p's tokens in a cache whose bytes were `pattern` before.
inline std::unique_ptr<Cache> refilled(const Problem& p, std::initializer_list<std::uint8_t> pattern) {
  auto cache = std::make_unique<Cache>(p.cache->clone());
  std::vector<int> counts;
  for (std::int32_t& n : cache->lengths.as<std::int32_t>()) {
    counts.push_back(n);
    n = 0;
  }
  const std::span<std::uint8_t> bytes = cache->pages.bytes();
  std::copy_n(pattern.begin(), std::min(pattern.size(), bytes.size()), bytes.begin());
  for (std::size_t n = pattern.size(); n < bytes.size(); n *= 2) {
    const std::span<std::uint8_t> behind = bytes.subspan(n);
    std::copy_n(bytes.begin(), std::min(n, behind.size()), behind.begin());
  }
  cache->append(counts, p.k, p.v);
  return cache;
}

/// 97 requests of 1 to 16 keys, whose bits do not depend on the batch.
inline AttentionCase tiny_requests() {
  AttentionCase row;
  row.q_heads = 2;
  row.kv_heads = 1;
  row.head_dim = 64;
  row.k_format = "int8-head";
  row.page_size = 16;
  row.policy = SplitPolicy::kBatchInvariant;
  row.cu_q = true;
  for (int i = 0; i < 97; ++i) row.requests.push_back({1, 1 + i % 16});
  return row;
}

/// `batch` requests of one query: request i has the query and the pages of request i % n of the n of
/// `source`.
inline Problem repeated(const Problem& source, int batch) {
  Problem p;
  p.row = source.row;
  p.problem = source.problem;
  p.problem.batch = batch;
  p.cache = std::make_unique<Cache>(source.cache->clone());
  const auto columns = static_cast<std::size_t>(source.cache->block_table.shape()[1]);
  p.cache->block_table = Tensor(DType::kInt32, {batch, static_cast<std::int64_t>(columns)});
  p.cache->lengths = Tensor(DType::kInt32, {batch});
  p.q = Tensor(p.row.q_dtype, {batch, p.row.q_heads, p.row.head_dim});
  p.cu_q = Tensor(DType::kInt32, {batch + 1});
  const std::size_t count = p.row.requests.size(), q_bytes = source.q.bytes().size() / count;
  const auto copy = [](const auto& from, std::size_t at, std::size_t size, const auto& to, std::size_t i) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at * size), size,
                to.begin() + static_cast<std::ptrdiff_t>(i * size));
  };
  for (std::size_t i = 0; i < static_cast<std::size_t>(batch); ++i) {
    copy(source.cache->block_table.as<std::int32_t>(), i % count, columns,
         p.cache->block_table.as<std::int32_t>(), i);
    copy(source.cache->lengths.as<std::int32_t>(), i % count, 1, p.cache->lengths.as<std::int32_t>(), i);
    copy(source.q.bytes(), i % count, q_bytes, p.q.bytes(), i);
    p.cu_q.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
  }
  p.cu_q.as<std::int32_t>()[static_cast<std::size_t>(batch)] = batch;
  return p;
}

/// Formats that between them have every dtype, granularity and kind of parameter.
inline const std::vector<std::string>& typical_formats() {
  static const std::vector<std::string> formats = {
      "bf16",      "fp16",     "fp8",      "fp8-token-head", "int8-tensor",         "int8-token",
      "int8-head", "int8-g64", "int4-g32", "int4-row",       "int8-token-asym-f32", "int4-static-head-sym"};
  return formats;
}

/// typical_formats(), one of which the GPU's table of kernels lacks, and another general form that it has.
inline const std::vector<std::string>& formats_of_runners() {
  static const std::vector<std::string> formats = [] {
    std::vector<std::string> all = typical_formats();
    all.push_back("int8-token-asym");
    return all;
  }();
  return formats;
}

/// Types of O: each has kernels of its own on some backend.
inline constexpr DType kOutTypes[] = {DType::kFloat32, DType::kFloat16};

inline std::vector<std::pair<std::string, DType>> formats_and_outs() {
  std::vector<std::pair<std::string, DType>> all;
  for (const std::string& format : formats_of_runners()) {
    for (const DType out : kOutTypes) all.emplace_back(format, out);
  }
  return all;
}

/// Three requests that fill no page, and an empty one.
inline AttentionCase table_case(const std::string& format, DType out_dtype) {
  AttentionCase row;
  row.requests = {{1, 70}, {1, 33}, {1, 129}, {1, 0}};
  row.k_format = format;
  row.page_size = 16;
  row.out_dtype = out_dtype;
  return row;
}

/// Few rows per KV head, and so many that a warpgroup of a GPU takes them.
inline std::vector<AttentionCase> few_and_many_rows(const std::string& format) {
  std::vector<AttentionCase> rows(2, table_case(format, DType::kFloat16));
  rows[1].q_heads = 32;
  rows[1].out_dtype = DType::kBFloat16;
  return rows;
}

/// Of p's block table.
inline std::int32_t& entry(const Problem& p, std::int64_t request, std::int64_t column) {
  const std::int64_t columns = p.cache->block_table.shape()[1];
  return p.cache->block_table.as<std::int32_t>()[static_cast<std::size_t>(request * columns + column)];
}

/// Entries of a request that it uses.
inline std::int64_t live_columns(const Problem& p, std::int64_t request) {
  const int kv_len = p.row.requests[static_cast<std::size_t>(request)].kv_len;
  return (kv_len + p.row.page_size - 1) / p.row.page_size;
}

/// A table_case() with the values `d` of its cache as plain K and V, without tokens 16 to 31 of request 0 and
/// the last one of request 2: without mask, window or ALiBi, excluding keys is the same as not having them.
inline Problem without_two_pages(const AttentionCase& row, const reference::Dequantised& d) {
  Problem twin = make_problem(row);
  twin.row.plain = DType::kFloat32;
  twin.row.requests = {{1, 54}, {1, 33}, {1, 128}, {1, 0}};
  std::vector<float> k, v;
  const std::int64_t width = row.kv_heads * row.head_dim;
  for (std::int64_t t = 0; t < 70 + 33 + 129; ++t) {
    if ((t >= 16 && t < 32) || t == 70 + 33 + 128) continue;
    for (std::int64_t e = 0; e < width; ++e) k.push_back(d.k.get(t * width + e));
    for (std::int64_t e = 0; e < width; ++e) v.push_back(d.v.get(t * width + e));
  }
  twin.k = Tensor::of(DType::kFloat32, {54 + 33 + 128, row.kv_heads, row.head_dim}, k);
  twin.v = Tensor::of(DType::kFloat32, {54 + 33 + 128, row.kv_heads, row.head_dim}, v);
  return twin;
}

/// `row` with requests of which the second and the fourth have no keys.
inline AttentionCase with_empty_requests(AttentionCase row) {
  row.policy = SplitPolicy::kBatchInvariant;
  row.requests = {{1, 70}, {3, 0}, {2, 33}, {1, 0}, {1, 129}};
  return row;
}

/// p, of a with_empty_requests(), without queries for the empty requests.
inline Problem without_empty_queries(const Problem& p) {
  const AttentionCase& row = p.row;
  Problem twin = make_problem(row);
  twin.row.requests = {{1, 70}, {0, 0}, {2, 33}, {0, 0}, {1, 129}};
  twin.cu_q = Tensor::of({6}, std::vector<std::int32_t>{0, 1, 1, 3, 3, 4});
  std::vector<float> q;
  const std::int64_t width = row.q_heads * row.head_dim;
  for (const std::int64_t token : {0, 4, 5, 7}) {
    for (std::int64_t e = 0; e < width; ++e) q.push_back(p.q.get(token * width + e));
  }
  twin.q = Tensor::of(row.q_dtype, {4, row.q_heads, row.head_dim}, q);
  return twin;
}

}  // namespace halftone::testing
