// The tokens that the run() of a problem of the case table appends.
#pragma once

#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

/// Draws the tokens that the row asks for and takes the cache's lengths back to before them.
void fill_step(Problem& p, Random& random);

/// As run() takes them; absent where it appends none.
NewTokens new_tokens(const Problem& p);

/// As append() takes them: by slots if the row has some, else by `cu_seqlens`.
AppendArgs append_args(const Problem& p, const Tensor& cu_seqlens, const Tensor& status = {});

/// Cumulative numbers of queries.
Tensor cumulative_queries(const AttentionCase& row);

void add_step_rows(std::vector<AttentionCase>& rows);

}  // namespace halftone::testing
