// Checks of lists of keys (ListedKeys).
#pragma once

#include "halftone/attention.h"
#include "plan/work.h"

namespace halftone::planning {

/// Shapes of the counts; absent without the list that they are of.
void check_counts(const AttentionProblem& p, const SequenceLengths& lengths);

/// On the CPU, once cu_q is checked: one count for each query, 0 to top_k.
void check_count_values(const AttentionProblem& p, const SequenceLengths& lengths);

/// Shapes of the lists of `total_q` queries; absent without the list that they are of.
void check_lists(const AttentionProblem& p, const AttentionArgs& args, std::int64_t total_q);

/// On the CPU, in trusted mode: throws OutOfRange, naming query and place, for a slot that its cache lacks.
void check_listed_slots(const AttentionArgs& args, const Schedule& schedule);

}  // namespace halftone::planning
