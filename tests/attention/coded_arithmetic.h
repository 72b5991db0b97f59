// What tests of every arithmetic of fewer than 16 bits ask for.
#pragma once

#include <cmath>
#include <vector>

#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {

class CodedArithmetic : public OnRunners {
 protected:
  /// An infinity or a NaN in a row of Q reaches that row alone. The first request of each case has more than
  /// 33 queries.
  void expect_nan_in_a_query_reaches_its_row_alone(const std::vector<AttentionCase>& rows) {
    for (const AttentionCase& row : rows) {
      for (const float bad : {kNan, -kNan, kInf, -kInf}) {
        const Problem p = make_problem(row);
        if (!serves(p)) continue;
        const Outputs clean = run(p);
        const std::int64_t victim = 33 * row.q_heads + 2;
        p.q.set(victim * row.head_dim + (std::signbit(bad) ? 7 : row.head_dim - 9), bad);
        const Outputs outputs = run(p);
        for (std::int64_t i = 0; i < p.total_q() * row.q_heads; ++i) {
          ASSERT_EQ(std::isnan(outputs.lse.get(i)), i == victim) << row.name;
          ASSERT_EQ(std::isnan(outputs.out.get(i * row.head_dim)), i == victim) << row.name;
          if (i == victim) continue;
          // On a GPU it makes rows beside it take other offsets.
          const float slack = runner().name() == "cpu" ? 0.0F : 1e-5F;
          ASSERT_NEAR(outputs.lse.get(i), clean.lse.get(i), slack) << row.name;
        }
      }
    }
  }
};

}  // namespace halftone::testing
