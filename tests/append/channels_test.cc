// Offset and scale of K's channels: what append makes of K and dequantize gives back, how they are found, and
// what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "format/head_dim.h"
#include "halftone/attention.h"
#include "reference/cache.h"
#include "testing/cases.h"
#include "tests/append/cache_support.h"
#include "tests/append/rows.h"
#include "tests/expect_error.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

class ChannelsOnRunners : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(ChannelsOnRunners);

constexpr std::array kFormats = {"fp8",        "fp8-token-head",   "int8-tensor",     "int8-head",
                                 "int8-token", "int8-g32",         "int4-g64",        "int4-row",
                                 "int4-g32",   "int8-static-head", "int4-g32-sym-f32"};

/// What the definition makes of k: single operations in fp32.
Tensor treated(const Tensor& k, const Cache& cache) {
  std::vector<float> x = k.to_floats();
  const std::size_t channels = static_cast<std::size_t>(cache.spec.kv_heads * cache.spec.head_dim);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto c = static_cast<std::int64_t>(i % channels);
    if (cache.spec.offset_k) x[i] = x[i] - cache.k_offset.get(c);
    if (cache.spec.scale_k) {
      const float inverse = 1.0F / cache.k_channel_scale.get(c);
      x[i] = x[i] * inverse;
    }
  }
  return Tensor::of(DType::kFloat32, k.shape(), x);
}

/// Appends `lengths` to a cache of the spec, and the treated K to one without channels: the pages must agree,
/// and what is read back with the definition.
void expect_treated(const Runner& runner, const KvCacheSpec& spec, const std::vector<int>& lengths,
                    std::uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << format_name(spec.k_format) << ", dim " << spec.head_dim << ", seed "
                                    << seed);
  Random random(seed);
  Cache cache(spec, lengths, random);
  std::vector<std::int32_t> ends = {0};
  for (const int n : lengths) ends.push_back(ends.back() + n);
  const int tokens = ends.back(), dim = spec.head_dim;
  const DType input = std::array{DType::kBFloat16, DType::kFloat16, DType::kFloat32}[seed % 3];
  std::vector<float> values(static_cast<std::size_t>(tokens * kHeads * dim));
  fill(random, Data::kOutlierChannels, values, kHeads, dim);
  const Tensor k = Tensor::of(input, {tokens, kHeads, dim}, values);
  const Tensor v = random_values(random, tokens, kHeads, spec.v_dim(), input);
  cache.calibrate(k, v);
  Cache plain = cache.clone();
  plain.spec.offset_k = plain.spec.scale_k = false;
  plain.k_offset = Tensor{};
  plain.k_channel_scale = Tensor{};
  const Tensor k_treated = treated(k, cache), v_wide = Tensor::of(DType::kFloat32, v.shape(), v.to_floats());
  plain.append(lengths, k_treated, v_wide);

  const Tensor cu = Tensor::of({static_cast<std::int64_t>(ends.size())}, ends);
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  AppendArgs args;
  args.k = k.view();
  args.v = v.view();
  args.cu_seqlens = cu.view();
  args.status = status.view();
  runner.append(cache, args, status);
  EXPECT_TRUE(same_bytes(plain.pages, cache.pages));
  EXPECT_EQ(status.as<std::int32_t>()[0], 0);

  for (std::size_t i = 0; i < lengths.size(); ++i) cache.lengths.as<std::int32_t>()[i] = lengths[i];
  const Rows rows = make_rows(cache, DType::kFloat32, tokens);
  runner.dequantize(cache, rows.k, rows.v);
  std::vector<float> expected = dequantised(plain).k.to_floats();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto c = static_cast<std::int64_t>(i % static_cast<std::size_t>(kHeads * dim));
    if (spec.scale_k) expected[i] = expected[i] * cache.k_channel_scale.get(c);
    if (spec.offset_k) expected[i] = expected[i] + cache.k_offset.get(c);
  }
  EXPECT_EQ(rows.k.to_floats(), expected);
}

TEST_P(ChannelsOnRunners, PagesAreThoseOfTheTreatedValues) {
  std::uint64_t seed = 1;
  for (const char* format : kFormats) {
    for (const int dim : kHeadDims) {
      if (const int group = parse_format(format).group_size; group != 0 && dim % group != 0) continue;
      ++seed;
      KvCacheSpec spec{parse_format(format), parse_format("int8-head"), kHeads, dim, 64, 32};
      spec.rotate_k = seed % 2 == 0;
      spec.offset_k = seed % 3 != 0;
      spec.scale_k = seed % 3 != 1;
      expect_treated(runner(), spec, {70, 0, 33, 5}, seed);
    }
  }
}

