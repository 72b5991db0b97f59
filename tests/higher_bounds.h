// Rows of the case table under bounds beyond those of their own lengths. Plain C++.
#pragma once

#include "testing/cases.h"

namespace halftone::testing {

/// The row with lists, planned for so many more queries of each request.
inline AttentionCase under_more_queries(AttentionCase row, int count) {
  row.cu_q = true;
  row.slack += count;
  return row;
}

/// The row under bounds of which no kernel for small problems is left: without lists those of more keys.
inline AttentionCase under_higher_bounds(AttentionCase row) {
  if (row.lists.top_k != 0) return under_more_queries(row, 8192);
  row.key_slack += 1 << 20;
  return row;
}

}  // namespace halftone::testing
