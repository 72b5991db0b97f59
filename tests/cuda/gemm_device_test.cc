// The GEMM that stands before a layer in `halftone bench`: its products are those of double precision,
// rounded.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cli/cuda/device.h"
#include "cli/cuda/gemm_kernel.h"
#include "reference/random.h"
#include "reference/tensor.h"

namespace halftone::cli::cuda {
namespace {

using reference::Tensor;

Tensor random_matrix(int rows, int columns, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
  reference::Random random(seed);
  random.normals(values);
  return Tensor::of(DType::kBFloat16, {rows, columns}, values);
}

void expect_product(int rows, int columns, int depth) {
  SCOPED_TRACE(testing::Message() << rows << " x " << columns << " x " << depth);
  const Device device{DeviceType::kCuda, 0};
  const Tensor x = random_matrix(rows, depth, 1), weights = random_matrix(columns, depth, 2);
  const std::vector<float> a = x.to_floats(), b = weights.to_floats();
  const DeviceTensor x_there(x, device), weights_there(weights, device);
  Tensor out(DType::kBFloat16, {rows + 1, columns});
  out.fill_bytes(0xff);
  const DeviceTensor out_there(out, device);
  Gemm gemm;
  gemm.x = x_there.view.data;
  gemm.weights = weights_there.view.data;
  gemm.out = out_there.view.data;
  gemm.rows = rows;
  gemm.columns = columns;
  gemm.depth = depth;
  ASSERT_EQ(launch_gemm(gemm, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(out.bytes().data(), out_there.view.data, out.bytes().size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  const std::vector<float> got = out.to_floats();
  const auto at = [](int row, int column, int width) {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(width) + static_cast<std::size_t>(column);
  };
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      double sum = 0;
      for (int k = 0; k < depth; ++k) {
        sum += static_cast<double>(a[at(row, k, depth)]) * static_cast<double>(b[at(column, k, depth)]);
      }
      // Half a unit of bf16 and what sums of fp32 lose.
      ASSERT_NEAR(got[at(row, column, columns)], sum, std::abs(sum) / 256 + 1e-3) << row << ", " << column;
    }
  }
  for (int column = 0; column < columns; ++column) {
    ASSERT_TRUE(std::isnan(got[at(rows, column, columns)])) << "a row behind the last";
  }
}

TEST(Gemm, FewRows) {
  for (const int rows : {1, 3, 8}) expect_product(rows, 128, 2048);
}

TEST(Gemm, ManyRows) {
  for (const int rows : {9, 64, 70}) expect_product(rows, 128, 1024);
}

TEST(Gemm, RefusesOtherShapes) {
  const auto refused = [](int rows, int columns, int depth) {
    Gemm gemm;
    gemm.rows = rows;
    gemm.columns = columns;
    gemm.depth = depth;
    EXPECT_NE(launch_gemm(gemm, nullptr), cudaSuccess) << rows << " x " << columns << " x " << depth;
  };
  refused(0, kGemmColumns, kGemmDepth);
  refused(1, kGemmColumns / 2, kGemmDepth);
  refused(1, kGemmColumns, kGemmDepth / 2);
  refused(1, 0, 0);
}

}  // namespace
}  // namespace halftone::cli::cuda
