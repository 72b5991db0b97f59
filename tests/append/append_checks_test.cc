// What append makes of input that it does not take: refused by name where values are checked before any work,
// else left out and reported in the status word.
#include <cmath>
#include <string>
#include <utility>

#include "format/status.h"
#include "halftone/error.h"
#include "testing/cases.h"
#include "tests/append/cache_support.h"
#include "tests/expect_error.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

class AppendChecks : public OnRunners {
 protected:
  /// append() refuses `args` with `words`, and changes no byte, or sets the bits `reported` of the status.
  void expect_reported(const Cache& cache, AppendArgs args, std::int32_t reported, ErrorCode code,
                       const std::vector<std::string>& words) const {
    const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
    args.status = status.view();
    if (runner().checks_values()) {
      const Tensor before = cache.pages.clone();
      expect_error(code, words, [&] { runner().append(cache, args, status); });
      EXPECT_TRUE(same_bytes(before, cache.pages)) << "a refusal wrote to the pages";
    } else {
      EXPECT_EQ(status_after(cache, args), reported);
    }
  }
  std::int32_t status_after(const Cache& cache, AppendArgs args) const {
    const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
    args.status = status.view();
    runner().append(cache, args, status);
    return status.as<std::int32_t>()[0];
  }
  /// P of a GPU's kernels is f16, times stored scales of V.
  std::int32_t large_v(const KvFormat& format) const {
    return !runner().checks_values() && format.dynamic_scale() ? kStatusLargeV : 0;
  }
};
HALFTONE_ON_EVERY_RUNNER(AppendChecks);

/// cu_seqlens begins at 5: tokens before belong to no request. Many requests of 0 to 2 tokens, so that a
/// token's request must be searched for.
TEST_P(AppendChecks, TokensBeforeTheFirstRequest) {
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
  for (std::int32_t& end : ends) end -= kBefore;
  const Tensor cu_of_requests = Tensor::of({kRequests + 1}, ends);
  const Cache without = cache.clone();
  AppendArgs args;
  args.k = args.v = rows(k.view(), kBefore, tokens - kBefore);
  args.cu_seqlens = cu_of_requests.view();
  append(without.view(), args);
  args.k = args.v = k.view();
  args.cu_seqlens = cu.view();
  expect_reported(cache, args, 0, kInvalidArgument, {"cu_seqlens[0] is 5"});
  if (runner().checks_values()) return;
  EXPECT_TRUE(same_bytes(without.pages, cache.pages));
}

const std::vector<DType> kWideInputs = {DType::kFloat32, DType::kBFloat16},
                         kAllInputs = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

/// Rows of ones, of which one has a value that is not finite, or is too large, or as large as may be.
TEST_P(AppendChecks, ValuesThatAreNotFinite) {
  for (const auto& [name, inputs] : {std::pair<const char*, std::vector<DType>>{"bf16", kAllInputs},
                                     {"fp16", kAllInputs},
                                     {"fp8-token-head", kWideInputs},
                                     {"int8-head", kWideInputs},
                                     {"int8-token", kWideInputs},
                                     {"int4-row", kWideInputs}}) {
    const KvFormat format = parse_format(name);
    for (const DType input : inputs) {
      const bool wide = input != DType::kFloat16;  // holds values beyond what append takes
      for (const auto& [dim, tokens] : {std::pair<int, std::int64_t>{64, 2}, {64, 2100}, {512, 20}}) {
        Random random(3);
        const Cache cache({format, format, 1, dim, 0, 16}, std::vector<int>{static_cast<int>(tokens)},
                          random);
        const std::vector<float> ones(static_cast<std::size_t>(tokens * dim), 1.0F);
        const Tensor k = Tensor::of(input, {tokens, 1, dim}, ones);
        const Tensor v = Tensor::of(input, {tokens, 1, dim}, ones);
        std::vector<std::int64_t> all(static_cast<std::size_t>(tokens));
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
        const Tensor slots = Tensor::of({tokens}, all);
        all.back() = -1;
        const Tensor padded = Tensor::of({tokens}, all);
        const AppendArgs args = by_slots(k, v, slots, {});
        const std::string place = "[" + std::to_string(tokens - 1) + ", 0, " + std::to_string(dim - 27) + "]";
        for (const auto& [spoiled, what] : {std::pair{&k, "k"}, {&v, "v"}}) {
          for (const float value :
               {NAN, -INFINITY, wide ? 0x1.02p100F : INFINITY, wide ? -0x1.02p100F : NAN}) {
            SCOPED_TRACE(::testing::Message() << name << ", " << tokens << " tokens, " << what << value);
            spoiled->set(tokens * dim - 27, value);
            expect_reported(cache, args, kStatusNonFinite, kInvalidArgument, {what + place, "finite"});
            EXPECT_EQ(status_after(cache, by_slots(k, v, padded, {})), 0) << "of no token";
          }
          spoiled->set(tokens * dim - 27, 1.0F);
          spoiled->set(2 * dim - 27, wide ? -0x1p100F : -65504.0F);
        }
        EXPECT_EQ(status_after(cache, args), large_v(format)) << name << ", " << tokens << " tokens";
      }
    }
  }
}

