#include <algorithm>

#include "plan/plan.h"

namespace halftone::planning {
namespace {

/// Copies the lengths into the schedule: from here on nothing depends on the caller's tensors.
void copy_lengths(const AttentionProblem& problem, const SequenceLengths& lengths, const Schedule& schedule) {
  const auto values = [](const TensorView& t) { return static_cast<const std::int32_t*>(t.data); };
  const int batch = problem.batch;
  if (lengths.cu_q.present()) {
    std::copy_n(values(lengths.cu_q), batch + 1, schedule.cu_q);
  } else {
    for (int r = 0; r <= batch; ++r) schedule.cu_q[r] = r * problem.max_q_len;
  }
  if (problem.is_paged()) {
    if (batch > 0) std::copy_n(values(lengths.kv_lengths), batch, schedule.kv_lengths);
    return;
  }
  schedule.cu_kv[0] = 0;
  for (int r = 0; r < batch; ++r) {
    const std::int32_t* cu_kv = values(lengths.cu_kv);
    schedule.cu_kv[r + 1] = cu_kv[r + 1];
    schedule.kv_lengths[r] = cu_kv[r + 1] - cu_kv[r];
  }
}

}  // namespace

void fill_schedules(const Plan::Impl& plan, const SequenceLengths& lengths, const Workspace& workspace) {
  copy_lengths(plan.problem, lengths, workspace.passes[0].schedule);  // where all passes have them
  for (std::size_t i = 0; i < plan.passes().size(); ++i) {
    build_schedule(workspace.passes[i].schedule, plan.id);
  }
}

}  // namespace halftone::planning
