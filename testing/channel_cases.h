// Rows of the case table over caches whose K has an offset and a scale per channel.
#pragma once

#include <vector>

#include "reference/random.h"
#include "testing/cases.h"

namespace halftone::testing {

void add_channel_rows(std::vector<AttentionCase>& rows);

/// Gives a random row an offset, a scale or both, where the library accepts them.
void treat_channels(AttentionCase& row, Random& random);

}  // namespace halftone::testing
