// append writes the same bytes on every backend, however the tokens are cut into calls.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "format/status.h"
#include "halftone/error.h"
#include "reference/sanitizer.h"
#include "tests/append/cache_support.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

class AppendOnRunners : public OnRunners {
 protected:
  /// Enough tokens for the GPU's kernels that take windows of them; the CPU has no such kernels.
  int many() const { return runner().checks_values() ? 3 : 21; }
};
HALFTONE_ON_EVERY_RUNNER(AppendOnRunners);

void expect_equal_pages(const Tensor& expected, const Tensor& written, const KvCacheSpec& spec,
                        std::uint64_t seed) {
  const auto a = expected.bytes(), b = written.bytes();
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    ADD_FAILURE() << "byte " << i << ": expected " << int{a[i]} << ", written " << int{b[i]} << "; K "
                  << format_name(spec.k_format) << ", V " << format_name(spec.v_format) << ", dim "
                  << spec.head_dim << ", seed " << seed;
    return;
  }
}

/// Pairs that RoPE rotates: of a latent cache at times not all.
int rotary_half(const KvCacheSpec& spec, std::uint64_t seed) {
  if (!spec.is_latent()) return spec.head_dim / 4;
  return seed % 4 == 0 ? 12 : spec.rope_dim / 2;
}

/// Multiplies every third token.
void enlarge_tokens(std::vector<float>& values, int row, std::size_t first, float factor) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i / static_cast<std::size_t>(row) % 3 == first) values[i] *= factor;
  }
}

/// Appends 108 * `scale` random tokens in one call, and in many on the CPU, and compares every byte of the
/// pages. `limited`: some K are more than levels times the largest scale in f16, some V more than attention
/// on a GPU takes with stored scales, and a skipped token is none.
void expect_same_pages(const Runner& runner, const KvCacheSpec& spec, std::uint64_t seed, RopePairing pairing,
                       DType input, bool by_slots, int scale = 1, bool limited = false) {
  if (reference::kSanitized && seed % 5 != 0) return;
  Random random(seed);
  const std::vector<int> capacities = {70 * scale, 33 * scale, 5 * scale};
  Cache cache(spec, capacities, random);
  const std::int64_t tokens = 108 * scale;
  std::vector<float> values(static_cast<std::size_t>(tokens * spec.kv_heads * spec.head_dim));
  fill(random, Data::kOutlierChannels, values, spec.kv_heads, spec.head_dim);
  if (limited) enlarge_tokens(values, spec.kv_heads * spec.head_dim, 0, 1e8F);
  if (limited && by_slots) values[static_cast<std::size_t>(7 * spec.kv_heads * spec.head_dim)] = NAN;
  const Tensor k = Tensor::of(input, {tokens, spec.kv_heads, spec.head_dim}, values);
  values.resize(static_cast<std::size_t>(tokens * spec.kv_heads * spec.v_dim()));
  fill(random, Data::kNormal, values, spec.kv_heads, spec.v_dim());
  if (limited) enlarge_tokens(values, spec.kv_heads * spec.v_dim(), 1, 5000.0F);
  if (limited && by_slots) values[static_cast<std::size_t>(7 * spec.kv_heads * spec.v_dim())] = INFINITY;
  const Tensor v =
      spec.is_latent() ? Tensor{} : Tensor::of(input, {tokens, spec.kv_heads, spec.v_dim()}, values);
  if (!spec.is_latent()) cache.calibrate(k, v);

  AppendArgs args;
  args.k = k.view();
  args.v = v.view();
  const RopeTables tables(random, static_cast<int>(tokens), rotary_half(spec, seed));
  if (pairing != RopePairing::kNone) args.rope = tables.rope(pairing);
  for (int i = 0; i < 3; ++i) cache.lengths.as<std::int32_t>()[i] = capacities[i];
  std::vector<std::int64_t> slots = cache.slots();
  if (by_slots) slots[7] = -1;
  const Tensor slot_tensor = Tensor::of({tokens}, slots);
  const Tensor cu = Tensor::of({4}, std::vector<std::int32_t>{0, 70 * scale, 103 * scale, 108 * scale});
  for (int i = 0; i < 3; ++i) cache.lengths.as<std::int32_t>()[i] = 0;
  (by_slots ? args.slot_mapping : args.cu_seqlens) = by_slots ? slot_tensor.view() : cu.view();
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  args.status = status.view();

  const Cache in_parts = cache.clone();
  const std::int64_t step = 7 * scale;
  for (std::int64_t first = 0; first < tokens; first += step) {
    const std::int64_t count = std::min(step, tokens - first);
    AppendArgs part = args;
    part.cu_seqlens = {};
    part.slot_mapping = rows(slot_tensor.view(), first, count);
    part.k = rows(args.k, first, count);
    if (args.v.present()) part.v = rows(args.v, first, count);
    if (pairing != RopePairing::kNone) part.rope.positions = rows(args.rope.positions, first, count);
    append(in_parts.view(), part);
  }
  runner.append(cache, args, status);
  expect_equal_pages(in_parts.pages, cache.pages, spec, seed);
  const std::int32_t flags = status.as<std::int32_t>()[0];
  const bool large_v = limited && !spec.is_latent() && !runner.checks_values();
  EXPECT_EQ(flags, large_v ? kStatusLargeV : 0);
}

