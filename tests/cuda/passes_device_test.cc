// The two passes of a plan in CUDA graphs: which of them a request joins is decided at each replay.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/cuda/device_problem.h"

namespace halftone::testing {
namespace {

/// Captured where one pass has all requests, replayed where the other one has, or both: eager's bits, from
/// every layer of a chain.
TEST(DevicePasses, GraphReplayMovesRequestsBetweenPasses) {
  for (const char* format : {"int8-head", "int4-g32", "bf16"}) {
    for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      for (const bool settled : {false, true}) {
        SCOPED_TRACE(std::string(format) + (settled ? ", settled" : ""));
        AttentionCase row;
        row.k_format = format;
        row.q_heads = 8;
        row.kv_heads = 1;
        row.mask.causal = true;
        row.policy = policy;
        row.requests = {{300, 9000}, {300, 700}, {300, 300}, {300, 5000}};
        row.cu_q = true;
        const Problem p = make_problem(row, Fill::kTiled);
        const Plan plan = plan_on_device(p);
        ASSERT_EQ(plan.info().passes.size(), 2U);
        DeviceRun device(p, plan);
        void* const cu_q = device.args.lengths.cu_q.data;
        const auto set_lengths = [&](const std::vector<std::int32_t>& q_lengths) {
          std::vector<std::int32_t> sums = {0};
          for (const std::int32_t n : q_lengths) sums.push_back(sums.back() + n);
          check_cuda(cudaMemcpy(cu_q, sums.data(), sums.size() * 4, cudaMemcpyHostToDevice));
          device.clear();
          check_cuda(cudaDeviceSynchronize());
        };
        set_lengths({1, 1, 1, 1});
        const CapturedGraph graph([&](cudaStream_t stream) {
          device.schedule(stream);
          for (int layer = 0; layer < 4; ++layer) {
            device.args.cache_settled = settled && layer > 0;
            device.run(stream);
          }
        });
        device.args.cache_settled = false;
        for (const std::vector<std::int32_t>& q_lengths : {std::vector<std::int32_t>{1, 1, 1, 1},
                                                           {300, 300, 300, 300},
                                                           {1, 300, 0, 1},
                                                           {0, 0, 0, 0},
                                                           {2, 1, 17, 1},
                                                           {1, 1, 1, 1}}) {
          set_lengths(q_lengths);
          device.schedule();
          device.run();
          const Outputs expected = device.outputs();
          set_lengths(q_lengths);
          graph.replay();
          const Outputs actual = device.outputs();
          EXPECT_TRUE(same_bytes(expected.out, actual.out)) << q_lengths[0] << ", " << q_lengths[1];
          EXPECT_TRUE(same_bytes(expected.lse, actual.lse)) << q_lengths[0] << ", " << q_lengths[1];
        }
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
