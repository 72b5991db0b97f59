// Rows of the case table over latent caches and over listed keys.
#pragma once

#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

/// Formats that a latent may have.
const std::vector<std::string>& latent_formats();

void add_latent_rows(std::vector<AttentionCase>& rows);

/// Turns a random row over a cache into one over a latent cache, one over lists or both.
void make_latent_or_listed(AttentionCase& row, Random& random);

/// A random row over a latent cache, for which the GPU has a kernel.
AttentionCase random_latent_case(std::uint64_t seed);

}  // namespace halftone::testing
