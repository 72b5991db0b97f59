// The byte layout of a page: every order is a bijection, parts never overlap, a token owns its bytes alone.
#include "format/page.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string>
#include <vector>

#include "format/head_dim.h"
#include "format/part.h"
#include "format/place_table.h"
#include "halftone/cache.h"
#include "reference/random.h"
#include "reference/tensor.h"

namespace halftone {
namespace {

using reference::Random;
using reference::Tensor;

constexpr std::array kCacheDTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kInt8,
                                     DType::kInt4};

page::Element element_at(KvPart which, DType dtype, page::Place place, int dim) {
  if (dtype_bits(dtype) == 16) return page::row_element(place.byte, dim);
  return which == KvPart::kK ? page::k_element(dtype_bits(dtype), place, dim)
                             : page::v_element(page::v_order(dtype), place, dim);
}

page::Place place_of(KvPart which, DType dtype, int token, int d, int dim) {
  return which == KvPart::kK ? page::place_k(dtype, token, d, dim) : page::place_v(dtype, token, d, dim);
}

class OrderTest : public ::testing::TestWithParam<std::tuple<KvPart, DType, int>> {};
INSTANTIATE_TEST_SUITE_P(All, OrderTest,
                         ::testing::Combine(::testing::Values(KvPart::kK, KvPart::kV),
                                            ::testing::ValuesIn(kCacheDTypes),
                                            ::testing::ValuesIn(kHeadDims)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == KvPart::kK ? "K" : "V") + "_" +
                                  std::string(dtype_name(std::get<1>(info.param))) + "_" +
                                  std::to_string(std::get<2>(info.param));
                         });

TEST_P(OrderTest, IsABijectionAndItsInverseInverts) {
  const auto [which, dtype, dim] = GetParam();
  const int bits = dtype_bits(dtype), bytes = kTileTokens * dim * bits / 8;
  const int slots_per_byte = bits == 4 ? 2 : 1, bytes_per_slot = bits == 16 ? 2 : 1;
  std::vector<int> hits(static_cast<std::size_t>(bytes * slots_per_byte));
  for (int token = 0; token < kTileTokens; ++token) {
    for (int d = 0; d < dim; ++d) {
      const page::Place p = place_of(which, dtype, token, d, dim);
      ASSERT_TRUE(p.byte >= 0 && p.byte + bytes_per_slot <= bytes);
      ASSERT_TRUE(p.nibble == 0 || (bits == 4 && p.nibble == 1));
      for (int b = 0; b < bytes_per_slot; ++b) {
        ++hits[static_cast<std::size_t>((p.byte + b) * slots_per_byte + p.nibble)];
      }
      const page::Element e = element_at(which, dtype, p, dim);
      ASSERT_EQ(e.token, token);
      ASSERT_EQ(e.dim, d);
    }
  }
  for (const int h : hits) ASSERT_EQ(h, 1);
}

TEST_P(OrderTest, NoByteHoldsTwoTokensAndEvenDimsAreLow) {
  const auto [which, dtype, dim] = GetParam();
  std::vector<int> owner(static_cast<std::size_t>(kTileTokens * dim * dtype_bits(dtype) / 8), -1);
  for (int token = 0; token < kTileTokens; ++token) {
    for (int d = 0; d < dim; ++d) {
      const page::Place p = place_of(which, dtype, token, d, dim);
      int& o = owner[static_cast<std::size_t>(p.byte)];
      ASSERT_TRUE(o == -1 || o == token);
      o = token;
      if (dtype == DType::kInt4) {
        ASSERT_EQ(p.nibble, d % 2);
        ASSERT_EQ(p.byte, place_of(which, dtype, token, d ^ 1, dim).byte);
      }
    }
  }
}

TEST_P(OrderTest, TheTableRepeatsThePlaces) {
  const auto [which, dtype, dim] = GetParam();
  if (dtype_bits(dtype) == 16) {
    EXPECT_EQ(page::row_place(3, 5, dim).byte, (3 * dim + 5) * 2);
    return;
  }
  const page::PlaceTable& table = page::place_table(which, dtype, dim);
  const int dims_per_unit = dtype == DType::kInt4 ? 2 : 1;
  ASSERT_EQ(table.units, dim / dims_per_unit);
  for (int token = 0; token < kTileTokens; ++token) {
    for (int u = 0; u < table.units; ++u) {
      ASSERT_EQ(int{table.token(token)[u]}, place_of(which, dtype, token, u * dims_per_unit, dim).byte);
    }
  }
}

