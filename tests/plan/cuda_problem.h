// Problems that plan() takes for a GPU, and what serves them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plan/backend.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/plan/decode_problem.h"

namespace halftone {

/// A plan for a GPU needs none where the number of workers is given.
inline AttentionProblem cuda_problem() {
  AttentionProblem p = decode_problem();
  p.device = {DeviceType::kCuda, 0};
  p.workers = 132;
  return p;
}

/// Names of the kernels of a problem's passes.
inline std::vector<std::string> configs_of(const AttentionProblem& p) {
  std::vector<std::string> names;
  const Plan made = plan(p);
  for (const PassInfo& pass : made.info().passes) names.push_back(pass.config);
  return names;
}

inline bool has_cuda() { return planning::find_backend(DeviceType::kCuda) != nullptr; }

/// A prompt of a thousand queries over the quantised pages of cuda_problem(), after `change`.
inline AttentionProblem prompt_problem(auto change) {
  AttentionProblem p = cuda_problem();
  p.max_q_len = 1000;
  change(p);
  return p;
}

/// What run() stages for the pass of the longest requests.
inline planning::Staged staged_of(const AttentionProblem& p) {
  const Plan made = plan(p);
  const planning::Staged staged = planning::require_plan(made).passes().back().staged;
  EXPECT_EQ(made.info().passes.back().staged_bytes, staged.bytes);
  EXPECT_EQ(made.info().staged_bytes, staged.bytes);
  if (made.info().passes.size() > 1) {
    EXPECT_EQ(made.info().passes.front().staged_bytes, 0);
  }
  return staged;
}

}  // namespace halftone
