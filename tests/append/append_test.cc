// What append stores: round trips, equivalences that must hold bit for bit, RoPE, and the far ends of memory.
//
// sanitizers: optimised
#include <gtest/gtest.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "format/hadamard.h"
#include "format/part.h"
#include "halftone/cache.h"
#include "tests/append/cache_support.h"

namespace halftone {
namespace {

using namespace halftone::testing;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The extent of the group that shares (token, head, dim)'s scale, found by brute force over a copy in the
// stored basis.
struct Extent {
  double lo = INFINITY, hi = -INFINITY;
};
Extent extent_of(const KvFormat& f, const std::vector<float>& x, int tokens, int heads, int dim, int t, int h,
                 int d) {
  const bool all_tokens = f.static_scale();
  const bool all_heads = f.granularity == Granularity::kTensor || f.granularity == Granularity::kToken;
  const int width = f.granularity == Granularity::kGroup ? f.group_size : dim;
  Extent e;
  for (int tt = all_tokens ? 0 : t; tt < (all_tokens ? tokens : t + 1); ++tt) {
    for (int hh = all_heads ? 0 : h; hh < (all_heads ? heads : h + 1); ++hh) {
      for (int dd = d / width * width; dd < d / width * width + width; ++dd) {
        const double v = x[static_cast<std::size_t>((tt * heads + hh) * dim + dd)];
        e.lo = std::min(e.lo, v);
        e.hi = std::max(e.hi, v);
      }
    }
  }
  return e;
}

// |x - stored x| of one value, from the format's definition: half a step and the rounding of scale and min.
double error_bound(const KvFormat& f, const Extent& e, double x) {
  if (f.dtype == DType::kBFloat16) return std::abs(x) * 0x1p-8 + 1e-30;
  if (f.dtype == DType::kFloat16) return std::abs(x) * 0x1p-11 + 0x1p-25;
  const double extent = f.asymmetric ? e.hi - e.lo : std::max(-e.lo, e.hi);
  const double levels = f.dtype == DType::kFloat8E4M3
                            ? 448
                            : (f.dtype == DType::kInt8 ? 127 : 7) * (f.asymmetric ? 2 : 1) + f.asymmetric;
  const double unit = f.scale_dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-23;
  const double scale = std::max(extent / levels, f.scale_dtype == DType::kFloat16 ? 0x1p-14 : 0x1p-100);
  const double step = f.dtype == DType::kFloat8E4M3 ? std::max(std::abs(x) * 0x1p-3, scale * 0x1p-9) : scale;
  return step / 2 * (1 + 0x1p-9) + extent * unit * 1.01 + (f.asymmetric ? std::abs(e.lo) * unit : 0) +
         (std::abs(x) + extent) * 0x1p-21;
}

void expect_within_bound(const KvFormat& f, bool rotated, const Tensor& input, const Tensor& output) {
  const int tokens = static_cast<int>(input.shape()[0]), heads = static_cast<int>(input.shape()[1]);
  const int dim = static_cast<int>(input.shape()[2]);
  const std::vector<float> x = input.to_floats(), y = output.to_floats();
  std::vector<float> stored = x;
  for (int row = 0; rotated && row < tokens * heads; ++row) hadamard::rotate(stored.data() + row * dim, dim);
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      double error2 = 0, bound2 = 0;
      Extent extent;
      for (int d = 0; d < dim; ++d) {
        const auto i = static_cast<std::size_t>((t * heads + h) * dim + d);
        if (d % 32 == 0) extent = extent_of(f, stored, tokens, heads, dim, t, h, d);
        const double bound = error_bound(f, extent, stored[i]);
        const double error = static_cast<double>(x[i]) - y[i];
        if (!rotated) {
          ASSERT_LE(std::abs(error), bound)
              << format_name(f) << " token " << t << " head " << h << " dim " << d;
        }
        error2 += error * error;
        bound2 += bound * bound;
      }
      ASSERT_LE(std::sqrt(error2), std::sqrt(bound2) * 1.0001 + 1e-4)
          << format_name(f);  // a rotation keeps the norm
    }
  }
}

