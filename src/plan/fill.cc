#include <algorithm>

#include "plan/listed.h"
#include "plan/plan.h"

namespace halftone::planning {
namespace {

const std::int32_t* values(const TensorView& t) { return static_cast<const std::int32_t*>(t.data); }

/// Every query is a request, up to the bound empty ones.
void copy_lists(const AttentionProblem& problem, const SequenceLengths& lengths, const Schedule& schedule) {
  const std::int32_t batch = schedule.params.batch;
  const std::int32_t queries = lengths.cu_q.present() ? values(lengths.cu_q)[problem.batch] : batch;
  const auto count = [](const TensorView& counts, int top_k, std::int32_t query) {
    return counts.present() ? values(counts)[query] : top_k;
  };
  for (std::int32_t i = 0; i <= batch; ++i) schedule.cu_q[i] = std::min(i, queries);
  for (std::int32_t i = 0; i < batch; ++i) {
    const bool live = i < queries;
    const std::int32_t first = live ? count(lengths.counts, problem.listed.top_k, i) : 0;
    const std::int32_t second = live ? count(lengths.extra_counts, problem.listed.extra_top_k, i) : 0;
    schedule.kv_lengths[i] = listed_length(first, second);
    if (schedule.first_list != nullptr) schedule.first_list[i] = first;
  }
}

/// Copies the lengths into the schedule: from here on nothing depends on the caller's tensors.
void copy_lengths(const AttentionProblem& problem, const SequenceLengths& lengths, const Schedule& schedule) {
  if (problem.is_listed()) return copy_lists(problem, lengths, schedule);
  const int batch = problem.batch;
  if (lengths.cu_q.present()) {
    std::copy_n(values(lengths.cu_q), batch + 1, schedule.cu_q);
  } else {
    for (int r = 0; r <= batch; ++r) schedule.cu_q[r] = r * problem.max_q_len;
  }
  if (problem.is_paged()) {
    for (int r = 0; r < batch; ++r) {
      schedule.kv_lengths[r] = values(lengths.kv_lengths)[r] + (problem.appends ? q_length(schedule, r) : 0);
    }
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
