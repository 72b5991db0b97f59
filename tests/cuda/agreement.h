// Rows of the case table and random ones, on the GPU against the double oracle.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "testing/cuda/limits.h"
#include "tests/cuda/device_problem.h"
#include "tests/higher_bounds.h"

namespace halftone::testing {

/// The kernels of a plan, and whether they read copies.
inline std::vector<std::string> kernels_of(const Plan& plan) {
  std::vector<std::string> names;
  for (const PassInfo& pass : plan.info().passes) names.push_back(pass.config);
  if (copies_lists(plan.problem(), plan.info())) names.emplace_back("copies");
  return names;
}

/// The row and, since small problems go to kernels of their own, the same under higher bounds, as far as it
/// meets other kernels there: for more keys, or for a few more queries that list some and for many.
inline std::vector<AttentionCase> under_all_bounds(const AttentionCase& row) {
  const auto plan_of = [](const AttentionCase& x) { return cuda_runner().plan(attention_problem(x)); };
  std::vector<AttentionCase> rows{row};
  std::vector<std::vector<std::string>> seen{kernels_of(plan_of(row))};
  const std::string& first = seen[0][0];
  const bool depends = first.starts_with("sm90-decode-") || first.starts_with("sm90-latent-");
  if (row.policy == SplitPolicy::kBatchInvariant || !depends) return rows;
  std::vector<AttentionCase> others{under_higher_bounds(row)};
  if (row.lists.top_k != 0) others.push_back(under_more_queries(row, 4));
  for (AttentionCase& other : others) {
    const std::vector<std::string> kernels = kernels_of(plan_of(other));
    if (std::ranges::find(seen, kernels) != seen.end()) continue;
    for (const std::string& name : kernels) other.name += ", " + name;
    rows.push_back(other);
    seen.push_back(kernels);
  }
  return rows;
}

/// The row on the GPU against the oracle, by every kernel that it meets under some bounds.
inline void expect_agrees(const AttentionCase& listed) {
  for (const AttentionCase& row : under_all_bounds(listed)) {
    SCOPED_TRACE(row.name);
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    const Outputs outputs = run_on_device(p, plan);
    EXPECT_EQ(judge_device(p, outputs), "");
    EXPECT_EQ(status_of(outputs), 0);
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
