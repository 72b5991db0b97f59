// append on the GPU where nobody looks at its input: tokens of no request, and values that set the status.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "format/status.h"
#include "halftone/error.h"
#include "tests/append/cache_support.h"
#include "tests/cuda/device_problem.h"

namespace halftone::testing {
namespace {

struct DevicePages {
  Tensor pages;
  std::int32_t status;
};

/// The cache's pages after the same append on the GPU.
DevicePages append_on_device(const Cache& cache, AppendArgs args) {
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  args.status = status.view();
  Uploads uploads;
  const PagedKv device = uploads.add(cache.view());
  const AppendArgs device_args = uploads.add(args);
  append(device, device_args);
  check_cuda(cudaDeviceSynchronize());
  Tensor pages = cache.pages.clone();
  download(device.pages, pages);
  download(device_args.status, status);
  EXPECT_TRUE(uploads.guards_intact());
  return {std::move(pages), status.as<std::int32_t>()[0]};
}

void expect_equal_pages(const Tensor& cpu, const Tensor& gpu, const KvCacheSpec& spec, std::uint64_t seed) {
  const auto a = cpu.bytes(), b = gpu.bytes();
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    ADD_FAILURE() << "byte " << i << ": CPU " << int{a[i]} << ", GPU " << int{b[i]} << "; K "
                  << format_name(spec.k_format) << ", V " << format_name(spec.v_format) << ", dim "
                  << spec.head_dim << ", seed " << seed;
    return;
  }
}

/// cu_seqlens begins at 5: tokens before belong to no request. The CPU, which reads it, refuses that and gets
/// the rest only. Many requests of 0 to 2 tokens, so that a token's request must be searched for.
TEST(DeviceAppend, TokensBeforeTheFirstRequestAreSkipped) {
  constexpr int kBefore = 5, kRequests = 1500;
  const KvCacheSpec spec{parse_format("int8-head"), parse_format("int4-g32"), 2, 64, 0, 16};
  Random random(7);
  Cache cache(spec, std::vector<int>(kRequests, 2), random);
  std::vector<std::int32_t> ends{kBefore};
  for (int r = 0; r < kRequests; ++r) ends.push_back(ends.back() + r % 3);
  const std::int64_t tokens = ends.back();
  std::vector<float> values(static_cast<std::size_t>(tokens * 2 * 64));
  fill(random, Data::kNormal, values, 2, 64);
  const Tensor k = Tensor::of(DType::kFloat32, {tokens, 2, 64}, values);
  cache.calibrate(k, k);
  for (int r = 0; r < kRequests; ++r) cache.lengths.as<std::int32_t>()[r] = 0;
  const Tensor cu = Tensor::of({kRequests + 1}, ends);
  AppendArgs args;
  args.k = args.v = k.view();
  args.cu_seqlens = cu.view();

  const DevicePages device = append_on_device(cache, args);
  EXPECT_EQ(device.status, 0);
  for (std::int32_t& end : ends) end -= kBefore;
  const Tensor cpu_cu = Tensor::of({kRequests + 1}, ends);
  args.cu_seqlens = cpu_cu.view();
  args.k = args.v = TensorView::contiguous(k.as<float>().data() + kBefore * 2 * 64, DType::kFloat32,
                                           {tokens - kBefore, 2, 64});
  append(cache.view(), args);
  expect_equal_pages(cache.pages, device.pages, spec, 7);
}

/// The status after an append of `k`, as K and V, to these slots.
int status_of_append(const Cache& cache, const Tensor& k, const Tensor& slots) {
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  Uploads uploads;
  AppendArgs args;
  args.k = uploads.add(k.view());
  args.v = uploads.add(k.view());
  args.slot_mapping = uploads.add(slots.view());
  args.status = uploads.add(status.view());
  append(uploads.add(cache.view()), args);
  check_cuda(cudaDeviceSynchronize());
  download(args.status, status);
  return status.as<std::int32_t>()[0];
}

/// The status after an append of `tokens` rows of `dim` ones, of which `token` has one `value`.
int status_after(const char* format, int dim, DType input, std::int64_t tokens, std::int64_t token,
                 float value, bool padding) {
  const KvCacheSpec spec{parse_format(format), parse_format(format), 1, dim, 0, 16};
  Random random(3);
  const Cache cache(spec, std::vector<int>{static_cast<int>(tokens)}, random);
  std::vector<float> values(static_cast<std::size_t>(tokens * dim), 1.0f);
  values[static_cast<std::size_t>((token + 1) * dim - 27)] = value;
  const Tensor k = Tensor::of(input, {tokens, 1, dim}, values);
  std::vector<std::int64_t> slot_of(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < slot_of.size(); ++i) slot_of[i] = static_cast<std::int64_t>(i);
  if (padding) slot_of[static_cast<std::size_t>(token)] = -1;
  return status_of_append(cache, k, Tensor::of({tokens}, slot_of));
}

TEST(DeviceAppend, ValuesThatAreNotAcceptedSetTheStickyFlag) {
  for (const char* format : {"bf16", "fp8-token-head", "int8-head", "int8-token", "int4-row"}) {
    for (const DType input : {DType::kFloat32, DType::kBFloat16}) {
      const std::int32_t large = parse_format(format).dynamic_scale() ? kStatusLargeV : 0;  // V is K here
      for (const auto& [dim, tokens] : {std::pair<int, std::int64_t>{64, 2}, {64, 2100}, {512, 20}}) {
        for (const float value : {NAN, -INFINITY, 0x1.02p100f, -0x1.02p100f}) {
          SCOPED_TRACE(::testing::Message() << format << ", " << tokens << " tokens, " << value);
          EXPECT_EQ(status_after(format, dim, input, tokens, tokens - 1, value, false), kStatusNonFinite);
          EXPECT_EQ(status_after(format, dim, input, tokens, tokens - 1, value, true), 0);
        }
        EXPECT_EQ(status_after(format, dim, input, tokens, 1, -0x1p100f, false), large);
      }
    }
  }
}

TEST(DeviceAppend, BadLatentsPositionsAndPagesSetTheStatus) {
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"), 512, 64, 16);
  Random random(9);
  Cache cache(spec, std::vector<int>{20}, random);
  constexpr int kTokens = 4;
  const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, kTokens});
  const RopeTables tables(random, kTokens, 32);
  AppendArgs args;
  args.cu_seqlens = cu.view();
  for (const int dim : {0, 300, 511, 512, 575}) {
    for (const float value : {NAN, INFINITY, -0x1.02p100f}) {
      const Tensor k = random_values(random, kTokens, 1, 576);
      k.set(2 * 576 + dim, value);
      args.k = k.view();
      EXPECT_EQ(append_on_device(cache, args).status, kStatusNonFinite) << dim << " " << value;
    }
  }
  const Tensor k = random_values(random, kTokens, 1, 576);
  args.k = k.view();
  args.rope = tables.rope(RopePairing::kHalf);
  EXPECT_EQ(append_on_device(cache, args).status, 0);
  tables.positions.as<std::int32_t>()[3] = 64;
  EXPECT_EQ(append_on_device(cache, args).status, kStatusBadPage);
  args.rope = {};
  cache.block_table.as<std::int32_t>()[0] = -5;
  const DevicePages device = append_on_device(cache, args);
  EXPECT_EQ(device.status, kStatusBadPage);
  EXPECT_TRUE(same_bytes(cache.pages, device.pages)) << "nothing was written";
}