TEST_P(AppendOnRunners, SameBytesAsInParts) {
  std::uint64_t seed = 1;
  for (const NamedFormat& named : named_formats()) {
    for (const int dim : {64, 80, 96, 128, 192, 256, 512}) {
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
        expect_same_pages(runner(), spec, seed, pairing, input, seed % 2 == 0);
        ++seed;
      }
    }
  }
}

TEST_P(AppendOnRunners, MixedFormatsAndF32Scales) {
  std::uint64_t seed = 1000;
  for (const char* k : {"int8-token-head-asym-f32", "int4-g64-sym", "fp8-g32-f32", "int8-static-head-asym"}) {
    for (const char* v : {"int4-token-asym-f32", "int8-g128-asym", "bf16", "fp8-token"}) {
      expect_same_pages(runner(), {parse_format(k), parse_format(v), 9, 128, 256, 16}, seed,
                        RopePairing::kHalf, DType::kFloat32, seed % 2 == 0);
      ++seed;
    }
  }
}

TEST_P(AppendOnRunners, LatentCaches) {
  std::uint64_t seed = 3000;
  for (const KvCacheSpec& spec : latent_specs()) {
    for (const RopePairing pairing : {RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved}) {
      const DType input = std::array{DType::kBFloat16, DType::kFloat16, DType::kFloat32}[seed % 3];
      expect_same_pages(runner(), spec, seed, pairing, input, seed % 2 == 0);
      ++seed;
    }
  }
}

// So many that a warp has several.
TEST_P(AppendOnRunners, LatentCachesOfManyTokens) {
  std::uint64_t seed = 4000;
  for (const KvCacheSpec& spec : latent_specs()) {
    const RopePairing pairing =
        std::array{RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved}[seed % 3];
    const DType input = seed % 7 == 0 ? DType::kFloat32 : seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    expect_same_pages(runner(), spec, seed, pairing, input, seed % 4 >= 2, many());
    ++seed;
  }
}

// Values that f16 scales cannot hold, beside a skipped token that is none.
TEST_P(AppendOnRunners, LatentCachesBeyondTheirScales) {
  std::uint64_t seed = 7000;
  for (const KvCacheSpec& spec : latent_specs()) {
    expect_same_pages(runner(), spec, seed, seed % 3 == 0 ? RopePairing::kHalf : RopePairing::kNone,
                      DType::kBFloat16, seed % 2 == 0, seed % 5 == 0 ? 1 : many(), true);
    ++seed;
  }
}

