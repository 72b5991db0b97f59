// In units of how many packed rows decode takes the requests of a problem: not always in the smallest that
// holds them.
#pragma once

#include <climits>

#include "halftone/attention.h"

namespace halftone::cuda {

/// A unit of any number of packed rows.
inline constexpr int kAnyUnit = INT_MAX;

/// Packed rows of the largest unit that the problem, over a cache that stores K and V apart, should go to.
/// Kernels for fewer rows begin and end sooner. Several units of a head read its K and V again, from L2
/// where they are small and the units run side by side. Never fewer than kAnyUnit in batch-invariant
/// problems, whose requests have the same kernel under every bound. Figures:
/// docs/kernels/decode-measured.md, Units.
int largest_unit(const AttentionProblem& problem);

}  // namespace halftone::cuda