TEST(PageTest, AWordOfKHoldsTheLaneDimsTheHeaderStates) {
  // Lane (g, t) = (5, 2) of K, int8, dim 128: token 5, dims 16..23 of block 0 then of block 1 in one 16-byte
  // chunk.
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(page::k_place(8, 5, 16 + i, 128).byte, (5 * 4 + 2) * 16 + i);
    EXPECT_EQ(page::k_place(8, 5, 32 + 16 + i, 128).byte, (5 * 4 + 2) * 16 + 8 + i);
    EXPECT_EQ(page::k_place(8, 5, 64 + 16 + i, 128).byte, 64 * 16 + (5 * 4 + 2) * 16 + i);
  }
}

TEST(PageTest, AWordOfVPairsTokensAsTheHeaderStates) {
  // Lane (g, t) = (3, 1), dims 12..15, tokens 2, 3 and 10, 11; dim 128.
  const int lane = (3 * 4 + 1) * 16;
  EXPECT_EQ(page::v_place(page::VOrder::kBytes, 2, 12, 128).byte, lane + 0);
  EXPECT_EQ(page::v_place(page::VOrder::kBytes, 2, 13, 128).byte, lane + 1);
  EXPECT_EQ(page::v_place(page::VOrder::kBytes, 3, 12, 128).byte, lane + 2);
  EXPECT_EQ(page::v_place(page::VOrder::kBytes, 10, 12, 128).byte, lane + 4);
  EXPECT_EQ(page::v_place(page::VOrder::kBytes, 2, 14, 128).byte, lane + 8);
  EXPECT_EQ(page::v_place(page::VOrder::kPairs, 3, 12, 128).byte, lane + 1);
  EXPECT_EQ(page::v_place(page::VOrder::kPairs, 2, 13, 128).byte, lane + 2);
  EXPECT_EQ(page::v_place(page::VOrder::kNibbles, 2, 14, 128).byte, lane + 1);
  EXPECT_EQ(page::v_place(page::VOrder::kNibbles, 3, 12, 128).byte, lane + 2);
  EXPECT_EQ(page::v_place(page::VOrder::kNibbles, 11, 15, 128).byte, lane + 7);
  EXPECT_EQ(page::v_place(page::VOrder::kNibbles, 11, 15, 128).nibble, 1);
}

// --- Whole pages
// -------------------------------------------------------------------------------------------------------------

std::vector<KvFormat> all_formats(int dim) {
  std::vector<KvFormat> formats;
  for (const NamedFormat& n : named_formats()) {
    if (n.format.group_size == 0 || dim % n.format.group_size == 0) formats.push_back(n.format);
  }
  formats.push_back({DType::kInt8, Granularity::kTokenHead, true, 0, DType::kFloat32});
  formats.push_back({DType::kInt4, Granularity::kToken, true, 0, DType::kFloat32});
  return formats;
}

// Every byte that (page offset, KV head) owns for K and V, from page.h alone.
std::set<std::int64_t> own_bytes(const KvCacheSpec& spec, int head, int offset) {
  const PageLayout l = page_layout(spec);
  const std::int64_t tile = page::tile_offset(l, head, offset);
  const int token = offset % kTileTokens;
  std::set<std::int64_t> bytes;
  std::size_t expected = 0;
  for (const KvPart which : {KvPart::kK, KvPart::kV}) {
    const page::Part part = page::part_of(spec, l, which);
    const int element_bytes = dtype_bits(part.format.dtype) == 16 ? 2 : 1;
    for (int d = 0; d < part.dim; ++d) {
      for (int b = 0; b < element_bytes; ++b) {
        bytes.insert(tile + part.data_offset + part.place(token, d).byte + b);
      }
    }
    expected += static_cast<std::size_t>(part.dim * dtype_bits(part.format.dtype) / 8);
    for (int g = 0; g < part.groups; ++g) {
      for (int b = 0; b < part.scale_bytes(); ++b) {
        bytes.insert(tile + part.scale_offset(token, g) + b);
        if (part.format.asymmetric) bytes.insert(tile + part.min_offset(token, g) + b);
      }
    }
    expected += static_cast<std::size_t>(part.groups * part.scale_bytes() * (part.format.asymmetric ? 2 : 1));
  }
  EXPECT_EQ(bytes.size(), expected) << "K and V, codes and params are apart";
  return bytes;
}