/// Values of one token: of its groups some are zero, equal, tiny or as large as append accepts.
std::vector<float> extreme_row(DType input, int dim, int token) {
  const bool bf16 = input == DType::kBFloat16;
  const float largest = bf16 ? 0x1p100F : 65504.0F, normal = bf16 ? 0x1p-126F : 0x1p-14F;
  const float tiny = bf16 ? 0x1p-133F : 0x1p-24F;
  std::vector<float> row(static_cast<std::size_t>(dim));
  for (int d = 0; d < dim; ++d) {
    const auto i = static_cast<std::size_t>(d);
    const float sign = d % 3 == 0 ? -1.0F : 1.0F;
    switch ((token + d / 32) % 11) {
      case 0:
        row[i] = 0.0F;
        break;
      case 1:
        row[i] = sign * 0.0F;
        break;
      case 2:
        row[i] = sign * tiny;
        break;
      case 3:
        row[i] = d % 32 == 7 ? tiny : 0.0F;
        break;
      case 4:
        row[i] = sign * normal * static_cast<float>(d % 8);
        break;
      case 5:
        row[i] = d % 2 == 0 ? largest : -largest;
        break;
      case 6:
        row[i] = d % 32 == 31 ? -largest : 1.0F;
        break;
      case 7:
        row[i] = -3.0F;
        break;
      case 8:
        row[i] = static_cast<float>(d % 16) - 7.5F;  // between two codes
        break;
      case 9:
        row[i] = sign * 448.0F / static_cast<float>(1 << d % 16);
        break;
      default:
        row[i] = 1000.0F + static_cast<float>(d % 4);
    }
  }
  return row;
}

