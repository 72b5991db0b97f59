// Numbers and memory that attention on the GPU must survive: what depends on its kernels and its memory.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "format/status.h"
#include "tests/cuda/adversarial_device.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

/// Unused pages, slots, scales and mins: zeros, NaN, infinities of each format, noise. Same bits.
TEST(DeviceNumerics, DeadBytesNeverMatter) {
  int ran = 0, universal = 0;
  for (const AttentionCase& listed : attention_cases()) {
    const bool wanted = listed.name.find("mixed-") == 0 || listed.head_dim == 128 || listed.head_dim == 80;
    if (listed.plain || listed.lists.top_k != 0 || listed.step.appends)
      continue;  // not one cache of all tokens
    if (!wanted || listed.requests.size() < 2) continue;
    for (const AttentionCase& row : {for_device(listed), for_table(listed)}) {
      Problem p = make_problem(row);
      universal += is_universal(p) ? 1 : 0;
      ++ran;
      p.cache = refilled(p, {0x00});
      const Plan plan = plan_on_device(p);
      const Outputs clean = run_on_device(p, plan);
      const std::initializer_list<std::uint8_t> patterns[] = {
          {0xFF}, {0x00, 0x7C}, {0x80, 0x7F}, {0x12, 0xFC, 0xC0, 0x7F, 0x81, 0x55, 0x7E}};
      for (const auto& pattern : patterns) {
        p.cache = refilled(p, pattern);
        expect_same_bits(clean, run_on_device(p, plan), row.name);
      }
    }
  }
  EXPECT_GT(ran - universal, 50);
  EXPECT_GT(universal, 50);
}

/// Q at any element alignment and stride, O at multiples of 8 bytes: the same bits, gaps left alone.
TEST(DeviceTensors, StridedAndUnalignedViews) {
  for (const int dim : {80, 128}) {
    AttentionCase row = decode_case("int8-head");
    row.head_dim = dim;
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    const Outputs expected = run_on_device(p, plan);
    for (const std::int64_t gap : {0, 3, 8}) {
      for (const std::int64_t shift : {0, 1, 4}) {  // elements
        DeviceRun device(p, plan);
        const std::int64_t tokens = p.total_q(), q_row = dim + gap, o_row = dim + gap / 4 * 4;
        const Tensor q(row.q_dtype, {shift + tokens * row.q_heads * q_row});
        const Tensor out(row.out_dtype, {shift / 4 * 4 + tokens * row.q_heads * o_row});
        for (std::int64_t i = 0; i < p.q.numel(); ++i) q.set(shift + i / dim * q_row + i % dim, p.q.get(i));
        Uploads uploads;
        const auto place = [&](TensorView& view, const Tensor& memory, std::int64_t first,
                               std::int64_t width) {
          view.data = static_cast<std::uint8_t*>(uploads.add(memory.view()).data) + 2 * first;
          view.strides[0] = row.q_heads * width, view.strides[1] = width;
        };
        place(device.args.q, q, shift, q_row);
        place(device.args.out, out, shift / 4 * 4, o_row);
        device.schedule();
        device.run();
        check_cuda(cudaDeviceSynchronize());
        check_cuda(cudaMemcpy(out.bytes().data(),
                              static_cast<std::uint8_t*>(device.args.out.data) - 2 * (shift / 4 * 4),
                              out.bytes().size(), cudaMemcpyDeviceToHost));
        std::int64_t nans = 0;
        for (std::int64_t i = 0; i < out.numel(); ++i) nans += std::isnan(out.get(i)) ? 1 : 0;
        EXPECT_EQ(nans, out.numel() - expected.out.numel()) << "a gap was written";
        for (std::int64_t i = 0; i < expected.out.numel(); ++i) {
          ASSERT_EQ(out.get(shift / 4 * 4 + i / dim * o_row + i % dim), expected.out.get(i))
              << "gap " << gap << ", shift " << shift << ", element " << i;
        }
      }
    }
    DeviceRun device(p, plan);
    device.schedule();
    device.args.out.data = static_cast<std::uint8_t*>(device.args.out.data) + 4;
    expect_error(kInvalidArgument, {"out starts 4 bytes past"}, [&] { device.run(); });
  }
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