TEST(PageTest, TokensAndHeadsPartitionThePage) {
  for (const int dim : kHeadDims) {
    for (const KvFormat& k : all_formats(dim)) {
      KvCacheSpec spec{k, k, 2, dim, 0, 32};
      spec.v_format = all_formats(dim)[static_cast<std::size_t>(dim / 16) % all_formats(dim).size()];
      const PageLayout l = page_layout(spec);
      std::vector<int> hits(static_cast<std::size_t>(l.page_bytes));
      for (int head = 0; head < spec.kv_heads; ++head) {
        for (int offset = 0; offset < spec.page_size; ++offset) {
          for (const std::int64_t b : own_bytes(spec, head, offset)) ++hits.at(static_cast<std::size_t>(b));
        }
      }
      for (const int h : hits) ASSERT_EQ(h, 1) << format_name(k) << " dim " << dim;
      EXPECT_EQ(l.v_data_offset % 16, 0);
      EXPECT_EQ(l.k_param_offset % 16, 0);
      EXPECT_EQ(l.v_param_offset % 16, 0);
      EXPECT_EQ(l.tile_bytes % 16, 0);
    }
  }
}

struct StaticTensors {
  Tensor scale = Tensor::of(DType::kFloat32, {1}, std::vector<float>{0.05f});
  Tensor head_scale = Tensor::of(DType::kFloat32, {2}, std::vector<float>{0.05f, 0.07f});
};

void set_static(const StaticTensors& t, const KvFormat& f, StaticScale& s) {
  if (f.granularity == Granularity::kTensor) s.scale = t.scale.view();
  if (f.granularity == Granularity::kHead) s.scale = t.head_scale.view();
}

TEST(PageTest, AppendingOneTokenWritesExactlyItsOwnBytes) {
  Random random(7);
  const StaticTensors statics;
  for (const int dim : kHeadDims) {
    for (const KvFormat& k : all_formats(dim)) {
      KvCacheSpec spec{k, k, 2, dim, 0, 32};
      const PageLayout l = page_layout(spec);
      const int offset = static_cast<int>(random.integer(0, 31));
      std::vector<float> values(static_cast<std::size_t>(2 * dim));
      for (float& v : values) v = random.normal();
      const Tensor x = Tensor::of(DType::kFloat32, {1, 2, dim}, values);
      const Tensor slot = Tensor::of({1}, std::vector<std::int64_t>{32 + offset});
      const Tensor low(DType::kUInt8, {3, l.page_bytes}), high(DType::kUInt8, {3, l.page_bytes});
      low.fill_bytes(0x00);
      high.fill_bytes(0xFF);
      for (const Tensor* pages : {&low, &high}) {
        PagedKv cache;
        cache.spec = spec;
        cache.pages = pages->view();
        set_static(statics, k, cache.k_scale);
        set_static(statics, k, cache.v_scale);
        AppendArgs args;
        args.k = args.v = x.view();
        args.slot_mapping = slot.view();
        append(cache, args);
        ASSERT_TRUE(pages->guards_intact());
      }
      std::set<std::int64_t> own;
      for (int head = 0; head < 2; ++head) {
        for (const std::int64_t b : own_bytes(spec, head, offset)) own.insert(l.page_bytes + b);
      }
      for (std::int64_t i = 0; i < 3 * l.page_bytes; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (own.contains(i)) {
          ASSERT_EQ(low.bytes()[at], high.bytes()[at])
              << "own byte " << i << " not written: " << format_name(k);
        } else {
          ASSERT_TRUE(low.bytes()[at] == 0x00 && high.bytes()[at] == 0xFF)
              << "foreign byte " << i << " written: " << format_name(k) << " dim " << dim;
        }
      }
    }
  }
}

}  // namespace
}  // namespace halftone
