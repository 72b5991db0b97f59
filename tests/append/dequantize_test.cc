// dequantize gives the same bytes on every backend: those of one request at a time on the CPU, rounded here.
#include <array>
#include <climits>
#include <string>
#include <tuple>

#include "format/head_dim.h"
#include "halftone/error.h"
#include "reference/sanitizer.h"
#include "tests/append/cache_support.h"
#include "tests/append/rows.h"
#include "tests/expect_error.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

class DequantizeOnRunners : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(DequantizeOnRunners);

Rows read(const Runner& runner, const Cache& cache, DType type) {
  Rows out = make_rows(cache, type, cache.total_tokens());
  runner.dequantize(cache, out.k, out.v);
  return out;
}

/// What the CPU reads in fp32, a request at a time.
Rows one_by_one(const Cache& cache, DType type) {
  Rows all = make_rows(cache, DType::kFloat32, cache.total_tokens());
  PagedKv one = cache.view();
  one.block_table.shape[0] = one.lengths.shape[0] = 1;
  std::int64_t token = 0;
  const auto behind = [&](const Tensor& t, std::int64_t count) {
    TensorView view = t.view();
    view.data = static_cast<std::uint8_t*>(view.data) + 4 * token * view.strides[0];
    view.shape[0] = count;
    return view;
  };
  for (const std::int32_t length : cache.lengths.as<std::int32_t>()) {
    dequantize(one, behind(all.k, length), behind(all.v, length));
    token += length;
    one.lengths.data = static_cast<std::int32_t*>(one.lengths.data) + 1;
    one.block_table.data = static_cast<std::int32_t*>(one.block_table.data) + one.block_table.strides[0];
  }
  return {Tensor::of(type, all.k.shape(), all.k.to_floats()),
          Tensor::of(type, all.v.shape(), all.v.to_floats())};
}

std::string describe(const KvCacheSpec& spec) {
  return "K " + format_name(spec.k_format) + " " + std::to_string(spec.head_dim) + ", V " +
         format_name(spec.v_format) + " " + std::to_string(spec.v_dim()) + ", pages of " +
         std::to_string(spec.page_size) + (spec.rotate_k ? ", K rotated" : "") +
         (spec.rotate_v ? ", V rotated" : "");
}

void expect_same_rows(const Runner& runner, const KvCacheSpec& spec, std::uint64_t seed, DType type) {
  if (reference::kSanitized && seed % 5 != 0) return;
  const Cache cache = make_cache(spec, kLengths, seed);
  const Rows expected = one_by_one(cache, type), actual = read(runner, cache, type);
  for (const auto& [name, a, b] :
       {std::tuple{"K", &expected.k, &actual.k}, std::tuple{"V", &expected.v, &actual.v}}) {
    if (same_bytes(*a, *b)) continue;
    std::int64_t i = 0;
    while (a->get(i) == b->get(i)) ++i;
    ADD_FAILURE() << name << " element " << i << ": expected " << a->get(i) << ", read " << b->get(i) << "; "
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

TEST_P(DequantizeOnRunners, SameBytesAsOneRequestAtATime) {
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
        expect_same_rows(runner(), spec, seed, kTypes[seed % 3]);
        ++seed;
      }
    }
  }
  EXPECT_GT(seed, 600u);
}

TEST_P(DequantizeOnRunners, MixedFormatsAndDims) {
  std::uint64_t seed = 1000;
  for (const char* k : {"int8-token-head-asym-f32", "int4-g32-sym", "fp8-token-head", "bf16"}) {
    for (const char* v : {"int4-token-asym-f32", "int8-head", "fp16", "fp8"}) {
      expect_same_rows(runner(),
                       {parse_format(k), parse_format(v), 1, 192, 80, 64, seed % 2 == 0, seed % 3 == 0}, seed,
                       kTypes[seed % 3]);
      expect_same_rows(runner(),
                       {parse_format(k), parse_format(v), 9, 96, 256, 16, seed % 3 == 0, seed % 2 == 0}, seed,
                       kTypes[seed / 3 % 3]);
      ++seed;
    }
  }
}

