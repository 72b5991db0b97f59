// dequantize on the GPU where the host does not know the lengths: tables and outputs that do not fit, graphs,
// errors.
#include <gtest/gtest.h>

#include <climits>
#include <string>

#include "format/head_dim.h"
#include "halftone/error.h"
#include "tests/append/rows.h"
#include "tests/cuda/device_problem.h"
#include "tests/expect_error.h"

namespace halftone::testing {
namespace {

Rows on_device(const Cache& cache, DType type, std::int64_t row_count) {
  Rows rows = make_rows(cache, type, row_count);
  Uploads uploads;
  const PagedKv device = uploads.add(cache.view());
  const TensorView k = uploads.add(rows.k.view()), v = uploads.add(rows.v.view());
  dequantize(device, k, v);
  check_cuda(cudaDeviceSynchronize());
  EXPECT_TRUE(uploads.guards_intact());
  download(k, rows.k);
  download(v, rows.v);
  return rows;
}

/// Lengths that the host cannot see: negative ones count as 0, and tokens beyond the table are zeros.
TEST(DeviceDequantize, LengthsBeyondTheTable) {
  const KvFormat format = parse_format("int8-head");
  const Cache cache = make_cache({format, format, 1, 64, 0, 16}, {20, 32}, 11);
  const Rows expected = on_cpu(cache, DType::kFloat32);
  const std::int64_t width = cache.block_table.shape()[1] * 16, row = 64;
  cache.lengths.as<std::int32_t>()[1] = INT_MAX;
  Rows actual = on_device(cache, DType::kFloat32, 20 + width + 40);
  for (std::int64_t i = 0; i < 52 * row; ++i) ASSERT_EQ(actual.k.get(i), expected.k.get(i)) << i;
  for (std::int64_t i = (20 + width) * row; i < actual.k.numel(); ++i) ASSERT_EQ(actual.k.get(i), 0.0F) << i;
  cache.lengths.as<std::int32_t>()[0] = -5;
  cache.lengths.as<std::int32_t>()[1] = 32;
  actual = on_device(cache, DType::kFloat32, 32);
  for (std::int64_t i = 0; i < 32 * row; ++i) ASSERT_EQ(actual.k.get(i), expected.k.get(20 * row + i)) << i;
}

TEST(DeviceDequantize, SurplusRowsAreZerosAndSurplusTokensAreLeftOut) {
  const KvFormat format = parse_format("int4-row");
  for (const KvCacheSpec& spec :
       {KvCacheSpec{format, format, kHeads, 80, 0, 64}, KvCacheSpec::latent(parse_format("fp8-g128-f32")),
        KvCacheSpec::latent(parse_format("int8-token"), 256, 32, 16)}) {
    const Cache cache = make_cache(spec, kLengths, 12);
    const std::int64_t tokens = cache.total_tokens(), row = spec.kv_heads * spec.v_dim();
    const Rows expected = on_cpu(cache, DType::kFloat16);
    for (const std::int64_t rows : {tokens + 100, tokens - 21, std::int64_t{1}}) {
      const Rows actual = on_device(cache, DType::kFloat16, rows);  // checks the guard behind the last row
      for (std::int64_t i = 0; i < actual.v.numel(); ++i) {
        ASSERT_EQ(actual.v.get(i), i < tokens * row ? expected.v.get(i) : 0.0F)
            << i << " of " << rows << " rows";
      }
    }
  }
}

TEST(DeviceDequantize, AGraphFollowsTheLengths) {
  const KvFormat format = parse_format("int8-g32");
  const Cache cache = make_cache({format, format, kHeads, 128, 0, 32}, {100, 60}, 13);
  const Rows rows = make_rows(cache, DType::kBFloat16, 160);
  Uploads uploads;
  const PagedKv device = uploads.add(cache.view());
  const TensorView k = uploads.add(rows.k.view()), v = uploads.add(rows.v.view());
  const CapturedGraph graph([&](cudaStream_t stream) { dequantize(device, k, v, stream); });
  for (const auto& [a, b] : {std::pair{100, 60}, std::pair{17, 0}, std::pair{0, 49}}) {
    cache.lengths.as<std::int32_t>()[0] = a;
    cache.lengths.as<std::int32_t>()[1] = b;
    check_cuda(cudaMemcpyAsync(device.lengths.data, cache.lengths.bytes().data(), 8, cudaMemcpyHostToDevice,
                               graph.stream()));
    graph.replay();
    download(k, rows.k);
    const Rows expected = on_cpu(cache, DType::kBFloat16);
    const std::int64_t live = expected.k.numel();
    for (std::int64_t i = 0; i < rows.k.numel(); ++i) {
      ASSERT_EQ(rows.k.get(i), i < live ? expected.k.get(i) : 0.0F) << i << " of lengths " << a << ", " << b;
    }
  }
}

TEST(DeviceDequantize, Errors) {
  const KvFormat format = parse_format("int8-head");
  const Cache cache = make_cache({format, format, kHeads, 64, 0, 32}, kLengths, 14);
  const Rows rows = make_rows(cache, DType::kFloat32, cache.total_tokens());
  Uploads uploads;
  const PagedKv device = uploads.add(cache.view());
  const TensorView k = uploads.add(rows.k.view()), v = uploads.add(rows.v.view());
  constexpr auto kInvalid = ErrorCode::kInvalidArgument;
  expect_error(kInvalid, {"k_out is on cpu", "cuda:0"}, [&] { dequantize(device, rows.k.view(), v); });
  expect_error(kInvalid, {"k_out is on cuda:0", "cpu"}, [&] { dequantize(cache.view(), k, v); });
  PagedKv mixed = device;
  mixed.lengths = cache.view().lengths;
  expect_error(kInvalid, {"cache.lengths is on cpu"}, [&] { dequantize(mixed, k, v); });
  TensorView fewer = v;
  fewer.shape[0] -= 1;
  expect_error(kInvalid, {"v_out.shape[0] is 124", "125"}, [&] { dequantize(device, k, fewer); });
  expect_error(kInvalid, {"k_out overlaps v_out"}, [&] { dequantize(device, k, k); });
  expect_error(kInvalid, {"both absent"}, [&] { dequantize(device, {}, {}); });
}

}  // namespace
}  // namespace halftone::testing
