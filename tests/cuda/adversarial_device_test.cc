// Tables and lengths on the GPU: in graphs, beyond bounds that the host cannot see, and at far addresses.
#include <optional>

#include "tests/cuda/adversarial_device.h"

namespace halftone::testing {
namespace {

TEST(DeviceTables, TableChangedBetweenReplays) {
  for (const char* format : {"int8-g64", "bf16"}) {
    const Problem p = make_problem(decode_case(format));
    const DeviceRun device(p, plan_on_device(p));
    const CapturedGraph graph([&](cudaStream_t stream) {
      device.schedule(stream);
      device.run(stream);
    });
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

/// Pages far apart, appended and read there: byte offsets beyond 2^31 and 2^32 give the bits of near ones.
TEST(DeviceLengths, ByteOffsetsBeyond4GiB) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    AttentionCase row = decode_case(format);
    row.requests = {{1, 200}, {1, 100}};
    row.page_size = 64;
    const Problem p = make_problem(row);
    const Outputs near = run_on_device(p);
    const std::int64_t count = p.cache->pages.shape()[0], stride = std::int64_t{900} << 20;
    ASSERT_GT(stride * (count - 2), std::int64_t{1} << 32);
    std::optional<DeviceMemory> memory;
    try {
      memory.emplace(static_cast<std::size_t>(stride * count));
    } catch (const std::runtime_error&) {
      (void)cudaGetLastError();
      GTEST_SKIP() << "this GPU has no " << stride * count << " bytes free";
    }
    DeviceRun device(p, plan_on_device(p));
    cache_of(device.args).pages.data = memory->data();
    cache_of(device.args).pages.strides[0] = stride;
    Uploads uploads;
    const std::vector<std::int64_t> slots = p.cache->slots();
    const Tensor slot_mapping = Tensor::of({static_cast<std::int64_t>(slots.size())}, slots);
    AppendArgs args;
    args.k = uploads.add(p.k.view());
    args.v = uploads.add(p.v.view());
    args.slot_mapping = uploads.add(slot_mapping.view());
    args.status = device.args.status;
    append(cache_of(device.args), args);
    device.schedule();
    device.run();
    const Outputs far = device.outputs();
    EXPECT_EQ(far.status.as<std::int32_t>()[0], 0) << format;
    expect_same_bits(near, far, format);
    EXPECT_TRUE(memory->guards_intact());
  }
}

}  // namespace
}  // namespace halftone::testing