TEST_P(AppendOnRunners, LatentsOfExtremeValues) {
  const int tokens = many() * 108 + 1;
  for (const KvCacheSpec& spec : latent_specs()) {
    if (spec.rope_dim == 32) continue;
    for (const DType input : {DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(format_name(spec.k_format) + " of " + std::to_string(spec.latent_dim()));
      Random random(17);
      const Cache cache(spec, std::vector<int>{tokens}, random);
      cache.lengths.as<std::int32_t>()[0] = tokens;  // slots() are of tokens that are there
      std::vector<float> values;
      for (int t = 0; t < tokens; ++t) {
        const std::vector<float> row = extreme_row(input, spec.head_dim, t);
        values.insert(values.end(), row.begin(), row.end());
      }
      const Tensor k = Tensor::of(input, {tokens, 1, spec.head_dim}, values), none;
      const Tensor slots = Tensor::of({tokens}, cache.slots());
      const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
      AppendArgs args = by_slots(k, none, slots, {});
      const Cache expected = cache.clone();
      append(expected.view(), args);
      args.status = status.view();
      runner().append(cache, args, status);
      expect_equal_pages(expected.pages, cache.pages, spec, 17);
      EXPECT_EQ(status.as<std::int32_t>()[0], 0);
    }
  }
}

// A warp's tokens belong to one request, or to several, between which others get none.
TEST_P(AppendOnRunners, LatentsOfManyRequests) {
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"), 512, 64, 16);
  for (const auto& [requests, most] : {std::pair{2051, 1}, {2400, 2}, {700, 9}, {60, 90}}) {
    std::vector<int> counts;
    for (int r = 0; r < requests; ++r) counts.push_back(most == 1 ? 1 : r * 7 % (most + 1));
    std::vector<std::int32_t> sums = {0};
    for (const int count : counts) sums.push_back(sums.back() + count);
    const int tokens = sums.back();
    ASSERT_GT(tokens, 2048) << "fewer are another kernel's";
    Random random(23);
    const Cache cache(spec, counts, random);
    const auto lengths = cache.lengths.as<std::int32_t>();
    std::copy(counts.begin(), counts.end(), lengths.begin());
    const Tensor slots = Tensor::of({tokens}, cache.slots());
    std::fill(lengths.begin(), lengths.end(), 0);
    const Tensor k = random_values(random, tokens, 1, spec.head_dim, DType::kBFloat16), none;
    const Cache expected = cache.clone();
    append(expected.view(), by_slots(k, none, slots, {}));
    const Tensor cu = Tensor::of({requests + 1}, sums);
    const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
    AppendArgs args;
    args.k = k.view();
    args.cu_seqlens = cu.view();
    args.status = status.view();
    runner().append(cache, args, status);
    expect_equal_pages(expected.pages, cache.pages, spec, 23);
    EXPECT_EQ(status.as<std::int32_t>()[0], 0) << requests;
  }
}

// Enough tokens for the kernels that take windows of them, with all that the plain ones leave out and
// without.
TEST_P(AppendOnRunners, ManyTokens) {
  std::uint64_t seed = 2000;
  for (const NamedFormat& named : named_formats()) {
    for (const int dim : {64, 80, 96, 128, 192, 256, 512}) {
      for (const RopePairing pairing : {RopePairing::kNone, RopePairing::kHalf}) {
        const int heads = dim == 128 ? 11 : 2;
        KvCacheSpec spec{named.format, named.format, heads, dim, 0, 32, false, seed % 4 == 3};
        try {
          (void)page_layout(spec);
        } catch (const Error&) {
          continue;  // a group that does not divide the dim
        }
        expect_same_pages(runner(), spec, seed, pairing, seed % 4 < 2 ? DType::kBFloat16 : DType::kFloat16,
                          seed % 3 == 0, many());
        ++seed;
      }
    }
  }
}

TEST_P(AppendOnRunners, ManyTokensBeyondTheirScales) {
  std::uint64_t seed = 5000;
  for (const char* name : {"int8-head", "int8-g64", "int4-row", "int4-g32", "fp8-token-head"}) {
    const KvFormat format = parse_format(name);
    for (const int dim : {64, 96, 128, 192, 256}) {
      if (dim % 64 != 0 && format.group_size == 64) continue;
      expect_same_pages(runner(), {format, format, 2, dim, 0, 32}, seed, RopePairing::kNone, DType::kBFloat16,
                        seed % 2 == 0, many(), true);
      ++seed;
    }
  }
}

// So many that a warp takes up to eight heads of a window where scales are found.
TEST_P(AppendOnRunners, ManyMoreTokens) {
  std::uint64_t seed = 6000;
  for (const char* name : {"int8-head", "int8-g64", "int4-row", "int4-g32", "fp8-token-head"}) {
    const KvFormat format = parse_format(name);
    for (const DType input : {DType::kBFloat16, DType::kFloat16}) {
      expect_same_pages(runner(), {format, format, 11, 128, 0, 64}, seed, RopePairing::kNone, input,
                        seed % 3 == 0, 2 * many(), input == DType::kBFloat16);
      ++seed;
    }
  }
}

TEST_P(AppendOnRunners, AsymmetricAndMixedOfManyTokens) {
  std::uint64_t seed = 3000;
  for (const char* k :
       {"int8-token-head-asym", "int4-g64-sym", "fp8-g32", "int8-static-head-asym", "int4-tensor"}) {
    for (const char* v :
         {"int4-token-asym", "int8-g128-asym", "int4-static-head-asym", "int8-g32-asym-f32"}) {
      expect_same_pages(runner(), {parse_format(k), parse_format(v), 5, 128, 256, 16}, seed,
                        RopePairing::kNone, DType::kBFloat16, seed % 2 == 0, many());
      expect_same_pages(runner(), {parse_format(v), parse_format(v), 5, 128, 0, 64}, seed, RopePairing::kNone,
                        DType::kBFloat16, seed % 2 == 1, many());
      ++seed;
    }
  }
}

TEST_P(AppendOnRunners, LengthsAdvanceByTheirTokens) {
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
  AppendArgs args;
  args.k = args.v = k.view();
  args.cu_seqlens = cumulative.view();
  args.status = status.view();
  args.advance = true;
  runner().append(cache, args, status);
  EXPECT_EQ(std::vector<std::int32_t>(lengths.begin(), lengths.end()), expected);
}

}  // namespace
}  // namespace halftone::testing