TEST(AppendTest, RandomCachesRoundTripWithinTheirBounds) {
  Random random(11);
  for (int n = 0; n < 150; ++n) {
    const KvCacheSpec spec = random_spec(random);
    const std::vector<int> counts = ragged_lengths(random, static_cast<int>(random.integer(1, 3)), 0, 20);
    const int tokens = std::accumulate(counts.begin(), counts.end(), 0);
    SCOPED_TRACE(::testing::Message()
                 << "case " << n << ": K " << format_name(spec.k_format) << " V "
                 << format_name(spec.v_format) << " dims " << spec.head_dim << " " << spec.v_dim() << " page "
                 << spec.page_size << " rotate " << spec.rotate_k << spec.rotate_v);
    if (tokens == 0) continue;
    Cache cache(spec, counts, random);
    const Tensor k = random_values(random, tokens, spec.kv_heads, spec.head_dim);
    const Tensor v = random_values(random, tokens, spec.kv_heads, spec.v_dim());
    cache.calibrate(k, v);
    cache.append(counts, k, v);
    const reference::Dequantised back = dequantised(cache);
    expect_within_bound(spec.k_format, spec.rotate_k, k, back.k);
    expect_within_bound(spec.v_format, spec.rotate_v, v, back.v);
    ASSERT_TRUE(cache.guards_intact());
  }
}

// --- Ways to append that must give the same bytes
// ----------------------------------------------------------------------------

TEST(AppendTest, SlotsTablesChunksAndThreadsGiveTheSameBytes) {
  Random random(12);
  for (int n = 0; n < 40; ++n) {
    const KvCacheSpec spec = random_spec(random);
    const std::vector<int> counts = {static_cast<int>(random.integer(1, 70)), 0,
                                     static_cast<int>(random.integer(0, 9))};
    const int tokens = counts[0] + counts[2];
    Cache by_table(spec, counts, random);
    const Tensor k = random_values(random, tokens, spec.kv_heads, spec.head_dim);
    const Tensor v = random_values(random, tokens, spec.kv_heads, spec.v_dim());
    by_table.calibrate(k, v);
    const RopeTables tables(random, tokens, spec.head_dim / static_cast<int>(random.integer(2, 4)));
    const Rope rope = tables.rope(static_cast<RopePairing>(random.integer(0, 2)));
    const Rope used = rope.pairing == RopePairing::kNone ? Rope{} : rope;

    Cache by_slot = by_table.clone(), one_by_one = by_table.clone(), one_thread = by_table.clone();
    const Tensor cu = Tensor::of({4}, std::vector<std::int32_t>{0, counts[0], counts[0], tokens});
    AppendArgs args;
    args.k = k.view();
    args.v = v.view();
    args.cu_seqlens = cu.view();
    args.rope = used;
    append(by_table.view(), args);
    for (std::size_t r = 0; r < 3; ++r) by_table.lengths.as<std::int32_t>()[r] = counts[r];
    const Tensor slots = Tensor::of({tokens}, by_table.slots());

    append(by_slot.view(), by_slots(k, v, slots, used));
    ASSERT_TRUE(same_bytes(by_table.pages, by_slot.pages)) << "case " << n;

    const int threads = omp_get_max_threads();
    omp_set_num_threads(threads == 1 ? 3 : 1);
    append(one_thread.view(), by_slots(k, v, slots, used));
    omp_set_num_threads(threads);
    ASSERT_TRUE(same_bytes(by_table.pages, one_thread.pages)) << "case " << n;

    for (int t = tokens - 1; t >= 0; --t) {
      AppendArgs one = by_slots(k, v, slots, used);
      one.k = rows(one.k, t, 1);
      one.v = rows(one.v, t, 1);
      one.slot_mapping = rows(one.slot_mapping, t, 1);
      if (used.pairing != RopePairing::kNone) one.rope.positions = rows(used.positions, t, 1);
      append(one_by_one.view(), one);
    }
    ASSERT_TRUE(same_bytes(by_table.pages, one_by_one.pages)) << "case " << n;
  }
}

