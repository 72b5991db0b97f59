// Lists of codes whose tokens are copied to bf16 first: which, what that takes, and how a run does it.
#pragma once

#include "cuda/attention/params.h"
#include "plan/plan.h"

namespace halftone::cuda {

/// Whether the lists of a problem over a latent cache are copied, which else went to a kernel for `largest`
/// packed rows at most: where queries of 64 heads, or of a multiple, list few places together. Not in
/// batch-invariant problems, whose requests have the same kernel under every bound. Figures:
/// docs/kernels/latent-wide-measured.md, Few queries.
bool copies_lists(const AttentionProblem& problem, int largest);

/// Copies the tokens of a run's lists to `staged` (uint8 [batch * max_q_len * top_k * kCopiedBytes]) and
/// makes them what `params`, of the kernel that comes next, attends to.
void copy_lists(const Plan::Impl& plan, std::byte* staged, AttentionParams& params, Stream stream);

}  // namespace halftone::cuda