TEST_P(ChannelsOnRunners, AppendsOfManyTokensDoTheSame) {
  std::uint64_t seed = 100;
  for (const char* format : {"fp8", "int8-head", "int4-row", "int4-g32"}) {
    for (const int dim : {80, 128}) {
      if (const int group = parse_format(format).group_size; group != 0 && dim % group != 0) continue;
      ++seed;
      KvCacheSpec spec{parse_format(format), parse_format(format), kHeads, dim, 0, 64};
      spec.rotate_k = seed % 2 == 0;
      spec.offset_k = spec.scale_k = true;
      expect_treated(runner(), spec, {2100, 33}, seed);
    }
  }
}

TEST_P(ChannelsOnRunners, RowsWithoutKeysAreEmptyWhateverTheirQueries) {
  AttentionCase row;
  row.k_format = "int8-head";
  row.offset_k = row.lse = true;
  row.out_dtype = DType::kFloat32;
  row.requests = {{2, 40}, {1, 0}};
  const Problem p = make_problem(row);
  const std::int64_t width = std::int64_t{row.q_heads} * row.head_dim, empty = 2;
  for (std::int64_t i = empty * width; i < (empty + 1) * width; ++i) p.q.set(i, i % 2 == 0 ? NAN : INFINITY);
  const Outputs outputs = runner().run(p);
  for (std::int64_t i = empty * width; i < (empty + 1) * width; ++i) ASSERT_EQ(outputs.out.get(i), 0.0F) << i;
  for (int head = 0; head < row.q_heads; ++head) {
    EXPECT_EQ(outputs.lse.get(empty * row.q_heads + head), -INFINITY) << head;
  }
}

TEST(ChannelsTest, ActAfterTheRotaryEmbedding) {
  Random random(5);
  KvCacheSpec spec{parse_format("int8-head"), parse_format("int8-head"), 2, 64, 0, 16};
  spec.offset_k = spec.scale_k = true;
  Cache cache(spec, std::vector<int>{20}, random);
  const Tensor k = random_values(random, 20, 2, 64), v = random_values(random, 20, 2, 64);
  cache.calibrate(k, v);
  const RopeTables tables(random, 20, 32);
  const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, 20});
  append(cache.view(),
         {.k = k.view(), .v = v.view(), .cu_seqlens = cu.view(), .rope = tables.rope(RopePairing::kHalf)});
  std::vector<float> x = k.to_floats();
  for (int t = 0; t < 20; ++t) {
    const int row = tables.positions.as<std::int32_t>()[static_cast<std::size_t>(t)] * 32;
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 32; ++i) {
        float &a = x[static_cast<std::size_t>((t * 2 + h) * 64 + i)], &b = *(&a + 32);
        const float c = tables.cos.get(row + i), s = tables.sin.get(row + i);
        const float ac = a * c, bs = b * s, bc = b * c, as = a * s;
        a = ac - bs, b = bc + as;
      }
    }
  }
  Cache plain = cache.clone();
  plain.pages.fill_bytes(0xff);
  plain.spec.offset_k = plain.spec.scale_k = false;
  plain.k_offset = Tensor{};
  plain.k_channel_scale = Tensor{};
  plain.append(std::vector<int>{20}, treated(Tensor::of(DType::kFloat32, {20, 2, 64}, x), cache), v);
  EXPECT_TRUE(same_bytes(plain.pages, cache.pages));
}

// --- Calibration
// ---------------------------------------------------------------------------------------------

/// [tokens, 1, 64]: every channel d holds `bias(d)` plus or minus `spread(d)`.
template <class Bias, class Spread>
Tensor channels_of(int tokens, const Bias& bias, const Spread& spread) {
  std::vector<float> x;
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < 64; ++d) x.push_back(bias(d) + ((t + t / 2 * d) % 2 == 0 ? 1.0F : -1.0F) * spread(d));
  }
  return Tensor::of(DType::kFloat32, {tokens, 1, 64}, x);
}

TEST(ChannelsTest, ValuesAreTheMeanAndTheRootOfTheLargestDistance) {
  const auto bias = [](int d) { return static_cast<float>(d); };
  const auto spread = [](int d) { return d == 3 ? 0.0F : 4.0F; };
  const std::vector<float> x = {0, 10, -3, 6};
  std::vector<float> rows(4 * 64, 2.5F);
  for (std::size_t t = 0; t < 4; ++t) rows[t * 64 + 7] = x[t];
  const Tensor k = Tensor::of(DType::kFloat32, {4, 1, 64}, rows);
  const ChannelValues both = channel_values(k.view(), true, true),
                      scale = channel_values(k.view(), false, true);
  EXPECT_EQ(both.offset[7], 3.25F);
  EXPECT_EQ(both.scale[7], std::sqrt(6.75F));
  EXPECT_EQ(both.scale[8], 1.0F);  // constant
  EXPECT_TRUE(scale.offset.empty());
  EXPECT_EQ(scale.scale[7], std::sqrt(10.0F));
  const Tensor two = channels_of(2, bias, spread);
  EXPECT_EQ(channel_values(two.view(), true, false).offset[9], 9.0F);
  EXPECT_TRUE(channel_values(two.view(), true, false).scale.empty());
}