/// Which values of V attention could not use with stored f16 scales.
TEST_P(AppendChecks, LargeValuesOfV) {
  for (const char* format : {"int4-g32", "int4-row", "int8-g64", "fp8-token-head", "int8-head", "bf16"}) {
    for (const int tokens : {1, 300}) {
      for (const float size : {2000.0F, 1e5F}) {
        AttentionCase row;
        row.k_format = format;
        row.page_size = 16;
        row.requests = {{1, tokens}};
        Problem p = make_problem(row);
        for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, i % 2 == 0 ? size : -size);
        p.cache->calibrate(p.k, p.v);
        for (std::int32_t& n : p.cache->lengths.as<std::int32_t>()) n = 0;
        const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, tokens});
        AppendArgs args;
        args.k = p.k.view(), args.v = p.v.view(), args.cu_seqlens = cu.view();
        EXPECT_EQ(status_after(*p.cache, args), size > kMaxScaledV ? large_v(p.cache->spec.v_format) : 0)
            << format << ", " << tokens;
      }
    }
  }
}

TEST_P(AppendChecks, LatentsPositionsAndPages) {
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"), 512, 64, 16);
  Random random(9);
  Cache cache(spec, std::vector<int>{20}, random);
  constexpr int kTokens = 4;
  const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, kTokens});
  const RopeTables tables(random, kTokens, 32);
  AppendArgs args;
  args.cu_seqlens = cu.view();
  for (const int dim : {0, 300, 511, 512, 575}) {
    for (const float value : {NAN, INFINITY, -0x1.02p100F}) {
      SCOPED_TRACE(::testing::Message() << dim << " " << value);
      const Tensor k = random_values(random, kTokens, 1, 576);
      k.set(2 * 576 + dim, value);
      args.k = k.view();
      expect_reported(cache, args, kStatusNonFinite, kInvalidArgument,
                      {"k[2, 0, " + std::to_string(dim) + "]"});
    }
  }
  const Tensor k = random_values(random, kTokens, 1, 576);
  args.k = k.view();
  args.rope = tables.rope(RopePairing::kHalf);
  EXPECT_EQ(status_after(cache, args), 0);
  tables.positions.as<std::int32_t>()[3] = 64;
  expect_reported(cache, args, kStatusBadPage, kOutOfRange, {"rope.positions[3] is 64", "0 to 63"});
  args.rope = {};
  cache.block_table.as<std::int32_t>()[0] = -5;
  const Tensor before = cache.pages.clone();
  expect_reported(cache, args, kStatusBadPage, kOutOfRange, {"cache.block_table[0, 0] is -5"});
  EXPECT_TRUE(same_bytes(before, cache.pages)) << "nothing was written";
}

/// Tokens of no request, before the first one's and behind the last one's, are padding: also where there is
/// no request at all.
TEST_P(AppendChecks, LatentsBesideEveryRequest) {
  if (runner().checks_values()) return;  // it refuses them
  constexpr int kTokens = 2101;
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"), 512, 64, 64);
  for (const auto& [begin, end] : {std::pair{0, 0}, {3, 2050}, {2049, 2050}, {0, 2099}}) {
    SCOPED_TRACE(::testing::Message() << begin << " to " << end);
    Random random(12);
    const int own = end - begin;
    const Cache cache(spec, std::vector<int>{own}, random);
    const Tensor k = random_values(random, kTokens, 1, spec.head_dim, DType::kBFloat16), none;
    cache.lengths.as<std::int32_t>()[0] = own;  // slots() are of tokens that are there
    std::vector<std::int64_t> slots(kTokens, -1);
    const std::vector<std::int64_t> given = cache.slots();
    std::copy(given.begin(), given.end(), slots.begin() + begin);
    const Cache expected = cache.clone();
    append(expected.view(), by_slots(k, none, Tensor::of({kTokens}, slots), {}));
    cache.lengths.as<std::int32_t>()[0] = 0;
    const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{begin, end});
    AppendArgs args;
    args.k = k.view();
    args.cu_seqlens = cu.view();
    EXPECT_EQ(status_after(cache, args), 0);
    EXPECT_TRUE(same_bytes(expected.pages, cache.pages));
  }
}

