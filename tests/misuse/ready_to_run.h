// A problem that is ready to run, and one change away from an error.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "halftone/attention.h"
#include "testing/cases.h"
#include "tests/expect_error.h"
#include "tests/kv_of.h"

namespace halftone::ready_to_run {

using reference::Tensor;
using testing::AttentionCase;
using testing::Outputs;
using testing::Problem;

inline AttentionCase paged_case() {
  AttentionCase row;
  row.name = "validate";
  row.requests = {{3, 70}, {1, 0}, {2, 200}};
  row.k_format = "int8-head";
  row.head_dim = 64;
  row.workers = 3;
  row.lse = row.alibi = row.sinks = true;
  return row;
}

inline AttentionCase plain_case() {
  AttentionCase row = paged_case();
  row.plain = DType::kBFloat16;
  row.alibi = row.sinks = row.lse = false;
  return row;
}

/// Plan, schedule, arguments and outputs of a case; outputs hold bytes 0xFF until a run succeeds.
struct Ready {
  explicit Ready(const AttentionCase& row)
      : problem(testing::make_problem(row)),
        made(plan(problem.problem)),
        outputs(testing::make_outputs(problem)),
        args(testing::arguments(problem, outputs)),
        workspace(DType::kUInt8, {static_cast<std::int64_t>(made.workspace_bytes())}) {
    schedule(made, args.lengths, workspace.view());
  }
  void expect_refused(ErrorCode code, const std::vector<std::string>& fragments) const {
    expect_refused_in(workspace.view(), code, fragments);
  }
  void expect_refused_in(const TensorView& in, ErrorCode code,
                         const std::vector<std::string>& fragments) const {
    for (const std::string& fragment : fragments) {
      expect_error(code, {fragment}, [&] { run(made, args, in); });
    }
    const auto untouched = [](const Tensor& t) {
      return !t.present() || std::ranges::all_of(t.bytes(), [](std::uint8_t b) { return b == 0xFF; });
    };
    EXPECT_TRUE(untouched(outputs.out));
    EXPECT_TRUE(untouched(outputs.lse));
  }

  Problem problem;
  Plan made;
  Outputs outputs;
  AttentionArgs args;
  Tensor workspace;
};

}  // namespace halftone::ready_to_run
