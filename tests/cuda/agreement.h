// Rows of the case table and random ones, on the GPU against the double oracle.
#pragma once

#include <gtest/gtest.h>

#include "tests/cuda/device_problem.h"

namespace halftone::testing {

/// The row on the GPU against the oracle.
inline void expect_agrees(const AttentionCase& row) {
  SCOPED_TRACE(row.name);
  const Problem p = make_problem(row);
  const Outputs outputs = run_on_device(p);
  EXPECT_EQ(judge_device(p, outputs), "");
  EXPECT_EQ(status_of(outputs), 0);
}

inline bool is_mixed(const AttentionCase& row) {
  return !row.v_format.empty() && row.v_format != row.k_format;
}

/// Rows of any kind against the oracle, and how many problems of which kind they were.
struct RowCounts {
  int table = 0, universal = 0, mixed_in_table = 0, plain = 0, latent = 0;

  /// The row on pages and, if that is the universal kernel's, as the table takes it; over plain tensors, over
  /// a latent cache or with lists, if that is served.
  void run(const AttentionCase& row) {
    if (row.plain && cuda_runner().serves(make_problem(row))) {
      expect_agrees(row);
      ++plain;
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
