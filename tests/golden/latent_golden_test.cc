// What append writes into latent caches, byte for byte, against vectors made by tests/golden/make_latent.py
// from the documented records.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "halftone/cache.h"
#include "reference/cache.h"
#include "reference/tensor.h"
#include "tests/golden/golden_file.h"

namespace halftone {
namespace {

using reference::Tensor;

constexpr std::uint8_t kCanary = 0xA5;
constexpr std::int64_t kTableRows = 11;

struct Case {
  std::string name;
  KvCacheSpec spec;
  RopePairing pairing = RopePairing::kNone;
  Tensor k, cos, sin, positions, slots;
  std::int64_t num_pages = 0;
  std::vector<std::uint8_t> pages;
};

Case read_case(golden::Reader& r) {
  Case c;
  c.name = r.take<char>(32).data();
  const int tokens = r.integer();
  c.num_pages = r.integer();
  const int latent = r.integer(), rope = r.integer(), page_size = r.integer();
  c.pairing = static_cast<RopePairing>(r.integer());
  const auto input = static_cast<DType>(r.integer());
  const KvFormat f = golden::read_format(r);
  const bool rotary_v = r.integer() != 0;
  c.spec = KvCacheSpec::latent(f, latent, rope, page_size, rotary_v);
  const int bytes = r.integer();
  c.k = Tensor::of(input, {tokens, 1, latent + rope}, r.take<float>(tokens * (latent + rope)));
  const std::int64_t half = rope / 2;
  c.cos = Tensor::of(DType::kFloat32, {kTableRows, half}, r.take<float>(kTableRows * half));
  c.sin = Tensor::of(DType::kFloat32, {kTableRows, half}, r.take<float>(kTableRows * half));
  c.positions = Tensor::of({tokens}, r.take<std::int32_t>(tokens));
  c.slots = Tensor::of({tokens}, r.take<std::int64_t>(tokens));
  c.pages = r.take<std::uint8_t>(bytes);
  return c;
}

std::vector<Case> read_cases() { return golden::read_cases<Case>("latent.bin", "HTLATN02", read_case); }

void check_case(const Case& c) {
  const PageLayout layout = page_layout(c.spec);
  ASSERT_EQ(static_cast<std::size_t>(c.num_pages * layout.page_bytes), c.pages.size());
  const Tensor pages(DType::kUInt8, {c.num_pages, layout.page_bytes});
  pages.fill_bytes(kCanary);
  PagedKv cache;
  cache.spec = c.spec;
  cache.pages = pages.view();
  AppendArgs args;
  args.k = c.k.view();
  args.slot_mapping = c.slots.view();
  if (c.pairing != RopePairing::kNone) {
    args.rope = {c.pairing, c.cos.view(), c.sin.view(), c.positions.view()};
  }
  append(cache, args);

  std::size_t wrong = 0;
  for (std::size_t i = 0; i < c.pages.size(); ++i) {
    if (pages.bytes()[i] == c.pages[i]) continue;
    if (wrong++ < 3) {
      ADD_FAILURE() << "byte " << i << " is " << int{pages.bytes()[i]} << ", golden " << int{c.pages[i]};
    }
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_TRUE(pages.guards_intact());
}

TEST(LatentGoldenTest, AppendWritesTheGoldenBytes) {
  const std::vector<Case> cases = read_cases();
  ASSERT_GE(cases.size(), 12u);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    check_case(c);
  }
}

// The record of FlashMLA, read by hand: [512 e4m3][4 f32 scales][64 bf16].
TEST(LatentGoldenTest, Fp8G128F32IsTheTokenOf656Bytes) {
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g128-f32"));
  EXPECT_EQ(spec.head_dim, 576);
  EXPECT_EQ(spec.v_dim(), 512);
  const PageLayout l = page_layout(spec);
  EXPECT_EQ(l.row_bytes, 656);
  EXPECT_EQ(l.page_bytes, 64 * 656);
  EXPECT_EQ(bytes_per_token(spec), 656.0);
  const Tensor pages(DType::kUInt8, {1, l.page_bytes});
  pages.fill_bytes(kCanary);
  std::vector<float> x(576);
  for (std::size_t d = 0; d < 512; ++d) x[d] = static_cast<float>(448 >> d / 128) * (d % 2 == 0 ? 1 : -1);
  for (std::size_t d = 512; d < 576; ++d) x[d] = static_cast<float>(d);
  const Tensor k = Tensor::of(DType::kBFloat16, {1, 1, 576}, x);
  const std::vector<std::int64_t> slot = {37};
  PagedKv cache;
  cache.spec = spec;
  cache.pages = pages.view();
  AppendArgs args;
  args.k = k.view();
  args.slot_mapping = TensorView::contiguous(slot.data(), DType::kInt64, {1});
  append(cache, args);

  const auto* token = reinterpret_cast<const std::uint8_t*>(pages.bytes().data()) + 37 * 656;
  for (int d = 0; d < 512; ++d) ASSERT_EQ(token[d], d % 2 == 0 ? 0x7e : 0xfe) << d;  // +-448
  const std::array<float, 4> scales = {1.0f, 0.5f, 0.25f, 0.125f};
  EXPECT_EQ(std::memcmp(token + 512, scales.data(), sizeof scales), 0);
  EXPECT_EQ(std::memcmp(token + 528, k.bytes().data() + 1024, 128), 0);
  EXPECT_EQ(token[-1], kCanary);
  EXPECT_EQ(token[656], kCanary);
}

// The page of FlashMLA's MODEL1 layout, read by hand: records [448 e4m3][64 bf16], then 8 bytes of scales for
// each token, padded to a multiple of 576.
TEST(LatentGoldenTest, Fp8G64E8m0IsThePageOf584ByteTokens) {
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format("fp8-g64-e8m0"), 448, 64, 64, true);
  EXPECT_EQ(spec.head_dim, 512);
  EXPECT_EQ(spec.v_dim(), 512);
  const PageLayout l = page_layout(spec);
  EXPECT_EQ(l.row_bytes, 576);
  EXPECT_EQ(l.page_bytes, 65 * 576);  // 64 * 584 = 37,376 up to 37,440
  EXPECT_EQ(l.k_param_offset, 64 * 576);
  const Tensor pages(DType::kUInt8, {1, l.page_bytes});
  pages.fill_bytes(kCanary);
  std::vector<float> x(512);
  // Group g has 448 * 2^-g, and the last one a little more than fits its power of two.
  for (std::size_t d = 0; d < 448; ++d) {
    x[d] = std::ldexp(d / 64 == 6 ? 450.0f : 448.0f, -static_cast<int>(d / 64)) * (d % 2 == 0 ? 1.0f : -1.0f);
  }
  for (std::size_t d = 448; d < 512; ++d) x[d] = static_cast<float>(d);
  const Tensor k = Tensor::of(DType::kFloat32, {1, 1, 512}, x);
  const std::vector<std::int64_t> slot = {37};
  PagedKv cache;
  cache.spec = spec;
  cache.pages = pages.view();
  AppendArgs args;
  args.k = k.view();
  args.slot_mapping = TensorView::contiguous(slot.data(), DType::kInt64, {1});
  append(cache, args);

  const auto* page = reinterpret_cast<const std::uint8_t*>(pages.bytes().data());
  const std::uint8_t* token = page + 37 * 576;
  for (int d = 0; d < 384; ++d) ASSERT_EQ(token[d], d % 2 == 0 ? 0x7e : 0xfe) << d;    // +-448
  for (int d = 384; d < 448; ++d) ASSERT_EQ(token[d], d % 2 == 0 ? 0x76 : 0xf6) << d;  // +-224, the tie down
  for (int d = 0; d < 64; ++d) {
    EXPECT_EQ(token[448 + 2 * d] | token[449 + 2 * d] << 8,
              reference::to_bits16(DType::kBFloat16, x[static_cast<std::size_t>(448 + d)]));
  }
  const std::array<std::uint8_t, 8> scales = {127, 126, 125, 124, 123, 122, 122, kCanary};
  EXPECT_EQ(std::memcmp(page + 64 * 576 + 37 * 8, scales.data(), sizeof scales), 0);
  EXPECT_EQ(page[64 * 576 + 37 * 8 - 1], kCanary);
  EXPECT_EQ(page[64 * 576 + 38 * 8], kCanary);
}

}  // namespace
}  // namespace halftone