TEST(AppendTest, LengthsPlaceTokensBehindWhatIsThere) {
  Random random(13);
  const KvCacheSpec spec{parse_format("int8-head"), parse_format("int4-g32"), 2, 64, 0, 16};
  const std::vector<int> capacities = {50, 40};
  Cache whole(spec, capacities, random);
  Cache steps = whole.clone();
  const Tensor k = random_values(random, 90, 2, 64), v = random_values(random, 90, 2, 64);
  whole.append(capacities, k, v);
  std::vector<int> done = {0, 0};
  while (done[0] < 50 || done[1] < 40) {
    for (std::size_t r = 0; r < 2; ++r) {
      const int count = std::min(capacities[r] - done[r], static_cast<int>(random.integer(0, 7)));
      const Tensor cu = Tensor::of({3}, std::vector<std::int32_t>{0, r == 0 ? count : 0, count});
      AppendArgs args;
      args.k = rows(k.view(), (r == 0 ? 0 : 50) + done[r], count);
      args.v = rows(v.view(), (r == 0 ? 0 : 50) + done[r], count);
      args.cu_seqlens = cu.view();
      append(steps.view(), args);
      done[r] += count;
      steps.lengths.as<std::int32_t>()[r] = done[r];
    }
  }
  EXPECT_TRUE(same_bytes(whole.pages, steps.pages));
}

TEST(AppendTest, HalfInputsAndStridedViewsEqualTheirF32Copies) {
  Random random(14);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const KvCacheSpec spec{parse_format("int8-head"), parse_format("fp8-token-head"), 3, 80, 96, 32};
    const std::vector<int> counts = {33};
    Cache narrow(spec, counts, random);
    Cache wide = narrow.clone();
    // K and V are slices of one fused [tokens, heads, 80 + 96] projection.
    const Tensor fused = random_values(random, 33, 3, 176, dtype);
    AppendArgs args;
    args.k = args.v = fused.view();
    args.k.shape[2] = 80;
    args.v.shape[2] = 96;
    args.v.data = static_cast<std::uint8_t*>(args.v.data) + 80 * dtype_bits(dtype) / 8;
    const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, 33});
    args.cu_seqlens = cu.view();
    append(narrow.view(), args);

    std::vector<float> k, v;
    for (int row = 0; row < 99; ++row) {
      for (int d = 0; d < 176; ++d) (d < 80 ? k : v).push_back(fused.get(row * 176 + d));
    }
    wide.append(counts, Tensor::of(DType::kFloat32, {33, 3, 80}, k),
                Tensor::of(DType::kFloat32, {33, 3, 96}, v));
    EXPECT_TRUE(same_bytes(narrow.pages, wide.pages)) << dtype_name(dtype);
  }
}

TEST(AppendTest, PaddingSlotsAreSkippedWhateverTheyHold) {
  Random random(15);
  const KvCacheSpec spec{parse_format("int8-token"), parse_format("int4-row"), 2, 64, 0, 16};
  Cache cache(spec, std::vector<int>{32}, random);
  Cache clean = cache.clone();
  Tensor k = random_values(random, 4, 2, 64), v = random_values(random, 4, 2, 64);
  append(clean.view(), by_slots(k, v, Tensor::of({4}, std::vector<std::int64_t>{5, -1, 9, -7}), {}));
  for (int i = 0; i < 128; ++i) {
    k.set(128 + i, kNan);
    v.set(3 * 128 + i, std::numeric_limits<float>::infinity());
  }
  append(cache.view(), by_slots(k, v, Tensor::of({4}, std::vector<std::int64_t>{5, -1, 9, -7}), {}));
  EXPECT_TRUE(same_bytes(cache.pages, clean.pages));

  const Cache untouched = cache.clone();
  append(cache.view(),
         by_slots(
             k, v,
             Tensor::of({4}, std::vector<std::int64_t>{-1, -1, -1, std::numeric_limits<std::int64_t>::min()}),
             {}));
  EXPECT_TRUE(same_bytes(cache.pages, untouched.pages));
}

