// append and dequantize of latent caches on the GPU write the bytes that the CPU writes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "format/head_dim.h"
#include "format/status.h"
#include "tests/append/cache_support.h"
#include "tests/cuda/append_on_device.h"

namespace halftone::testing {
namespace {

constexpr std::array kTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

std::vector<KvCacheSpec> specs() {
  std::vector<KvCacheSpec> all;
  std::size_t n = 0;
  for (const char* format : {"fp8-g128-f32", "fp8-g32", "fp8-token-head", "int8-head", "int8-g64-asym-f32",
                             "int8-token", "int4-g32", "int4-row", "int4-g128-sym-f32", "bf16", "fp16"}) {
    for (const int dim : kLatentDims) {
      for (const int rope : kRopeDims) {
        all.push_back(KvCacheSpec::latent(parse_format(format), dim, rope, kPageSizes[n++ % 5]));
      }
    }
  }
  return all;
}

std::string describe(const KvCacheSpec& spec) {
  return format_name(spec.k_format) + " " + std::to_string(spec.v_dim()) + " + " +
         std::to_string(spec.rope_dim) + ", pages of " + std::to_string(spec.page_size);
}

void expect_equal_pages(const Tensor& cpu, const Tensor& gpu) {
  const auto a = cpu.bytes(), b = gpu.bytes();
  const auto at = std::mismatch(a.begin(), a.end(), b.begin());
  if (at.first == a.end()) return;
  ADD_FAILURE() << "byte " << at.first - a.begin() << ": CPU " << int{*at.first} << ", GPU "
                << int{*at.second};
}

TEST(DeviceLatent, AppendWritesTheSameBytesAsTheCpu) {
  std::uint64_t seed = 1;
  for (const KvCacheSpec& spec : specs()) {
    for (const RopePairing pairing : {RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved}) {
      SCOPED_TRACE(::testing::Message() << describe(spec) << ", seed " << seed);
      Random random(seed);
      const std::vector<int> capacities = {70, 33, 5};
      constexpr int kTokens = 108;
      Cache cache(spec, capacities, random);
      const Tensor k = random_values(random, kTokens, 1, spec.head_dim, kTypes[seed % 3]);
      const RopeTables tables(random, kTokens, seed % 4 == 0 ? 12 : spec.rope_dim / 2);
      AppendArgs args;
      args.k = k.view();
      if (pairing != RopePairing::kNone) args.rope = tables.rope(pairing);
      for (std::size_t i = 0; i < 3; ++i) cache.lengths.as<std::int32_t>()[i] = capacities[i];
      std::vector<std::int64_t> slots = cache.slots();
      slots[7] = -1;
      for (std::size_t i = 0; i < 3; ++i) cache.lengths.as<std::int32_t>()[i] = 0;
      const Tensor slot_tensor = Tensor::of({kTokens}, slots);
      const Tensor cu = Tensor::of({4}, std::vector<std::int32_t>{0, 70, 103, 108});
      (seed % 2 == 0 ? args.slot_mapping : args.cu_seqlens) = seed % 2 == 0 ? slot_tensor.view() : cu.view();
      const DevicePages device = append_on_device(cache, args);
      append(cache.view(), args);
      EXPECT_EQ(device.status, 0);
      expect_equal_pages(cache.pages, device.pages);
      ++seed;
    }
  }
}

TEST(DeviceLatent, DequantizeWritesTheSameBytesAsTheCpu) {
  std::uint64_t seed = 500;
  const std::vector<int> lengths = {70, 0, 33, 5, 16, 1};
  constexpr std::int64_t kTokens = 125, kSurplus = 3;
  for (const KvCacheSpec& spec : specs()) {
    Random random(seed);
    const DType type = kTypes[seed % 3];
    SCOPED_TRACE(::testing::Message() << describe(spec) << ", " << dtype_name(type) << ", seed " << seed);
    Cache cache(spec, lengths, random);
    cache.append(lengths, random_values(random, kTokens, 1, spec.head_dim), Tensor{});
    const auto v_width = static_cast<std::int64_t>(spec.v_dim() + (seed % 2 == 0 ? 0 : 3));  // unaligned rows
    const Tensor k(type, {kTokens + kSurplus, 1, spec.head_dim}), v(type, {kTokens + kSurplus, 1, v_width});
    const Tensor k_device = k.clone(), v_device = v.clone();
    const auto narrow = [&](TensorView view, std::int64_t rows, int dims) {
      view.shape[0] = rows;
      view.shape[2] = dims;
      return view;
    };
    dequantize(cache.view(), narrow(k.view(), kTokens, spec.head_dim),
               narrow(v.view(), kTokens, spec.v_dim()));
    for (std::int64_t row = kTokens; row < kTokens + kSurplus; ++row) {  // zeros on the GPU
      for (int d = 0; d < spec.head_dim; ++d) k.set(row * spec.head_dim + d, 0);
      for (int d = 0; d < spec.v_dim(); ++d) v.set(row * v_width + d, 0);
    }
    Uploads uploads;
    const PagedKv device = uploads.add(cache.view());
    const TensorView k_view = uploads.add(k_device.view()), v_view = uploads.add(v_device.view());
    dequantize(device, narrow(k_view, kTokens + kSurplus, spec.head_dim),
               narrow(v_view, kTokens + kSurplus, spec.v_dim()));
    check_cuda(cudaDeviceSynchronize());
    download(k_view, k_device);
    download(v_view, v_device);
    EXPECT_TRUE(uploads.guards_intact());
    EXPECT_TRUE(same_bytes(k, k_device));
    EXPECT_TRUE(same_bytes(v, v_device));
    ++seed;
  }
}

TEST(DeviceLatent, BadValuesPositionsAndPagesSetTheStatus) {
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
  expect_equal_pages(cache.pages, device.pages);  // nothing was written
}

}  // namespace
}  // namespace halftone::testing