TEST(ChannelsTest, CalibrationTakesWhatHelpsAndNothingElse) {
  const KvFormat int4 = parse_format("int4-row"), int8 = parse_format("int8-head");
  const auto none = [](int) { return 0.0F; };
  const auto one = [](int) { return 1.0F; };
  // A bias that a whole row's scale has to span.
  const Tensor biased = channels_of(
      64, [](int d) { return d % 16 == 0 ? 40.0F : 0.0F; }, one);
  const ChannelValues offset = calibrate_channels(biased.view(), int4);
  EXPECT_FALSE(offset.offset.empty());
  // Large channels without a bias.
  const Tensor wide =
      channels_of(64, none, [](int d) { return d % 16 == 0 ? 41.0F : 0.7F + 0.01F * static_cast<float>(d); });
  const ChannelValues scale = calibrate_channels(wide.view(), int8);
  EXPECT_FALSE(scale.scale.empty());
  // Stored without error as it is.
  const Tensor exact = channels_of(64, none, [](int d) { return d == 0 ? 127.0F : static_cast<float>(d); });
  const ChannelValues nothing = calibrate_channels(exact.view(), int8);
  EXPECT_TRUE(nothing.offset.empty() && nothing.scale.empty());
}

TEST(ChannelsTest, CalibrationWeighsChannelsByTheQueriesThatMeetThem) {
  Random random(3);
  std::vector<float> rows(256 * 64), queries(32 * 2 * 64);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = random.normal() * (i % 64 == 0 ? 40.0F : 1.0F);
  for (std::size_t i = 0; i < queries.size(); ++i)
    queries[i] = random.normal() * (i % 64 == 0 ? 1000.0F : 1e-3F);
  const Tensor k = Tensor::of(DType::kFloat32, {256, 1, 64}, rows);
  const Tensor q = Tensor::of(DType::kFloat32, {32, 2, 64}, queries);
  const KvFormat format = parse_format("int8-head");
  EXPECT_FALSE(calibrate_channels(k.view(), format).scale.empty());
  // Only the large channel counts: dividing it costs precision there.
  EXPECT_TRUE(calibrate_channels(k.view(), format, false, q.view()).scale.empty());
}

TEST(ChannelsTest, StaticScalesAreThoseOfTreatedValues) {
  const Tensor k = channels_of(
      2, [](int) { return 100.0F; }, [](int d) { return d == 5 ? 12.7F : 1.0F; });
  const ChannelValues values = channel_values(k.view(), true, false);
  const ChannelTensors channels{.offset =
                                    TensorView::contiguous(values.offset.data(), DType::kFloat32, {1, 64})};
  const float scale = calibrate(k.view(), parse_format("int8-tensor"), false, channels).scale[0];
  EXPECT_NEAR(scale, 0.1F, 1e-5F);
}

// --- Errors
// --------------------------------------------------------------------------------------------------

class ChannelErrorTest : public ::testing::Test {
 protected:
  ChannelErrorTest() {
    spec_.offset_k = spec_.scale_k = true;
    cache_ = make_cache(spec_, kLengths, 7);
    out_ = Tensor(DType::kFloat32, {cache_.total_tokens(), kHeads, 64});
  }
  void refused(ErrorCode code, const std::vector<std::string>& words, const PagedKv& view) {
    expect_error(code, words, [&] { dequantize(view, out_.view(), {}); });
  }
  KvCacheSpec spec_{parse_format("int8-head"), parse_format("int4-g32"), kHeads, 64, 0, 16};
  Cache cache_ = make_cache(spec_, kLengths, 7);
  Tensor out_;
};

TEST_F(ChannelErrorTest, Tensors) {
  PagedKv view = cache_.view();
  view.k_channels.offset = {};
  refused(kInvalidArgument, {"cache.k_channels.offset is absent", "spec.offset_k is true"}, view);
  view = cache_.view();
  view.k_channels.scale = {};
  refused(kInvalidArgument, {"cache.k_channels.scale is absent"}, view);
  view = cache_.view();
  view.k_channels.scale.shape[1] = 32;
  refused(kInvalidArgument, {"cache.k_channels.scale has shape [3, 32]"}, view);
  view = cache_.view();
  view.spec.offset_k = false;
  refused(kInvalidArgument, {"cache.k_channels.offset is present", "spec.offset_k is false"}, view);
  view = cache_.view();
  view.k_channels.scale.data = out_.view().data;
  view.k_channels.scale.strides[0] = 64;
  std::fill_n(out_.as<float>().begin(), kHeads * 64, 1.0F);
  refused(kInvalidArgument, {"k_out overlaps cache.k_channels.scale"}, view);
}