TEST(AppendTest, NoTokensIsANoOp) {
  Random random(16);
  const KvCacheSpec spec{parse_format("bf16"), parse_format("bf16"), 1, 64};
  Cache cache(spec, std::vector<int>{10}, random);
  const Cache before = cache.clone();
  const Tensor none(DType::kFloat32, {0, 1, 64});
  append(cache.view(), by_slots(none, none, Tensor(DType::kInt64, {0}), {}));
  cache.append(std::vector<int>{0}, none, none);
  AppendArgs null = by_slots(none, none, Tensor(DType::kInt64, {0}), {});
  null.k.data = null.v.data = null.slot_mapping.data = nullptr;
  append(cache.view(), null);
  EXPECT_TRUE(same_bytes(cache.pages, before.pages));
}

TEST(AppendTest, RopeMatchesTheDoublePrecisionFormula) {
  Random random(17);
  for (const RopePairing pairing : {RopePairing::kHalf, RopePairing::kInterleaved}) {
    for (const int half : {1, 16, 32, 40}) {
      const KvCacheSpec spec{parse_format("fp16"), parse_format("fp16"), 2, 80, 0, 16};
      const int tokens = 30;
      Cache cache(spec, std::vector<int>{tokens}, random);
      const Tensor k = random_values(random, tokens, 2, 80), v = random_values(random, tokens, 2, 80);
      const RopeTables tables(random, tokens, half);
      const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, tokens});
      AppendArgs args;
      args.k = k.view();
      args.v = v.view();
      args.cu_seqlens = cu.view();
      args.rope = tables.rope(pairing);
      append(cache.view(), args);
      cache.lengths.as<std::int32_t>()[0] = tokens;
      const reference::Dequantised back = dequantised(cache);
      for (int t = 0; t < tokens; ++t) {
        const int position = tables.positions.as<std::int32_t>()[static_cast<std::size_t>(t)];
        for (int h = 0; h < 2; ++h) {
          const int row = (t * 2 + h) * 80;
          for (int d = 0; d < 80; ++d) {
            double expected = k.get(row + d), size = std::abs(expected);
            if (d < 2 * half) {
              const bool second = pairing == RopePairing::kHalf ? d >= half : d % 2 == 1;
              const int i = pairing == RopePairing::kHalf ? d % half : d / 2;
              const int other = pairing == RopePairing::kHalf ? (d + half) % (2 * half) : d ^ 1;
              const double angle = position * std::pow(10000.0, -static_cast<double>(i) / half);
              const double y = k.get(row + other);
              size += std::abs(y);
              expected = expected * std::cos(angle) + (second ? y : -y) * std::sin(angle);
            }
            ASSERT_NEAR(back.k.get(row + d), expected,
                        std::abs(expected) * 0x1p-11 + size * 0x1p-21 + 0x1p-25)
                << "dim " << d << " half " << half;
            ASSERT_NEAR(back.v.get(row + d), v.get(row + d), std::abs(v.get(row + d)) * 0x1p-11 + 0x1p-25)
                << "V has no RoPE";
          }
        }
      }
    }
  }
}

// --- Scales
// ------------------------------------------------------------------------------------------------------------------

TEST(AppendTest, TokenScalesAreSharedByAllHeads) {
  Random random(18);
  const KvCacheSpec spec{parse_format("int8-token-f32"), parse_format("int4-token"), 3, 64, 0, 16};
  Cache cache(spec, std::vector<int>{16}, random);
  std::vector<float> x(16 * 3 * 64, 0.5f);
  for (std::size_t t = 0; t < 16; ++t)
    x[t * 192 + (t % 3) * 64 + t] = static_cast<float>(t + 2);  // the largest, in one head
  const Tensor k = Tensor::of(DType::kFloat32, {16, 3, 64}, x);
  cache.append(std::vector<int>{16}, k, k);
  const PageLayout l = page_layout(spec);
  const page::Part part = page::part_of(spec, l, KvPart::kK), v_part = page::part_of(spec, l, KvPart::kV);
  const std::int64_t page = cache.block_table.as<std::int32_t>()[0];
  for (int t = 0; t < 16; ++t) {
    for (int h = 0; h < 3; ++h) {
      const std::uint8_t* tile =
          cache.pages.bytes().data() + page * l.page_bytes + page::tile_offset(l, h, t);
      float scale = 0;
      std::memcpy(&scale, tile + part.scale_offset(t, 0), 4);
      EXPECT_EQ(scale, static_cast<float>(t + 2) / 127.0f);
      std::uint16_t params[2];
      std::memcpy(&params[0], tile + v_part.scale_offset(t, 0), 2);
      std::memcpy(&params[1], tile + v_part.min_offset(t, 0), 2);
      EXPECT_EQ(params[0], codec::f16_from_f32((static_cast<float>(t + 2) - 0.5f) / 15.0f));
      EXPECT_EQ(params[1], codec::f16_from_f32(0.5f));
    }
  }
}

