// The GEMM that stands before a layer in `halftone bench`: its products are those of double precision,
// rounded.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <utility>
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

Tensor back(const DeviceTensor& there, std::vector<std::int64_t> shape) {
  Tensor here(DType::kBFloat16, std::move(shape));
  EXPECT_EQ(cudaMemcpy(here.bytes().data(), there.view.data, here.bytes().size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return here;
}

/// For products of `rows`, and a row behind the last that stays NaN.
DeviceTensor room_for(int rows, int columns) {
  Tensor out(DType::kBFloat16, {rows + 1, columns});
  out.fill_bytes(0xff);
  return {out, Device{DeviceType::kCuda, 0}};
}

Gemm gemm_of(const DeviceTensor& x, const DeviceTensor& weights, const DeviceTensor& out, int rows,
             int columns, int depth) {
  Gemm gemm;
  gemm.x = x.view.data;
  gemm.weights = weights.view.data;
  gemm.out = out.view.data;
  gemm.rows = rows;
  gemm.columns = columns;
  gemm.depth = depth;
  return gemm;
}

/// `out` [rows + 1, columns] is that of x [rows or more, depth] and weights [columns, depth].
void expect_product(const Tensor& x, const Tensor& weights, const Tensor& out, int rows) {
  const auto columns = static_cast<int>(weights.shape()[0]), depth = static_cast<int>(weights.shape()[1]);
  const std::vector<float> a = x.to_floats(), b = weights.to_floats(), got = out.to_floats();
  const auto at = [](int row, int column, int width) {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(width) + static_cast<std::size_t>(column);
  };
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      double sum = 0, size = 0;
      for (int k = 0; k < depth; ++k) {
        const double product =
            static_cast<double>(a[at(row, k, depth)]) * static_cast<double>(b[at(column, k, depth)]);
        sum += product, size += std::abs(product);
      }
      // Half a unit of bf16 and what sums of fp32 lose.
      ASSERT_NEAR(got[at(row, column, columns)], sum, std::abs(sum) / 256 + 1e-6 * size)
          << row << ", " << column;
    }
  }
  for (int column = 0; column < columns; ++column) {
    ASSERT_TRUE(std::isnan(got[at(rows, column, columns)])) << "a row behind the last";
  }
}

void expect_product(int rows, int columns, int depth) {
  SCOPED_TRACE(testing::Message() << rows << " x " << columns << " x " << depth);
  const Device device{DeviceType::kCuda, 0};
  const Tensor x = random_matrix(rows, depth, 1), weights = random_matrix(columns, depth, 2);
  const DeviceTensor x_there(x, device), weights_there(weights, device), out = room_for(rows, columns);
  ASSERT_EQ(launch_gemm(gemm_of(x_there, weights_there, out, rows, columns, depth), nullptr), cudaSuccess);
  expect_product(x, weights, back(out, {rows + 1, columns}), rows);
}

TEST(Gemm, FewRows) {
  for (const int rows : {1, 3, 8}) expect_product(rows, 128, 2048);
}

TEST(Gemm, ManyRows) {
  for (const int rows : {9, 64, 70}) expect_product(rows, 128, 1024);
  expect_product(70, 128, 2048);  // chunks of weights are loaded anew
}

/// The second may begin while the first is at work, whose output it reads.
TEST(Gemm, OnWhatAnotherWrites) {
  const Device device{DeviceType::kCuda, 0};
  for (const int rows : {3, 20}) {
    SCOPED_TRACE(rows);
    constexpr int kWidth = kGemmDepth, kColumns = 128;
    const Tensor x = random_matrix(rows, kWidth, 3), first = random_matrix(kWidth, kWidth, 4),
                 second = random_matrix(kColumns, kWidth, 5);
    const DeviceTensor x_there(x, device), first_there(first, device), second_there(second, device),
        between = room_for(rows, kWidth), out = room_for(rows, kColumns);
    ASSERT_EQ(launch_gemm(gemm_of(x_there, first_there, between, rows, kWidth, kWidth), nullptr),
              cudaSuccess);
    ASSERT_EQ(launch_gemm(gemm_of(between, second_there, out, rows, kColumns, kWidth), nullptr), cudaSuccess);
    const Tensor written = back(between, {rows + 1, kWidth});
    expect_product(x, first, written, rows);
    expect_product(written, second, back(out, {rows + 1, kColumns}), rows);
  }
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
