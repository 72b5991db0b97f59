// Latent caches: what append stores and dequantize reads back, which bytes belong to whom, and every user
// error.
//
// sanitizers: optimised
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "halftone/attention.h"
#include "halftone/cache.h"
#include "tests/append/cache_support.h"
#include "tests/expect_error.h"

namespace halftone {
namespace {

using namespace halftone::testing;

constexpr auto kInvalid = ErrorCode::kInvalidArgument;
constexpr auto kUnsupported = ErrorCode::kUnsupported;

KvCacheSpec random_latent(Random& random) {
  const int dim = random.pick(kLatentDims);
  KvFormat f = random_format(random, dim);
  while (f.static_scale()) f = random_format(random, dim);
  if (random.chance(0.3)) f = parse_format("fp8-g128-f32");
  if (random.chance(0.2)) {
    f = parse_format(random.chance(0.5) ? "fp8-g64-e8m0" : "fp8-g32-e8m0");
    if (random.chance(0.7)) return KvCacheSpec::latent(f, dim - 64, 64, random.pick(kPageSizes), true);
  }
  return KvCacheSpec::latent(f, dim, random.pick(kRopeDims), random.pick(kPageSizes));
}

std::string text_of(const KvCacheSpec& s) {
  return format_name(s.k_format) + " " + std::to_string(s.v_dim()) + " + " + std::to_string(s.rope_dim) +
         ", pages of " + std::to_string(s.page_size);
}

// |x - stored x|, from the format's definition: half a step, and the rounding of scale and min.
double error_bound(const KvFormat& f, const float* group, int width, double x) {
  if (f.dtype == DType::kBFloat16) return std::abs(x) * 0x1p-8 + 1e-30;
  if (f.dtype == DType::kFloat16) return std::abs(x) * 0x1p-11 + 0x1p-25;
  const auto [low, high] = std::minmax_element(group, group + width);
  const double extent = f.asymmetric ? double{*high} - *low : std::max(-double{*low}, double{*high});
  const double levels = f.dtype == DType::kFloat8E4M3 ? 448
                        : f.dtype == DType::kInt8     ? (f.asymmetric ? 255 : 127)
                                                      : (f.asymmetric ? 15 : 7);
  const bool up = f.scale_dtype == DType::kFloat8E8M0;  // scales up to twice as large
  const double unit = f.scale_dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-23;
  const double scale = std::max(extent / levels, f.scale_dtype == DType::kFloat16 ? 0x1p-14 : 0x1p-100);
  const double step =
      f.dtype == DType::kFloat8E4M3 ? std::max(std::abs(x) * 0x1p-3, scale * (up ? 0x1p-8 : 0x1p-9)) : scale;
  return step / 2 * (1 + 0x1p-9) + extent * unit * 1.01 + (f.asymmetric ? std::abs(*low) * unit : 0) +
         (std::abs(x) + extent) * 0x1p-21;
}

TEST(LatentAppendTest, RandomCachesRoundTripWithinTheirBounds) {
  Random random(51);
  for (int n = 0; n < 120; ++n) {
    const KvCacheSpec spec = random_latent(random);
    SCOPED_TRACE(::testing::Message() << "case " << n << ": " << text_of(spec));
    const std::vector<int> counts = ragged_lengths(random, static_cast<int>(random.integer(1, 4)), 0, 50);
    const int tokens = std::accumulate(counts.begin(), counts.end(), 0);
    if (tokens == 0) continue;
    Cache cache(spec, counts, random);
    const Tensor k = random_values(random, tokens, 1, spec.head_dim);
    cache.append(counts, k, Tensor{});
    const reference::Dequantised back = dequantised(cache);
    const reference::ExactValues exact = exact_values(cache);
    const int group = spec.k_format.group_size != 0 ? spec.k_format.group_size : spec.latent_dim();
    const std::vector<float> x = k.to_floats(), y = back.k.to_floats(), v = back.v.to_floats();
    for (int t = 0; t < tokens; ++t) {
      for (int d = 0; d < spec.head_dim; ++d) {
        const auto i = static_cast<std::size_t>(t * spec.head_dim + d);
        const bool latent = d < spec.latent_dim();
        const float* values = &x[i] - (latent ? d % group : 0);
        const double bound =
            latent ? error_bound(spec.k_format, values, group, x[i]) : std::abs(x[i]) * 0x1p-8 + 1e-30;
        ASSERT_LE(std::abs(double{x[i]} - y[i]), bound) << "token " << t << " dim " << d;
        ASSERT_NEAR(exact.k[i], y[i], std::abs(exact.k[i]) * 0x1p-22) << "token " << t << " dim " << d;
        if (d >= spec.v_dim()) continue;
        const auto j = static_cast<std::size_t>(t * spec.v_dim() + d);
        ASSERT_EQ(v[j], y[i]) << "token " << t << " dim " << d;
        ASSERT_EQ(exact.v[j], exact.k[i]);
      }
    }
    ASSERT_TRUE(cache.guards_intact());
  }
}

TEST(LatentAppendTest, SlotsTablesSingleTokensAndThreadsGiveTheSameBytes) {
  Random random(52);
  for (int n = 0; n < 30; ++n) {
    const KvCacheSpec spec = random_latent(random);
    SCOPED_TRACE(::testing::Message() << "case " << n << ": " << text_of(spec));
    const std::vector<int> counts = {static_cast<int>(random.integer(1, 70)), 0,
                                     static_cast<int>(random.integer(0, 9))};
    const int tokens = counts[0] + counts[2];
    Cache by_table(spec, counts, random);
    Cache by_slot = by_table.clone(), one_by_one = by_table.clone(), one_thread = by_table.clone();
    const Tensor k = random_values(random, tokens, 1, spec.head_dim);
    by_table.append(counts, k, Tensor{});
    const Tensor slots = Tensor::of({tokens}, by_table.slots()), none;

    append(by_slot.view(), by_slots(k, none, slots, {}));
    ASSERT_TRUE(same_bytes(by_table.pages, by_slot.pages));

    const int threads = omp_get_max_threads();
    omp_set_num_threads(threads == 1 ? 3 : 1);
    append(one_thread.view(), by_slots(k, none, slots, {}));
    omp_set_num_threads(threads);
    ASSERT_TRUE(same_bytes(by_table.pages, one_thread.pages));

    for (int t = tokens - 1; t >= 0; --t) {
      AppendArgs one = by_slots(k, none, slots, {});
      one.k = rows(one.k, t, 1);
      one.slot_mapping = rows(one.slot_mapping, t, 1);
      append(one_by_one.view(), one);
    }
    ASSERT_TRUE(same_bytes(by_table.pages, one_by_one.pages));
  }
}

TEST(LatentAppendTest, ATokenWritesItsOwnRecordAndNothingElse) {
  Random random(53);
  for (int n = 0; n < 60; ++n) {
    const KvCacheSpec spec = random_latent(random);
    SCOPED_TRACE(::testing::Message() << "case " << n << ": " << text_of(spec));
    const PageLayout l = page_layout(spec);
    ASSERT_EQ(l.row_bytes % 16, 0);
    const bool apart = spec.k_format.scale_dtype == DType::kFloat8E8M0;  // 8 or 16 bytes behind the records
    const std::int64_t records = l.row_bytes * spec.page_size;
    const std::int64_t scales = l.spans[0].param_bytes / kTileTokens, scale_row = (scales + 7) / 8 * 8;
    const std::int64_t used = records + (apart ? scale_row * spec.page_size : 0);
    ASSERT_EQ(l.page_bytes, (used + l.row_bytes - 1) / l.row_bytes * l.row_bytes);
    const std::int64_t slot = random.integer(0, 3 * spec.page_size - 1);
    const Tensor k = random_values(random, 1, 1, spec.head_dim);
    const Tensor slots = Tensor::of({1}, std::vector<std::int64_t>{slot}), none;
    const Tensor low(DType::kUInt8, {3, l.page_bytes}), high(DType::kUInt8, {3, l.page_bytes});
    low.fill_bytes(0x00);
    high.fill_bytes(0xFF);
    for (const Tensor* pages : {&low, &high}) {
      PagedKv cache;
      cache.spec = spec;
      cache.pages = pages->view();
      append(cache, by_slots(k, none, slots, {}));
      ASSERT_TRUE(pages->guards_intact());
    }
    std::vector<bool> own(static_cast<std::size_t>(l.row_bytes));
    for (int s = 0; s < spec.spans().count; ++s) {
      const SpanLayout& span = l.spans[static_cast<std::size_t>(s)];
      EXPECT_EQ(span.data_offset % 16, 0);
      EXPECT_EQ(span.param_offset % 16, 0);
      std::fill_n(own.begin() + span.data_offset, span.data_bytes / kTileTokens, true);
      if (apart) continue;
      std::fill_n(own.begin() + span.param_offset, span.param_bytes / kTileTokens, true);
    }
    for (std::int64_t i = 0; i < 3 * l.page_bytes; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const std::int64_t within = i % l.page_bytes, place = slot % spec.page_size;
      const std::int64_t behind = within - records - place * scale_row;
      const bool record = within / l.row_bytes == place && within < records &&
                          own[static_cast<std::size_t>(within % l.row_bytes)];
      const bool its_scales = apart && behind >= 0 && behind < scales;
      if (i / l.page_bytes == slot / spec.page_size && (record || its_scales)) {
        ASSERT_EQ(low.bytes()[at], high.bytes()[at]) << "own byte " << i << " not written";
      } else {
        ASSERT_TRUE(low.bytes()[at] == 0x00 && high.bytes()[at] == 0xFF) << "foreign byte " << i;
      }
    }
  }
}

TEST(LatentAppendTest, RopeRotatesTheRotaryDimsAlone) {
  Random random(54);
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"), 512, 64, 16);
  constexpr int kTokens = 20;
  for (const RopePairing pairing : {RopePairing::kHalf, RopePairing::kInterleaved}) {
    for (const int half : {32, 12}) {
      const Tensor k = random_values(random, kTokens, 1, 576);
      const RopeTables tables(random, kTokens, half);
      std::vector<float> x = k.to_floats();
      for (int t = 0; t < kTokens; ++t) {
        float* dims = &x[static_cast<std::size_t>(t * 576 + 512)];
        const int row = tables.positions.as<std::int32_t>()[static_cast<std::size_t>(t)];
        for (int i = 0; i < half; ++i) {
          float& a = dims[pairing == RopePairing::kHalf ? i : 2 * i];
          float& b = dims[pairing == RopePairing::kHalf ? i + half : 2 * i + 1];
          const float c = tables.cos.get(row * half + i), s = tables.sin.get(row * half + i);
          const float first = a * c - b * s, second = b * c + a * s;
          a = first;
          b = second;
        }
      }
      const std::vector<int> counts = {kTokens};
      Cache roped(spec, counts, random);
      Cache plain = roped.clone();
      plain.append(counts, Tensor::of(DType::kFloat32, {kTokens, 1, 576}, x), Tensor{});
      const Tensor slots = Tensor::of({kTokens}, plain.slots()), none;
      append(roped.view(), by_slots(k, none, slots, tables.rope(pairing)));
      EXPECT_TRUE(same_bytes(roped.pages, plain.pages));
    }
  }
}

TEST(LatentAppendTest, EitherOutputAloneAndHalfStridedOnes) {
  Random random(55);
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"));
  const std::vector<int> counts = {70, 3};
  Cache cache(spec, counts, random);
  cache.append(counts, random_values(random, 73, 1, 576), Tensor{});
  const reference::Dequantised both = dequantised(cache);
  const Tensor k(DType::kBFloat16, {73, 2, 600}), v(DType::kFloat32, {73, 1, 512});
  dequantize(cache.view(), {}, v.view());
  EXPECT_TRUE(same_bytes(v, both.v));
  TensorView part = k.view();
  part.shape[1] = 1;
  part.shape[2] = 576;
  dequantize(cache.view(), part, {});
  for (int t = 0; t < 73; ++t) {
    for (int d = 0; d < 1200; ++d) {
      const float got = k.get(t * 1200 + d);
      if (d < 576) {
        const float want = reference::from_bits16(
            DType::kBFloat16, reference::to_bits16(DType::kBFloat16, both.k.get(t * 576 + d)));
        ASSERT_EQ(got, want) << t << " " << d;
      } else {
        ASSERT_TRUE(std::isnan(got)) << t << " " << d;
      }
    }
  }
}

TEST(LatentSpecTest, SpansAreTheDescription) {
  const KvFormat fp8 = parse_format("fp8-g128-f32"), int4 = parse_format("int4-g32");
  const KvCacheSpec latent = KvCacheSpec::latent(fp8);
  const KvSpans spans = latent.spans();
  ASSERT_EQ(spans.count, 2);
  EXPECT_EQ(spans.span[0].format, fp8);
  EXPECT_EQ(spans.span[0].order, KvOrder::kRows);
  EXPECT_EQ(spans.span[0].dims, 512);
  EXPECT_EQ(spans.span[0].k_first, 0);
  EXPECT_EQ(spans.span[0].v_first, 0);
  EXPECT_EQ(format_name(spans.span[1].format), "bf16");
  EXPECT_EQ(spans.span[1].dims, 64);
  EXPECT_EQ(spans.span[1].k_first, 512);
  EXPECT_EQ(spans.span[1].v_first, -1);

  const KvCacheSpec separate = KvCacheSpec::separate(int4, KvFormat{}, 2, 128, 64, 32);
  EXPECT_EQ(separate, (KvCacheSpec{int4, KvFormat{}, 2, 128, 64, 32}));
  const KvSpans parts = separate.spans();
  ASSERT_EQ(parts.count, 2);
  EXPECT_EQ(parts.span[0].order, KvOrder::kFragments);
  EXPECT_EQ(parts.span[1].order, KvOrder::kRows);
  EXPECT_EQ(parts.span[1].v_first, 0);
  EXPECT_EQ(parts.span[1].k_first, -1);
  EXPECT_EQ(page_layout(separate).row_bytes, 0);
}

TEST(LatentSpecTest, UserErrors) {
  const KvCacheSpec good = KvCacheSpec::latent(parse_format("fp8-g128-f32"));
  const auto refused = [&](ErrorCode code, std::initializer_list<std::string_view> words, auto spoil) {
    KvCacheSpec spec = good;
    spoil(spec);
    expect_error(code, words, [&] { page_layout(spec); });
  };
  refused(kInvalid, {"rope_dim is 48", "32 or 64"}, [](auto& s) { s.rope_dim = 48; });
  refused(kInvalid, {"rope_dim is -1", "use 32"}, [](auto& s) { s.rope_dim = -1; });
  refused(kInvalid, {"v_head_dim is 128", "256 or 512"}, [](auto& s) { s.v_head_dim = 128; });
  refused(kInvalid, {"v_head_dim is 0", "256 or 512"}, [](auto& s) { s.v_head_dim = 0; });
  refused(kInvalid, {"head_dim is 560", "use 576"}, [](auto& s) { s.head_dim = 560; });
  refused(kInvalid, {"kv_heads is 8", "use 1"}, [](auto& s) { s.kv_heads = 8; });
  refused(kInvalid, {"page_size is 48", "16, 32, 64"}, [](auto& s) { s.page_size = 48; });
  refused(kUnsupported, {"rotate_k is true", "use false"}, [](auto& s) { s.rotate_k = true; });
  refused(kUnsupported, {"rotate_v is true", "use false"}, [](auto& s) { s.rotate_v = true; });
  refused(kUnsupported, {"k_format is fp8", "fp8-g128-f32"},
          [](auto& s) { s.k_format = s.v_format = parse_format("fp8"); });
  refused(kInvalid, {"v_format is bf16", "k_format is fp8-g128-f32"},
          [](auto& s) { s.v_format = KvFormat{}; });
  refused(kInvalid, {"k_format.group_size is 48"}, [](auto& s) { s.k_format.group_size = 48; });
}

TEST(LatentSpecTest, CallsThatDoNotFit) {
  Random random(56);
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("int4-g32"), 512, 64, 16);
  const std::vector<int> counts = {4};
  Cache cache(spec, counts, random);
  const Tensor k = random_values(random, 4, 1, 576), v = random_values(random, 4, 1, 512), none;
  const Tensor slots = Tensor::of({4}, std::vector<std::int64_t>{0, 1, 2, 3});
  const Cache before = cache.clone();
  expect_error(kInvalid, {"v is present", "V of a latent cache is a part of k"},
               [&] { append(cache.view(), by_slots(k, v, slots, {})); });
  expect_error(kInvalid, {"k has shape [4, 1, 512]", "pass 576"},
               [&] { append(cache.view(), by_slots(v, none, slots, {})); });
  const RopeTables tables(random, 4, 64);
  expect_error(kInvalid, {"rope.cos.shape[1] is 64", "rope_dim 64", "use 32"},
               [&] { append(cache.view(), by_slots(k, none, slots, tables.rope(RopePairing::kHalf))); });
  k.set(3 * 576 + 570, INFINITY);
  expect_error(kInvalid, {"k[3, 0, 570] is inf"},
               [&] { append(cache.view(), by_slots(k, none, slots, {})); });
  const Tensor fbgemm(DType::kUInt8, {4, 1, 320});
  expect_error(kUnsupported, {"rope_dim is 64", "FBGEMM"},
               [&] { import_fbgemm_int4(cache.view(), KvPart::kK, fbgemm.view(), slots.view()); });
  expect_error(kInvalid, {"format is fp8-g128-f32", "append directly"},
               [&] { (void)calibrate(v.view(), parse_format("fp8-g128-f32")); });
  expect_error(kInvalid, {"k_out has shape [4, 1, 512]", "pass 576"},
               [&] { dequantize(cache.view(), v.view(), {}); });
  EXPECT_TRUE(same_bytes(before.pages, cache.pages));
}

}  // namespace
}  // namespace halftone
