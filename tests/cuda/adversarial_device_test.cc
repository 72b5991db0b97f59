// Tables in graphs of the GPU, and tensors that it refuses.
#include "tests/cuda/adversarial_device.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

TEST(DeviceTables, TableChangedBetweenReplays) {
  for (const char* format : {"int8-g64", "bf16"}) {
    const Problem p = make_problem(decode_case(format));
    const DeviceRun device(p, plan_on_device(p));
    const CapturedGraph graph = captured_step(device);
    graph.replay();
    const Outputs before = device.outputs();
    expect_same_bits(run_on_device(p), before, "before");
    std::swap(entry(p, 0, 0), entry(p, 2, 4));
    std::swap(entry(p, 1, 0), entry(p, 1, 1));
    copy_to_device(cache_of(device.args).block_table, p.cache->block_table);
    device.clear();
    check_cuda(cudaDeviceSynchronize());
    graph.replay();
    const Outputs after = device.outputs();
    expect_same_bits(run_on_device(p), after, "after");
    EXPECT_FALSE(same_bytes(before.out, after.out));
  }
}

/// O is stored in pieces of 8 bytes.
TEST(DeviceTensors, UnalignedOutputIsRefused) {
  const Problem p = make_problem(decode_case("int8-head"));
  DeviceRun device(p, plan_on_device(p));
  device.schedule();
  device.args.out.data = static_cast<std::uint8_t*>(device.args.out.data) + 4;
  expect_error(kInvalidArgument, {"out starts 4 bytes past"}, [&] { device.run(); });
}

/// Tensors of the host are refused by name before anything is launched.
TEST(DeviceTensors, HostTensorsAreRefused) {
  const Problem p = make_problem(decode_case("int8-head"));
  const DeviceRun device(p, plan_on_device(p));
  device.schedule();
  AttentionArgs args = device.args;
  args.q = p.q.view();
  expect_error(kInvalidArgument, {"q", "cpu", "cuda:0"},
               [&] { run(plan_on_device(p), args, device.space()); });
  args = device.args;
  cache_of(args).block_table = p.cache->block_table.view();
  expect_error(kInvalidArgument, {"block_table", "cpu", "cuda:0"},
               [&] { run(plan_on_device(p), args, device.space()); });
  EXPECT_TRUE(untouched(device.outputs().out));
  device.run();
  EXPECT_EQ(judge_device(p, device.outputs()), "");
}

}  // namespace
}  // namespace halftone::testing