TEST(AppendTest, ZeroGroupsAndOutliersDecodeFinite) {
  Random random(19);
  for (const NamedFormat& named : named_formats()) {
    const KvCacheSpec spec{named.format, named.format, 2, 128, 0, 16};
    for (const float outlier : {0.0f, 1e4f, -1e4f, 6e4f}) {
      std::vector<float> x(8 * 2 * 128, 0.0f);
      if (outlier != 0) {
        for (float& v : x) v = random.normal();
        x[300] = outlier;
      }
      const Tensor k = Tensor::of(DType::kFloat32, {8, 2, 128}, x);
      Cache cache(spec, std::vector<int>{8}, random);
      cache.calibrate(k, k);
      cache.append(std::vector<int>{8}, k, k);
      const reference::Dequantised back = dequantised(cache);
      for (std::int64_t i = 0; i < back.k.numel(); ++i) {
        ASSERT_TRUE(std::isfinite(back.k.get(i)) && std::isfinite(back.v.get(i))) << named.name;
        ASSERT_TRUE(outlier != 0 || back.k.get(i) == 0.0f) << named.name;
      }
      EXPECT_NEAR(back.k.get(300), outlier, std::abs(outlier) * 0x1p-4) << named.name;
    }
  }
}

// --- Beyond 2^31 and 2^32 bytes
// ----------------------------------------------------------------------------------------------

TEST(AppendTest, FarPagesHoldTheSameBytesAsNearOnes) {
  const KvCacheSpec spec{parse_format("int8-head"), parse_format("int4-g32"), 8, 128, 0, 64};
  const PageLayout l = page_layout(spec);
  const std::int64_t num_pages = (std::int64_t{1} << 32) / l.page_bytes + 3;
  const auto size = static_cast<std::size_t>(num_pages * l.page_bytes);
  void* memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no " << size << " bytes of address space";
  Random random(20);
  const int tokens = 64;
  const Tensor k = random_values(random, tokens, 8, 128), v = random_values(random, tokens, 8, 128);
  const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, tokens});
  for (const std::int64_t page : {(std::int64_t{1} << 31) / l.page_bytes + 1, num_pages - 1}) {
    const Tensor table = Tensor::of({1, 1}, std::vector<std::int32_t>{static_cast<std::int32_t>(page)});
    const Tensor near_table = Tensor::of({1, 1}, std::vector<std::int32_t>{1});
    Tensor lengths = Tensor::of({1}, std::vector<std::int32_t>{0});
    const Tensor near_pages(DType::kUInt8, {2, l.page_bytes});
    near_pages.fill_bytes(0);
    PagedKv far, close;
    far.spec = close.spec = spec;
    far.pages = TensorView::contiguous(memory, DType::kUInt8, {num_pages, l.page_bytes});
    close.pages = near_pages.view();
    far.block_table = table.view();
    close.block_table = near_table.view();
    far.lengths = close.lengths = lengths.view();
    AppendArgs args;
    args.k = k.view();
    args.v = v.view();
    args.cu_seqlens = cu.view();
    append(far, args);
    append(close, args);
    EXPECT_EQ(std::memcmp(static_cast<std::uint8_t*>(memory) + page * l.page_bytes,
                          near_pages.bytes().data() + l.page_bytes, static_cast<std::size_t>(l.page_bytes)),
              0);
    lengths.as<std::int32_t>()[0] = tokens;
    const Tensor a(DType::kFloat32, {tokens, 8, 128}), b(DType::kFloat32, {tokens, 8, 128});
    dequantize(far, a.view(), {});
    dequantize(close, b.view(), {});
    EXPECT_TRUE(same_bytes(a, b));
  }
  munmap(memory, size);
}

}  // namespace
}  // namespace halftone
