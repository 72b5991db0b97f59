// Rows of the case table and random ones, on the GPU against the double oracle.
#pragma once

#include <gtest/gtest.h>

#include "tests/cuda/device_problem.h"

namespace halftone::testing {

/// The row on the GPU against the oracle; where the plan halves units of 16 packed rows, since its bounds are
/// low, under higher ones, too.
inline void expect_agrees(AttentionCase row) {
  SCOPED_TRACE(row.name);
  for (const bool whole : {false, true}) {
    const Problem p = make_problem(row);
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "") << (whole ? "in whole units" : "");
    EXPECT_EQ(status_of(outputs), 0);
    const std::int64_t rows = std::int64_t{row.q_heads} / row.kv_heads * p.problem.max_q_len;
    if (rows <= 8 || rows > 16 || row.policy == SplitPolicy::kBatchInvariant) break;
    if (whole || plan_on_device(p).info().config != "sm90-decode-8") break;
    row.key_slack += 1 << 20;
    EXPECT_EQ(plan_on_device(make_problem(row)).info().config, "sm90-decode-16");
  }
}

inline bool is_mixed(const AttentionCase& row) {
  return !row.v_format.empty() && row.v_format != row.k_format;
}

/// The row as the kernels of 8-bit arithmetic take it.
inline AttentionCase for_codes(AttentionCase row) {
  row.plain.reset();
  row.head_dim = 128;
  row.v_head_dim = 0;
  if (row.arithmetic == "fp8") row.v_format = "fp8-static-head";
  if (row.q_dtype == DType::kFloat32) row.q_dtype = DType::kBFloat16;
  return row;
}

/// Rows of any kind against the oracle, and how many problems of which kind they were.
struct RowCounts {
  int table = 0, universal = 0, mixed_in_table = 0, plain = 0, latent = 0, coded = 0;

  /// The row on pages and, if that is the universal kernel's, as the table takes it; in its own arithmetic,
  /// over plain tensors, over a latent cache or with lists, if that is served.
  void run(const AttentionCase& row) {
    if (row.plain && cuda_runner().serves(make_problem(row))) {
      expect_agrees(row);
      ++plain;
    }
    if (row.arithmetic != "16-bit" && cuda_runner().serves(make_problem(for_codes(row)))) {
      expect_agrees(for_codes(row));
      ++coded;
    }
    AttentionCase own = for_device(row);
    if (own.rope_dim != 0 || own.lists.top_k != 0) {
      if (cuda_runner().serves(make_problem(own))) {
        expect_agrees(own);
        ++latent;
      }
      return;
    }
    if (is_universal(make_problem(own))) {
      expect_agrees(own);
      ++universal;
      own = for_table(row);
    }
    expect_agrees(own);
    if (is_universal(make_problem(own))) return;
    ++table;
    mixed_in_table += is_mixed(own) ? 1 : 0;
  }
};

}  // namespace halftone::testing