TEST_F(ChannelErrorTest, Values) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0F, -1.0F, 0x1p-17F, 0x1.1p16F, kInf, std::nanf("")}) {
    const float good = cache_.k_channel_scale.get(70);
    cache_.k_channel_scale.set(70, bad);
    refused(kInvalidArgument, {"cache.k_channels.scale[1, 6] is", "[2^-16, 2^16]"}, cache_.view());
    cache_.k_channel_scale.set(70, good);
  }
  for (const float bad : {0x1.1p100F, -kInf, std::nanf("")}) {
    cache_.k_offset.set(3, bad);
    refused(kInvalidArgument, {"cache.k_channels.offset[0, 3] is", "2^100"}, cache_.view());
  }
}

TEST_F(ChannelErrorTest, Specs) {
  KvCacheSpec spec = spec_;
  spec.k_format = parse_format("bf16");
  expect_error(kUnsupported, {"offset_k is true", "k_format is bf16"}, [&] { (void)page_layout(spec); });
  spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"));
  spec.scale_k = true;
  expect_error(kUnsupported, {"scale_k is true", "latent"}, [&] { (void)page_layout(spec); });
}

TEST_F(ChannelErrorTest, Problems) {
  AttentionProblem p{.batch = 1, .q_heads = 6, .kv = spec_, .max_kv_len = 64};
  EXPECT_NO_THROW((void)plan(p));
  EXPECT_NE(plan(p).describe().find("K less an offset per channel, K scaled per channel"), std::string::npos);
  p.softcap = 30;
  expect_error(kUnsupported, {"softcap is 30", "kv.offset_k"}, [&] { (void)plan(p); });
  std::get<KvCacheSpec>(p.kv).offset_k = false;
  EXPECT_NO_THROW((void)plan(p));
  p.softcap = 0;
  for (const Arithmetic arithmetic : {Arithmetic::kHalfInt8, Arithmetic::kFullInt8, Arithmetic::kFp8}) {
    p.arithmetic = arithmetic;
    const std::string is = "arithmetic is " + std::string(arithmetic_name(arithmetic));
    for (const bool offset : {false, true}) {
      std::get<KvCacheSpec>(p.kv).offset_k = offset;
      const std::string what = offset ? "kv.offset_k is true" : "kv.scale_k is true";
      expect_error(kUnsupported, {is, what, "use 16-bit"}, [&] { (void)plan(p); });
    }
  }
  std::get<KvCacheSpec>(p.kv).offset_k = false;
  p.arithmetic = Arithmetic::k16Bit;
  p.listed = {.top_k = 8, .extra_top_k = 8, .extra = std::get<KvCacheSpec>(p.kv)};
  expect_error(kUnsupported, {"listed.extra_top_k is 8", "kv.scale_k is true"}, [&] { (void)plan(p); });
}

TEST_F(ChannelErrorTest, ForeignRowsAndSamples) {
  spec_.k_format = parse_format("int4-row");
  const Cache cache = make_cache(spec_, kLengths, 7);
  const Tensor rows(DType::kUInt8, {1, kHeads, 36});
  const std::vector<std::int64_t> slots = {0};
  expect_error(kUnsupported, {"offset_k is true", "FBGEMM"}, [&] {
    export_fbgemm_int4(cache.view(), KvPart::kK, TensorView::contiguous(slots.data(), DType::kInt64, {1}),
                       rows.view());
  });
  const Tensor k = Tensor::of(DType::kFloat32, {1, 2, 64}, std::vector<float>(128, 1.0F));
  const Tensor q = Tensor::of(DType::kFloat32, {1, 3, 64}, std::vector<float>(192, 1.0F));
  expect_error(kInvalidArgument, {"q has shape [1, 3, 64]", "2 heads"},
               [&] { (void)calibrate_channels(k.view(), parse_format("int8-head"), false, q.view()); });
  expect_error(kInvalidArgument, {"format is bf16"},
               [&] { (void)calibrate_channels(k.view(), parse_format("bf16")); });
  expect_error(kInvalidArgument, {"k has shape [0, 2, 64]"}, [&] {
    (void)channel_values(Tensor(DType::kFloat32, {0, 2, 64}).view(), true, true);
  });
  k.set(5, std::nanf(""));
  expect_error(kInvalidArgument, {"k[0, 0, 5] is nan"}, [&] { (void)channel_values(k.view(), true, true); });
}

}  // namespace
}  // namespace halftone::testing