TEST(DeviceAppend, ChannelsBeyondTheirLimitsSetTheStickyFlag) {
  constexpr int kTokens = 3;
  KvCacheSpec spec{parse_format("int8-head"), parse_format("int8-head"), 1, 64, 0, 16};
  spec.offset_k = spec.scale_k = true;
  Random random(5);
  Cache cache(spec, std::vector<int>{kTokens}, random);
  const Tensor k = Tensor::of(DType::kFloat32, {kTokens, 1, 64}, std::vector<float>(kTokens * 64, 1.0f));
  cache.calibrate(k, k);
  const Tensor slots = Tensor::of({kTokens}, std::vector<std::int64_t>{0, 1, 2});
  const auto status_with = [&](const Tensor& values, float value) {
    const float good = values.get(37);
    values.set(37, value);
    const int status = status_of_append(cache, k, slots);
    values.set(37, good);
    return status;
  };
  for (const float bad : {0.0f, -1.0f, NAN, INFINITY, 0x1p-17f}) {
    EXPECT_EQ(status_with(cache.k_channel_scale, bad), kStatusBadScale) << bad;
  }
  for (const float bad : {NAN, INFINITY, 0x1.1p100f}) {
    EXPECT_EQ(status_with(cache.k_offset, bad), kStatusBadScale) << bad;
  }
  EXPECT_EQ(status_with(cache.k_offset, 3.0f), 0);
}

}  // namespace
}  // namespace halftone::testing