/// Of many tokens one has a value that is not finite: no other record changes, and neither does what the
/// token's own bytes are by how many tokens a call has.
TEST_P(AppendChecks, LatentsOfManyTokens) {
  constexpr int kTokens = 2101, kBad = 1234, kDims = 512;
  if (runner().checks_values()) return;  // it refuses them
  for (const char* name :
       {"fp8-g128-f32", "fp8-g64-e8m0", "int8-g64", "int4-g64", "int4-g32", "int8-head", "bf16"}) {
    const bool apart = std::string(name) == "fp8-g64-e8m0";
    const KvCacheSpec spec = KvCacheSpec::latent(parse_format(name), apart ? 448 : kDims, 64, 64, apart);
    for (const DType input : {DType::kBFloat16, DType::kFloat16}) {
      Random random(11);
      const Cache clean(spec, std::vector<int>{kTokens}, random);
      clean.lengths.as<std::int32_t>()[0] = kTokens;  // slots() are of tokens that are there
      const Tensor k = random_values(random, kTokens, 1, spec.head_dim, input), none;
      std::vector<std::int64_t> all = clean.slots();
      const Tensor slots = Tensor::of({kTokens}, all);
      all[kBad] = -1;
      const Tensor padded = Tensor::of({kTokens}, all);
      const AppendArgs args = by_slots(k, none, slots, {});
      const Cache without = clean.clone();
      EXPECT_EQ(status_after(without, by_slots(k, none, padded, {})), 0);
      const float large = input == DType::kBFloat16 ? -0x1.02p100F : -INFINITY;
      for (const auto& [dim, value] : {std::pair{77, NAN}, {300, large}, {spec.head_dim - 1, INFINITY}}) {
        SCOPED_TRACE(::testing::Message() << name << ", " << dim << ", " << value);
        const std::int64_t at = std::int64_t{kBad} * spec.head_dim + dim;
        const float good = k.get(at);
        k.set(at, value);
        const Cache skipped = clean.clone(), at_once = clean.clone(), in_parts = clean.clone();
        EXPECT_EQ(status_after(skipped, by_slots(k, none, padded, {})), 0) << "of no token";
        EXPECT_TRUE(same_bytes(without.pages, skipped.pages));
        EXPECT_EQ(status_after(at_once, args), kStatusNonFinite);
        for (const int first : {0, 1100}) {
          const int count = first == 0 ? 1100 : kTokens - 1100;
          AppendArgs part = args;
          part.k = rows(args.k, first, count);
          part.slot_mapping = rows(args.slot_mapping, first, count);
          EXPECT_EQ(status_after(in_parts, part), first == 0 ? 0 : kStatusNonFinite);
        }
        EXPECT_TRUE(same_bytes(in_parts.pages, at_once.pages));
        k.set(at, good);
      }
    }
  }
}

TEST_P(AppendChecks, ChannelsBeyondTheirLimits) {
  constexpr int kTokens = 3;
  KvCacheSpec spec{parse_format("int8-head"), parse_format("int8-head"), 1, 64, 0, 16};
  spec.offset_k = spec.scale_k = true;
  Random random(5);
  Cache cache(spec, std::vector<int>{kTokens}, random);
  const Tensor k = Tensor::of(DType::kFloat32, {kTokens, 1, 64}, std::vector<float>(kTokens * 64, 1.0F));
  cache.calibrate(k, k);
  const Tensor slots = Tensor::of({kTokens}, std::vector<std::int64_t>{0, 1, 2});
  const AppendArgs args = by_slots(k, k, slots, {});
  const auto expect_bad = [&](const Tensor& values, float bad, const std::string& name) {
    SCOPED_TRACE(::testing::Message() << name << " " << bad);
    const float good = values.get(37);
    values.set(37, bad);
    expect_reported(cache, args, kStatusBadScale, kInvalidArgument, {name + "[0, 37] is"});
    values.set(37, good);
  };
  for (const float bad : {0.0F, -1.0F, NAN, INFINITY, 0x1p-17F}) {
    expect_bad(cache.k_channel_scale, bad, "cache.k_channels.scale");
  }
  for (const float bad : {NAN, INFINITY, 0x1.1p100F}) {
    expect_bad(cache.k_offset, bad, "cache.k_channels.offset");
  }
  cache.k_offset.set(37, 3.0F);
  EXPECT_EQ(status_after(cache, args), 0);
}

}  // namespace
}  // namespace halftone::testing
