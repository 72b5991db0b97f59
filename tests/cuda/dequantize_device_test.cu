// dequantize on the GPU writes the bytes that the CPU writes.
#include <gtest/gtest.h>

#include <climits>
#include <string>

#include "format/head_dim.h"
#include "halftone/error.h"
#include "tests/cuda/device_problem.h"
#include "tests/expect_error.h"

namespace halftone::testing {
namespace {

constexpr int kHeads = 3;
const std::vector<int> kLengths = {70, 0, 33, 5, 16, 1};

/// A cache whose requests hold `lengths` random tokens; pages hold NaN wherever nothing was appended.
Cache make_cache(const KvCacheSpec& spec, const std::vector<int>& lengths, std::uint64_t seed) {
  Random random(seed);
  Cache cache(spec, lengths, random);
  std::int64_t tokens = 0;
  for (const int n : lengths) tokens += n;
  const auto part = [&](Data data, int dim) {
    std::vector<float> values(static_cast<std::size_t>(tokens * spec.kv_heads * dim));
    fill(random, data, values, spec.kv_heads, dim);
    return Tensor::of(DType::kFloat32, {tokens, spec.kv_heads, dim}, values);
  };
  const Tensor k = part(Data::kOutlierChannels, spec.head_dim), v = part(Data::kNormal, spec.v_dim());
  cache.calibrate(k, v);
  cache.append(lengths, k, v);
  return cache;
}

struct Rows {
  Tensor k, v;
};

/// Outputs of bytes 0xFF: NaN.
Rows make_rows(const Cache& cache, DType type, std::int64_t rows) {
  return {Tensor(type, {rows, cache.spec.kv_heads, cache.spec.head_dim}),
          Tensor(type, {rows, cache.spec.kv_heads, cache.spec.v_dim()})};
}

Rows on_cpu(const Cache& cache, DType type) {
  Rows rows = make_rows(cache, type, cache.total_tokens());
  dequantize(cache.view(), rows.k.view(), rows.v.view());
  return rows;
}

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

std::string describe(const KvCacheSpec& spec) {
  return "K " + format_name(spec.k_format) + " " + std::to_string(spec.head_dim) + ", V " +
         format_name(spec.v_format) + " " + std::to_string(spec.v_dim()) + ", pages of " +
         std::to_string(spec.page_size) + (spec.rotate_k ? ", K rotated" : "") +
         (spec.rotate_v ? ", V rotated" : "");
}

void expect_same_rows(const KvCacheSpec& spec, std::uint64_t seed, DType type) {
  const Cache cache = make_cache(spec, kLengths, seed);
  const Rows expected = on_cpu(cache, type), actual = on_device(cache, type, cache.total_tokens());
  for (const auto& [name, a, b] :
       {std::tuple{"K", &expected.k, &actual.k}, std::tuple{"V", &expected.v, &actual.v}}) {
    if (same_bytes(*a, *b)) continue;
    std::int64_t i = 0;
    while (a->get(i) == b->get(i)) ++i;
    ADD_FAILURE() << name << " element " << i << ": CPU " << a->get(i) << ", GPU " << b->get(i) << "; "
                  << describe(spec) << ", " << dtype_name(type) << ", seed " << seed;
  }
}

std::vector<KvFormat> formats() {
  std::vector<KvFormat> all;
  for (const NamedFormat& named : named_formats()) all.push_back(named.format);
  for (const char* name :
       {"int8-token-head-asym-f32", "int8-g32-asym", "int8-static-head-asym", "int8-tensor-asym",
        "int8-token-asym", "int4-g64-sym", "int4-g32-sym-f32", "int4-token-asym-f32", "int4-token-head-sym",
        "int4-static-head-sym", "fp8-g32-f32", "fp8-token", "fp8-g64"}) {
    all.push_back(parse_format(name));
  }
  return all;
}

constexpr std::array kTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

TEST(DeviceDequantize, SameBytesAsTheCpu) {
  std::uint64_t seed = 1;
  for (const KvFormat& format : formats()) {
    for (const int dim : kHeadDims) {
      for (const int page_size : kPageSizes) {
        const bool rotate = seed % 2 == 0;
        const KvCacheSpec spec{format, format, kHeads, dim, 0, page_size, rotate, rotate};
        try {
          (void)page_layout(spec);
        } catch (const Error&) {
          continue;  // a group that does not divide the dim
        }
        expect_same_rows(spec, seed, kTypes[seed % 3]);
        ++seed;
      }
    }
  }
  EXPECT_GT(seed, 600u);
}

TEST(DeviceDequantize, MixedFormatsAndDims) {
  std::uint64_t seed = 1000;
  for (const char* k : {"int8-token-head-asym-f32", "int4-g32-sym", "fp8-token-head", "bf16"}) {
    for (const char* v : {"int4-token-asym-f32", "int8-head", "fp16", "fp8"}) {
      expect_same_rows({parse_format(k), parse_format(v), 1, 192, 80, 64, seed % 2 == 0, seed % 3 == 0}, seed,
                       kTypes[seed % 3]);
      expect_same_rows({parse_format(k), parse_format(v), 9, 96, 256, 16, seed % 3 == 0, seed % 2 == 0}, seed,
                       kTypes[seed / 3 % 3]);
      ++seed;
    }
  }
}

TEST(DeviceDequantize, ManyRequestsSomeOfThemEmpty) {
  Random random(7);
  std::vector<int> lengths;
  for (int i = 0; i < 1111; ++i)
    lengths.push_back(random.chance(0.3) ? 0 : static_cast<int>(random.integer(1, 40)));
  const KvFormat format = parse_format("int8-head");
  const Cache cache = make_cache({format, format, 2, 64, 0, 16}, lengths, 8);
  const Rows expected = on_cpu(cache, DType::kBFloat16);
  const Rows actual = on_device(cache, DType::kBFloat16, cache.total_tokens());
  EXPECT_TRUE(same_bytes(expected.k, actual.k));
  EXPECT_TRUE(same_bytes(expected.v, actual.v));
}

TEST(DeviceDequantize, NoTokens) {
  const KvFormat format = parse_format("int4-g32");
  const KvCacheSpec spec{format, format, 2, 128, 0, 64};
  EXPECT_EQ(on_device(make_cache(spec, {}, 1), DType::kFloat32, 0).k.numel(), 0);
  EXPECT_EQ(on_device(make_cache(spec, {0, 0}, 1), DType::kFloat32, 0).k.numel(), 0);
}

TEST(DeviceDequantize, OneOutputStridedOrUnaligned) {
  const KvFormat format = parse_format("int4-row");
  const Cache cache = make_cache({format, format, kHeads, 128, 0, 32, true, true}, kLengths, 9);
  for (const DType type : kTypes) {
    for (const int offset : {0, 1, 8}) {
      const std::int64_t tokens = cache.total_tokens(), size = dtype_bits(type) / 8;
      const Tensor wide(type, {tokens, kHeads, 144}), wide_on_device(type, {tokens, kHeads, 144});
      Uploads uploads;
      const PagedKv device = uploads.add(cache.view());
      const TensorView base = uploads.add(wide_on_device.view());
      const auto narrow = [&](TensorView view) {
        view.shape[2] = 128;
        view.data = static_cast<std::uint8_t*>(view.data) + offset * size;
        return view;
      };
      dequantize(cache.view(), {}, narrow(wide.view()));
      dequantize(device, {}, narrow(base));
      check_cuda(cudaDeviceSynchronize());
      download(base, wide_on_device);
      EXPECT_TRUE(same_bytes(wide, wide_on_device)) << dtype_name(type) << " from element " << offset;
    }
  }
}

TEST(DeviceDequantize, TokensBehindBadEntriesAreZeros) {
  const KvFormat format = parse_format("fp8-token-head");
  Cache cache = make_cache({format, format, kHeads, 128, 0, 16}, kLengths, 10);
  const auto table = cache.block_table.as<std::int32_t>();
  table[1] = -1;
  table[3] = INT_MAX;
  table[static_cast<std::size_t>(2 * cache.block_table.shape()[1])] =
      static_cast<std::int32_t>(cache.pages.shape()[0]);
  cache.table_mode = BlockTableMode::kClamped;
  const Rows expected = on_cpu(cache, DType::kFloat32);
  EXPECT_EQ(expected.k.get(16 * kHeads * 128), 0.0F);
  for (const BlockTableMode mode : {BlockTableMode::kClamped, BlockTableMode::kTrusted}) {
    cache.table_mode = mode;
    const Rows actual = on_device(cache, DType::kFloat32, cache.total_tokens());
    EXPECT_TRUE(same_bytes(expected.k, actual.k));
    EXPECT_TRUE(same_bytes(expected.v, actual.v));
  }
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
  const Cache cache = make_cache({format, format, kHeads, 80, 0, 64}, kLengths, 12);
  const std::int64_t tokens = cache.total_tokens(), row = kHeads * 80;
  const Rows expected = on_cpu(cache, DType::kFloat16);
  for (const std::int64_t rows : {tokens + 100, tokens - 21, std::int64_t{1}}) {
    const Rows actual = on_device(cache, DType::kFloat16, rows);  // checks the guard behind the last row
    for (std::int64_t i = 0; i < actual.v.numel(); ++i) {
      ASSERT_EQ(actual.v.get(i), i < tokens * row ? expected.v.get(i) : 0.0F)
          << i << " of " << rows << " rows";
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
