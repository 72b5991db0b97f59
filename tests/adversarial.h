// What the adversarial tests share: errors by code and words, twins compared bit by bit, and problems by
// hand.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
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

/// Formats that between them have every dtype, granularity and kind of parameter.
inline const std::vector<std::string>& typical_formats() {
  static const std::vector<std::string> formats = {
      "bf16",      "fp16",     "fp8",      "fp8-token-head", "int8-tensor",         "int8-token",
      "int8-head", "int8-g64", "int4-g32", "int4-row",       "int8-token-asym-f32", "int4-static-head-sym"};
  return formats;
}

}  // namespace halftone::testing
