// Checks of the new tokens that run() appends (AttentionProblem::appends).
#pragma once

#include "halftone/attention.h"

namespace halftone::planning {

/// On the CPU, once each length is valid: with the new tokens no request has more keys than max_kv_len.
void check_grown(const AttentionProblem& p, const SequenceLengths& lengths);

/// Keys of all requests and of those of more than one query, the new tokens included where run() appends.
struct TotalKeys {
  std::int64_t all = 0, prompts = 0;
};
/// Of valid lengths.
TotalKeys total_keys(const AttentionProblem& p, const SequenceLengths& lengths);

/// Shapes and addresses of the new tokens of `total_q` queries; absent unless the problem appends. Their
/// values are the backend's to check. The rest of `args` is valid, but for what overlaps.
void check_new_tokens(const AttentionProblem& p, const AttentionArgs& args, std::int64_t total_q);

}  // namespace halftone::planning
