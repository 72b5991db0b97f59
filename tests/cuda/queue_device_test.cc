// The queue of a worker's items: more of them than it holds, most of which bring no keys to wait for.
#include <gtest/gtest.h>

#include <string>

#include "tests/cuda/device_problem.h"

namespace halftone::testing {
namespace {

/// Roles that have nothing to do for an item without keys pass it at once, those that write its zeros do not:
/// runs of such items that are longer than the queue must not let one role take an item for another.
TEST(DeviceQueue, RunsOfItemsWithoutKeys) {
  struct Kernel {
    const char* format;
    int queries;  // of 8 heads over one
  };
  for (const Kernel& kernel : {Kernel{"int8-head", 6}, Kernel{"int4-g32", 6}, Kernel{"int4-g32", 1}}) {
    for (const int workers : {1, 3, 0}) {
      AttentionCase row;
      row.k_format = kernel.format;
      row.kv_heads = 1;
      row.workers = workers;
      for (int run = 0; run < 6; ++run) {
        for (int i = 0; i < 15 + run; ++i) row.requests.push_back({kernel.queries, 0});
        row.requests.push_back({kernel.queries, 70 + 333 * run});
        row.requests.push_back({kernel.queries, 16});
      }
      SCOPED_TRACE(row.k_format + ", " + std::to_string(kernel.queries) + " queries, " +
                   std::to_string(workers) + " workers");
      const Problem p = make_problem(row);
      const Plan plan = plan_on_device(p);
      const Outputs first = run_on_device(p, plan);
      ASSERT_EQ(judge_device(p, first), "");
      for (int i = 0; i < 5; ++i) {
        const Outputs again = run_on_device(p, plan);
        ASSERT_TRUE(same_bytes(first.out, again.out) && same_bytes(first.lse, again.lse));
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
