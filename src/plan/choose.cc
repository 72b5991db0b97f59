#include <fmt/format.h>

#include "plan/backend.h"

namespace halftone::planning {

Choice choose_kernel(const Backend& backend, const AttentionProblem& problem) {
  const std::int64_t group = problem.q_heads / problem.kv_heads();
  std::int64_t rows = group * problem.max_q_len;
  std::string count =
      fmt::format("{} packed row{} per request and KV head (max_q_len {} x {} query head{})", rows,
                  rows == 1 ? "" : "s", problem.max_q_len, group, group == 1 ? "" : "s");
  if (!backend.rows_share_bits && problem.policy == SplitPolicy::kBatchInvariant) {
    // Chosen without max_q_len, so that bits do not depend on the longest request of the batch.
    rows = group;
    count = fmt::format("batch_invariant: {} query head{} per KV head", group, group == 1 ? "" : "s");
  }
  Choice choice{-1, -1, {}};
  for (int i = 0; i < static_cast<int>(backend.kernels.size()); ++i) {
    const int variant = backend.variant(problem, backend.kernels[i]);
    if (variant < 0) continue;
    choice.index = i;
    choice.variant = variant;
    if (rows <= backend.kernels[i].max_rows) break;
  }
  if (choice.index >= 0) {
    const Kernel& chosen = backend.kernels[choice.index];
    choice.reason = rows <= chosen.max_rows ? fmt::format("{}, at most {}", count, chosen.max_rows)
                                            : fmt::format("{}, {} at a time", count, chosen.row_block);
    if (chosen.universal) choice.reason += "; no other kernel has these formats, dims and types";
  }
  return choice;
}

}  // namespace halftone::planning