TEST_P(DequantizeOnRunners, LatentCaches) {
  std::uint64_t seed = 500;
  for (const KvCacheSpec& spec : latent_specs())
    expect_same_rows(runner(), spec, seed, kTypes[seed % 3]), ++seed;
}

TEST_P(DequantizeOnRunners, ManyRequestsSomeOfThemEmpty) {
  Random random(7);
  std::vector<int> lengths;
  for (int i = 0; i < 1111; ++i)
    lengths.push_back(random.chance(0.3) ? 0 : static_cast<int>(random.integer(1, 40)));
  const KvFormat format = parse_format("int8-head");
  const Cache cache = make_cache({format, format, 2, 64, 0, 16}, lengths, 8);
  const Rows expected = one_by_one(cache, DType::kBFloat16);
  const Rows actual = read(runner(), cache, DType::kBFloat16);
  EXPECT_TRUE(same_bytes(expected.k, actual.k));
  EXPECT_TRUE(same_bytes(expected.v, actual.v));
}

TEST_P(DequantizeOnRunners, NoTokens) {
  const KvFormat format = parse_format("int4-g32");
  const KvCacheSpec spec{format, format, 2, 128, 0, 64};
  EXPECT_EQ(read(runner(), make_cache(spec, {}, 1), DType::kFloat32).k.numel(), 0);
  EXPECT_EQ(read(runner(), make_cache(spec, {0, 0}, 1), DType::kFloat32).k.numel(), 0);
}

TEST_P(DequantizeOnRunners, OneOutputStridedOrUnaligned) {
  const KvFormat format = parse_format("int4-row");
  const Cache cache = make_cache({format, format, kHeads, 128, 0, 32, true, true}, kLengths, 9);
  for (const DType type : kTypes) {
    for (const int offset : {0, 1, 8}) {
      const std::int64_t tokens = cache.total_tokens(), size = dtype_bits(type) / 8;
      const Tensor wide(type, {tokens, kHeads, 144});
      const std::unique_ptr<Place> place = runner().place();
      const TensorView base = place->add(wide.view());
      TensorView narrow = base;
      narrow.shape[2] = 128;
      narrow.data = static_cast<std::uint8_t*>(base.data) + offset * size;
      dequantize(place->add(cache.view()), {}, narrow);
      place->finish();
      place->read(base, wide);
      const Tensor expected(type, {tokens, kHeads, 144});  // bytes 0xFF in the gaps, as in `wide`
      const Rows dense = one_by_one(cache, type);
      for (std::int64_t i = 0; i < dense.v.numel(); ++i) {
        expected.set(offset + i / 128 * 144 + i % 128, dense.v.get(i));
      }
      EXPECT_TRUE(same_bytes(expected, wide)) << dtype_name(type) << " from element " << offset;
    }
  }
}

TEST_P(DequantizeOnRunners, TokensBehindBadEntriesAreZeros) {
  const KvFormat format = parse_format("fp8-token-head");
  Cache cache = make_cache({format, format, kHeads, 128, 0, 16}, kLengths, 10);
  const auto table = cache.block_table.as<std::int32_t>();
  table[1] = -1;
  table[3] = INT_MAX;
  table[static_cast<std::size_t>(2 * cache.block_table.shape()[1])] =
      static_cast<std::int32_t>(cache.pages.shape()[0]);
  cache.table_mode = BlockTableMode::kClamped;
  const Rows expected = one_by_one(cache, DType::kFloat32);
  EXPECT_EQ(expected.k.get(16 * kHeads * 128), 0.0F);
  for (const BlockTableMode mode : {BlockTableMode::kClamped, BlockTableMode::kTrusted}) {
    cache.table_mode = mode;
    if (mode == BlockTableMode::kTrusted && runner().checks_values()) {
      expect_error(ErrorCode::kOutOfRange, {"block_table[0, 1] is -1"},
                   [&] { read(runner(), cache, DType::kFloat32); });
      continue;
    }
    const Rows actual = read(runner(), cache, DType::kFloat32);
    EXPECT_TRUE(same_bytes(expected.k, actual.k));
    EXPECT_TRUE(same_bytes(expected.v, actual.v));
  }
}

}  // namespace
}  // namespace halftone::testing
