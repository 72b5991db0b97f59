// What plans of prefill on a GPU have chosen, and their cut units.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/prefill/config.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/cuda/device_problem.h"
#include "tests/cuda/staged_case.h"

namespace halftone::testing {

/// Whether prefill serves the requests of many rows: not in a build of other head_dims.
inline bool has_prefill(const Problem& p) {
  return cuda_runner().serves(p) && plan_on_device(p).info().config.starts_with("sm90-prefill");
}

/// Of the pass of the longest requests.
inline planning::Staged staged_of(const Problem& p) {
  const Plan plan = plan_on_device(p);
  return planning::require_plan(plan).passes().back().staged;
}

/// Whether this build has kernels that read codes in their pages.
inline bool has_packed_kernels() {
  return std::ranges::any_of(cuda::kPrefillTable, [](const cuda::PrefillConfig& c) {
    return c.keys == cuda::PrefillKeys::kPacked && cuda::is_built(c);
  });
}

/// Whether this build has kernels for staged keys of a head_dim.
inline bool is_built(int head_dim) {
  return staged_of(make_problem(staged_case("int8-token-asym", "fp16", head_dim, {{100, 1}}))).keys > 0;
}

/// Whether the kernel of the longest requests turns codes of K and V in their pages into values.
inline bool reads_packed(const Problem& p) {
  const Plan plan = plan_on_device(p);
  const Plan::Impl& impl = planning::require_plan(plan);
  const planning::Pass& last = impl.passes().back();
  return impl.kernel(last).name.starts_with("sm90-prefill") &&
         cuda::kPrefillTable[last.variant].keys == cuda::PrefillKeys::kPacked;
}

/// Packed rows of a unit of the longest requests, if prefill serves them; else 0.
inline int prefill_unit_of(const AttentionCase& row) {
  const PlanInfo info = cuda_runner().plan(attention_problem(row)).info();
  return info.config.starts_with("sm90-prefill") ? info.row_block : 0;
}

/// The row, which prefill serves, and, if another shape of its kernel is in the table, the row with other
/// bounds for which the plan takes that, or its first requests, of which it may where it takes one shape for
/// all of them under any bounds. Bounds decide nothing under batch_invariant.
inline std::vector<AttentionCase> shapes_of(const AttentionCase& row) {
  std::vector<AttentionCase> rows = {row};
  const AttentionProblem problem = attention_problem(row);
  const bool codes = problem.arithmetic == Arithmetic::kFp8;  // of which either way of V is a shape
  const auto is_shape = [&](const cuda::PrefillConfig& c) {
    if (c.dtype != (codes ? DType::kFloat8E4M3 : problem.q_dtype) || !cuda::is_built(c)) return false;
    return (codes || c.keys == cuda::PrefillKeys::kGiven) && c.head_dim == problem.head_dim() &&
           c.value_dim == problem.v_dim();
  };
  if (row.policy == SplitPolicy::kBatchInvariant || problem.arithmetic == Arithmetic::kHalfInt8 ||
      std::ranges::count_if(cuda::kPrefillTable, is_shape) < 2) {
    return rows;
  }
  const int unit = prefill_unit_of(row);
  const auto find = [&](AttentionCase wider, int step, int end) {
    for (wider.slack = 0; wider.slack < end; wider.slack += step) {
      const int other = prefill_unit_of(wider);
      if (other == 0 || other == unit) continue;
      wider.name += ", units of " + std::to_string(other);
      rows.push_back(wider);
      return true;
    }
    return false;
  };
  if (find(row, 32, 8192)) return rows;
  AttentionCase other = row;
  other.key_slack = 8192;
  if (find(other, 1, 256)) return rows;
  other = row;  // a window leaves no more keys
  for (const std::size_t requests : {4, 2}) {
    if (requests >= row.requests.size()) continue;
    other.requests.resize(requests);
    if (find(other, 32, 8192)) return rows;
  }
  const bool any_do = row.q_heads / row.kv_heads < 128;
  EXPECT_FALSE(any_do) << "no bounds make a plan take another shape: " << row.name;
  return rows;
}

/// Of the pass of the last rows of a plan.
inline planning::ScheduleHeader queue_header(const Plan& plan, const PlacedRun& placed) {
  const Plan::Impl& impl = planning::require_plan(plan);
  const planning::Workspace workspace =
      planning::carve_workspace(impl, static_cast<std::byte*>(placed.space().data));
  planning::ScheduleHeader header;
  check_cuda(cudaMemcpy(&header, workspace.passes[impl.passes().size() - 1].schedule.header, sizeof header,
                        cudaMemcpyDeviceToHost));
  return header;
}

/// Four KV heads, of which keys and values are staged so many at a time as fit into 512 MiB.
inline AttentionCase rounds_case(AttentionCase row, int heads) {
  row.requests = {{200, 230}, {90, 300}, {70, 60}, {1, 170}};
  row.kv_heads = 4;
  row.q_heads = 8;
  row.alibi = row.sinks = true;
  row.policy = SplitPolicy::kBatchInvariant;
  row.name += ", " + std::to_string(heads) + " heads at a time";
  return row;
}

/// Such a case with a bound of keys that lets `heads` heads fit, each key of a head in `key_bytes`: it agrees
/// with the oracle and has the bits of all heads at once.
inline void expect_rounds(const AttentionCase& row, int heads, std::int64_t key_bytes) {
  SCOPED_TRACE(row.name);
  const Problem once = make_problem(row);
  Problem p = make_problem(row);
  p.problem.max_kv_len = static_cast<int>((std::int64_t{1} << 29) / (2 * heads * key_bytes) / 4 + 1);
  const Plan plan = plan_on_device(p);
  EXPECT_EQ(planning::require_plan(plan).passes().back().staged.rounds, 4 / heads);
  const Outputs outputs = run_on_device(p, plan);
  EXPECT_EQ(judge_device(once, outputs), "");
  expect_same_bits(run_on_device(once), outputs, row.name);
}

/// What a first run gives, which the oracle agrees with.
inline Outputs first_outputs(const Problem& p, const DeviceRun& device) {
  device.schedule();
  device.run();
  Outputs outputs = device.outputs();
  EXPECT_EQ(judge_device(p, outputs), "");
  return outputs;
}

/// Few units: they are cut, and merged as if they were whole, with the same bits every time. Whether prefill
/// serves the case. `parts`: of a unit, 0: any number.
inline bool cut_units_agree(const AttentionCase& row, std::int32_t parts = 0) {
  SCOPED_TRACE(row.name);
  const Problem p = make_problem(row);
  if (!has_prefill(p)) return false;
  const Plan plan = plan_on_device(p);
  const DeviceRun device(p, plan);
  const Outputs first = first_outputs(p, device);
  const planning::ScheduleHeader header = queue_header(plan, device);
  constexpr int kMany = 132;
  const bool narrow =  // too little for many parts
      row.mask.window_left >= 0 || (row.workers > 0 && row.workers < kMany);
  EXPECT_TRUE(header.cut_units > 0 || narrow) << header.units << " units";
  EXPECT_TRUE(parts == 0 || header.cut_parts == parts) << header.cut_parts << " parts";
  for (int repeat = 0; repeat < 5; ++repeat) {
    device.clear();
    if (repeat == 3) device.schedule();
    device.run();
    const Outputs again = device.outputs();
    EXPECT_TRUE(same_bytes(first.out, again.out));
    EXPECT_TRUE(same_bytes(first.lse, again.lse) || !row.lse);
  }
  return true;
}

}  // namespace halftone::testing
