// What the adversarial tests share: errors by code and words, twins compared bit by bit, and problems by
// hand.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "halftone/attention.h"
#include "halftone/error.h"
#include "testing/cases.h"
#include "testing/sanitizer.h"

namespace halftone::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

/// `call` must throw Error with `code` and one sentence that has every one of `words` (argument, value,
/// limit).
inline void expect_error(ErrorCode code, std::initializer_list<std::string_view> words,
                         const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    const std::string sentence = e.what();
    EXPECT_EQ(error_code_name(e.code()), std::string(error_code_name(code))) << sentence;
    for (const std::string_view word : words) {
      EXPECT_NE(sentence.find(word), std::string::npos)
          << "\"" << word << "\" is not in \"" << sentence << "\"";
    }
    EXPECT_TRUE(sentence.ends_with('.')) << sentence;
    return;
  } catch (const std::exception& e) {
    ADD_FAILURE() << "not a halftone::Error: " << e.what();
    return;
  }
  ADD_FAILURE() << "no error; expected " << error_code_name(code);
}

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
  const std::int64_t dim = p.problem.kv.v_dim(), heads = p.row.q_heads;
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
  for (std::size_t i = 0; i < cache->pages.bytes().size(); ++i) {
    cache->pages.bytes()[i] = pattern.begin()[i % pattern.size()];
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

}  // namespace halftone::testing
