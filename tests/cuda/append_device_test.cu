// append on the GPU writes the bytes that the CPU writes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "format/status.h"
#include "halftone/error.h"
#include "tests/cuda/device_problem.h"

namespace halftone::testing {
namespace {

struct RopeTables {
  Tensor cos, sin, positions;
  Rope view(RopePairing pairing) const { return {pairing, cos.view(), sin.view(), positions.view()}; }
};

RopeTables rope_tables(Random& random, int half, std::int64_t tokens) {
  constexpr int kRows = 64;
  std::vector<float> cos, sin;
  for (int position = 0; position < kRows; ++position) {
    for (int i = 0; i < half; ++i) {
      const double angle = position * std::pow(10000.0, -static_cast<double>(i) / half);
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  std::vector<std::int32_t> positions;
  for (std::int64_t t = 0; t < tokens; ++t)
    positions.push_back(static_cast<std::int32_t>(random.integer(0, kRows - 1)));
  return {Tensor::of(DType::kFloat32, {kRows, half}, cos), Tensor::of(DType::kFloat32, {kRows, half}, sin),
          Tensor::of({tokens}, positions)};
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

/// The cache's pages after the same append on the GPU, which leaves the status at 0.
Tensor pages_from_device(const Cache& cache, const AppendArgs& args, const Tensor& status) {
  Uploads uploads;
  const PagedKv device = uploads.add(cache.view());
  const AppendArgs device_args = uploads.add(args);
  append(device, device_args);
  check_cuda(cudaDeviceSynchronize());
  Tensor pages = cache.pages.clone();
  download(device.pages, pages);
  EXPECT_TRUE(uploads.guards_intact());
  download(device_args.status, status);
  EXPECT_EQ(status.as<std::int32_t>()[0], 0);
  return pages;
}

/// Appends 108 * `scale` random tokens to slots on both backends and compares every byte of the pages.
void expect_same_pages(const KvCacheSpec& spec, std::uint64_t seed, RopePairing pairing, DType input,
                       bool by_slots, int scale = 1) {
  Random random(seed);
  const std::vector<int> capacities = {70 * scale, 33 * scale, 5 * scale};
  Cache cache(spec, capacities, random);
  const std::int64_t tokens = 108 * scale;
  std::vector<float> values(static_cast<std::size_t>(tokens * spec.kv_heads * spec.head_dim));
  fill(random, Data::kOutlierChannels, values, spec.kv_heads, spec.head_dim);
  const Tensor k = Tensor::of(input, {tokens, spec.kv_heads, spec.head_dim}, values);
  values.resize(static_cast<std::size_t>(tokens * spec.kv_heads * spec.v_dim()));
  fill(random, Data::kNormal, values, spec.kv_heads, spec.v_dim());
  const Tensor v = Tensor::of(input, {tokens, spec.kv_heads, spec.v_dim()}, values);
  cache.calibrate(k, v);

  AppendArgs args;
  args.k = k.view();
  args.v = v.view();
  const RopeTables rope = rope_tables(random, spec.head_dim / 4, tokens);
  if (pairing != RopePairing::kNone) args.rope = rope.view(pairing);
  std::vector<std::int64_t> slots;
  for (int i = 0; i < 3; ++i) cache.lengths.as<std::int32_t>()[i] = capacities[i];
  slots = cache.slots();
  slots[7] = -1;
  const Tensor slot_tensor = Tensor::of({tokens}, slots);
  const Tensor cu = Tensor::of({4}, std::vector<std::int32_t>{0, 70 * scale, 103 * scale, 108 * scale});
  for (int i = 0; i < 3; ++i) cache.lengths.as<std::int32_t>()[i] = 0;
  (by_slots ? args.slot_mapping : args.cu_seqlens) = by_slots ? slot_tensor.view() : cu.view();
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  args.status = status.view();

  const Tensor pages = pages_from_device(cache, args, status);
  append(cache.view(), args);
  expect_equal_pages(cache.pages, pages, spec, seed);
}

TEST(DeviceAppend, SameBytesAsTheCpu) {
  std::uint64_t seed = 1;
  for (const NamedFormat& named : named_formats()) {
    for (const int dim : {64, 80, 96, 128, 192, 256}) {
      for (const bool rotate : {false, true}) {
        KvCacheSpec spec{named.format, named.format, 3, dim, 0, 32, rotate, rotate};
        try {
          (void)page_layout(spec);
        } catch (const Error&) {
          continue;  // a group that does not divide the dim
        }
        const DType input = std::array{DType::kBFloat16, DType::kFloat16, DType::kFloat32}[seed % 3];
        const RopePairing pairing =
            std::array{RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved}[seed / 3 % 3];
        expect_same_pages(spec, seed, pairing, input, seed % 2 == 0);
        ++seed;
      }
    }
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
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  const Tensor cu = Tensor::of({kRequests + 1}, ends);
  AppendArgs args;
  args.k = args.v = k.view();
  args.cu_seqlens = cu.view();
  args.status = status.view();

  const Tensor pages = pages_from_device(cache, args, status);
  for (std::int32_t& end : ends) end -= kBefore;
  const Tensor cpu_cu = Tensor::of({kRequests + 1}, ends);
  args.cu_seqlens = cpu_cu.view();
  args.k = args.v = TensorView::contiguous(k.as<float>().data() + kBefore * 2 * 64, DType::kFloat32,
                                           {tokens - kBefore, 2, 64});
  append(cache.view(), args);
  expect_equal_pages(cache.pages, pages, spec, 7);
}

TEST(DeviceAppend, MixedFormatsAndF32Scales) {
  std::uint64_t seed = 1000;
  for (const char* k : {"int8-token-head-asym-f32", "int4-g64-sym", "fp8-g32-f32", "int8-static-head-asym"}) {
    for (const char* v : {"int4-token-asym-f32", "int8-g128-asym", "bf16", "fp8-token"}) {
      expect_same_pages({parse_format(k), parse_format(v), 9, 128, 256, 16}, seed, RopePairing::kHalf,
                        DType::kFloat32, seed % 2 == 0);
      ++seed;
    }
  }
}

// Enough tokens for the kernels that take windows of them, with all that the plain ones leave out and
// without.
TEST(DeviceAppend, ManyTokens) {
  std::uint64_t seed = 2000;
  for (const NamedFormat& named : named_formats()) {
    for (const int dim : {64, 80, 96, 128, 192, 256}) {
      for (const RopePairing pairing : {RopePairing::kNone, RopePairing::kHalf}) {
        const int heads = dim == 128 ? 11 : 2;
        KvCacheSpec spec{named.format, named.format, heads, dim, 0, 32, false, seed % 4 == 3};
        try {
          (void)page_layout(spec);
        } catch (const Error&) {
          continue;  // a group that does not divide the dim
        }
        expect_same_pages(spec, seed, pairing, seed % 4 < 2 ? DType::kBFloat16 : DType::kFloat16,
                          seed % 3 == 0, 21);
        ++seed;
      }
    }
  }
}

TEST(DeviceAppend, AsymmetricAndMixedOfManyTokens) {
  std::uint64_t seed = 3000;
  for (const char* k :
       {"int8-token-head-asym", "int4-g64-sym", "fp8-g32", "int8-static-head-asym", "int4-tensor"}) {
    for (const char* v :
         {"int4-token-asym", "int8-g128-asym", "int4-static-head-asym", "int8-g32-asym-f32"}) {
      expect_same_pages({parse_format(k), parse_format(v), 5, 128, 256, 16}, seed, RopePairing::kNone,
                        DType::kBFloat16, seed % 2 == 0, 21);
      expect_same_pages({parse_format(v), parse_format(v), 5, 128, 0, 64}, seed, RopePairing::kNone,
                        DType::kBFloat16, seed % 2 == 1, 21);
      ++seed;
    }
  }
}

TEST(DeviceAppend, LengthsAdvanceByTheirTokens) {
  constexpr int kRequests = 300;  // of several CTAs
  std::vector<std::int32_t> cu = {0}, expected;
  for (int i = 0; i < kRequests; ++i) {
    cu.push_back(cu.back() + i % 4);
    expected.push_back(5 + i % 4);
  }
  const KvCacheSpec spec{parse_format("int8-head"), parse_format("int8-head"), 1, 64, 0, 16};
  Random random(9);
  const Cache cache(spec, std::vector<int>(kRequests, 16), random);
  const auto lengths = cache.lengths.as<std::int32_t>();
  std::fill(lengths.begin(), lengths.end(), 5);
  const Tensor k = Tensor::of(DType::kFloat32, {cu.back(), 1, 64},
                              std::vector<float>(static_cast<std::size_t>(cu.back()) * 64, 1.0F));
  const Tensor cumulative = Tensor::of({kRequests + 1}, cu);
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  Uploads uploads;
  AppendArgs args;
  args.k = uploads.add(k.view());
  args.v = uploads.add(k.view());
  args.cu_seqlens = uploads.add(cumulative.view());
  args.status = uploads.add(status.view());
  args.advance = true;
  const PagedKv device = uploads.add(cache.view());
  append(device, args);
  check_cuda(cudaDeviceSynchronize());
  download(device.lengths, cache.lengths);
  EXPECT_EQ(std::vector<std::int32_t>(lengths.begin(), lengths.end()), expected);
}

/// The status after an append of `tokens` rows of ones, of which `token` has one `value`.
int status_after(const char* format, DType input, std::int64_t tokens, std::int64_t token, float value,
                 bool padding) {
  const KvCacheSpec spec{parse_format(format), parse_format(format), 1, 64, 0, 16};
  Random random(3);
  const Cache cache(spec, std::vector<int>{static_cast<int>(tokens)}, random);
  std::vector<float> values(static_cast<std::size_t>(tokens) * 64, 1.0f);
  values[static_cast<std::size_t>(token) * 64 + 37] = value;
  const Tensor k = Tensor::of(input, {tokens, 1, 64}, values);
  std::vector<std::int64_t> slot_of(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < slot_of.size(); ++i) slot_of[i] = static_cast<std::int64_t>(i);
  if (padding) slot_of[static_cast<std::size_t>(token)] = -1;
  const Tensor slots = Tensor::of({tokens}, slot_of);
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

TEST(DeviceAppend, ValuesThatAreNotAcceptedSetTheStickyFlag) {
  for (const char* format : {"bf16", "fp8-token-head", "int8-head", "int8-token", "int4-row"}) {
    for (const DType input : {DType::kFloat32, DType::kBFloat16}) {
      const std::int32_t large = parse_format(format).dynamic_scale() ? kStatusLargeV : 0;  // V is K here
      for (const std::int64_t tokens : {2, 2100}) {
        for (const float value : {NAN, -INFINITY, 0x1.02p100f, -0x1.02p100f}) {
          SCOPED_TRACE(::testing::Message() << format << ", " << tokens << " tokens, " << value);
          const std::int32_t expected = kStatusNonFinite | (std::isnan(value) ? 0 : large);
          EXPECT_EQ(status_after(format, input, tokens, tokens - 1, value, false), expected);
          EXPECT_EQ(status_after(format, input, tokens, tokens - 1, value, true), 0);
        }
        EXPECT_EQ(status_after(format, input, tokens, 1, -0x1p100f, false), large);
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
