// In units of how many packed rows decode takes the requests of a problem: not always in the smallest that
// holds them.
#pragma once

#include <climits>

#include "cuda/decode/config.h"
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

/// Whether a kernel writes new tokens before they are needed, at the bounds of the problem: a warp for K and
/// one for V, with rows as M one for both, write two rows at a time, while their worker attends over older
/// keys, its share of all and, unless units are cut, those of a request. Else append's own kernel takes less.
/// Figures: docs/kernels/layer-measured.md, Drafts.
bool appends_in_time(const AttentionProblem& problem, const DecodeConfig& config);

}  // namespace halftone::cuda
