// Lists of keys of a problem of the case table.
#pragma once

#include <cstdint>
#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

/// Draws the lists that the row asks for, and the second list's cache.
void fill_lists(Problem& p, Random& random);

/// Of every query the tokens that it attends to, numbered through the cache and then the second one; empty
/// without lists.
std::vector<std::vector<std::int64_t>> listed_tokens(const Problem& p);

}  // namespace halftone::testing
