// merge on the GPU: graphs, and tensors that are not where they should be.
#include <gtest/gtest.h>

#include <vector>

#include "tests/cuda/device_problem.h"
#include "tests/expect_error.h"

namespace halftone::testing {
namespace {

/// Tensors of N(0, 1).
std::vector<Tensor> random_tensors(Random& random, int count, const std::vector<std::int64_t>& shape) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < count; ++i) {
    const Tensor& t = tensors.emplace_back(DType::kFloat32, shape);
    for (float& x : t.as<float>()) x = random.normal();
  }
  return tensors;
}

TEST(DeviceMerge, AGraphReadsTheParts) {
  Random random(7);
  const std::vector<std::int64_t> shape = {4, 4, 128}, rows = {4, 4};
  const Tensor out(DType::kFloat32, shape), lse(DType::kFloat32, rows);
  Uploads uploads;
  const std::vector<TensorView> parts = uploads.add(random_tensors(random, 3, shape)),
                                lses = uploads.add(random_tensors(random, 3, rows));
  const TensorView to = uploads.add(out.view()), to_lse = uploads.add(lse.view());
  const CapturedGraph graph([&](cudaStream_t stream) { halftone::merge(parts, lses, to, to_lse, stream); });
  for (int replay = 0; replay < 2; ++replay) {
    const std::vector<Tensor> new_parts = random_tensors(random, 3, shape),
                              new_lses = random_tensors(random, 3, rows);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      uploads.write(parts[i], new_parts[i]);
      uploads.write(lses[i], new_lses[i]);
    }
    graph.replay();
    uploads.read(to, out);
    uploads.read(to_lse, lse);
    const Tensor expected(DType::kFloat32, shape), expected_lse(DType::kFloat32, rows);
    cuda_runner().merge(new_parts, new_lses, expected, expected_lse);
    EXPECT_TRUE(same_bytes(expected, out) && same_bytes(expected_lse, lse)) << replay;
  }
  uploads.finish();
}

TEST(DeviceMerge, Errors) {
  Random random(8);
  const std::vector<Tensor> host_parts = random_tensors(random, 2, {2, 3, 64}),
                            host_lses = random_tensors(random, 2, {2, 3});
  const Tensor host_out(DType::kFloat32, {2, 3, 64}), host_lse(DType::kFloat32, {2, 3});
  Uploads uploads;
  const std::vector<TensorView> parts = uploads.add(host_parts), lses = uploads.add(host_lses);
  const TensorView out = uploads.add(host_out.view()), lse = uploads.add(host_lse.view());
  constexpr auto kInvalid = ErrorCode::kInvalidArgument;
  expect_error(kInvalid, {"out is on cpu", "cuda:0"},
               [&] { halftone::merge(parts, lses, host_out.view(), lse); });
  expect_error(kInvalid, {"lse is on cpu"}, [&] { halftone::merge(parts, lses, out, host_lse.view()); });
  expect_error(kInvalid, {"parts[1] is on cpu"}, [&] {
    halftone::merge({parts[0], host_parts[1].view()}, lses, out, lse);
  });
  expect_error(kInvalid, {"part_lse[0] is on cpu"}, [&] {
    halftone::merge(parts, {host_lses[0].view(), host_lses[1].view()}, out, lse);
  });
  expect_error(kInvalid, {"out overlaps parts[1]"}, [&] { halftone::merge(parts, lses, parts[1], lse); });
  expect_error(ErrorCode::kUnsupported, {"parts has 513 views", "512"}, [&] {
    halftone::merge(std::vector<TensorView>(513, parts[0]), std::vector<TensorView>(513, lses[0]), out, lse);
  });
}

}  // namespace
}  // namespace halftone::testing
