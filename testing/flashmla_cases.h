// Rows of the case table with the shapes of FlashMLA's public tests.
#pragma once

#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

void add_flashmla_rows(std::vector<AttentionCase>& rows);

}  // namespace halftone::testing
