// What the maps of packed pages promise to the kernels that rely on it for speed alone.
#include "cpu/attention/layout_map.h"

#include <gtest/gtest.h>

#include "format/head_dim.h"

namespace halftone::cpu {
namespace {

/// V of every packed format falls into pairs of tokens, which the products of bf16 take: else all results
/// would be right, and slow.
TEST(LayoutMap, PackedValuesFallIntoPairs) {
  for (const Element element : {Element::kE4M3, Element::kI8, Element::kI4, Element::kU8, Element::kU4}) {
    for (const int dim : kHeadDims) {
      const MapKey key{element, dim, 0};
      const LayerMaps& maps = layer_maps(key, key, 16);
      EXPECT_EQ(maps.v_pairs.size(), static_cast<std::size_t>(kTileTokens * dim / 32))
          << "element " << static_cast<int>(element) << ", " << dim << " dims";
      for (const std::uint8_t pair : maps.v_pairs) EXPECT_TRUE(pair == 1 || pair == 2);
    }
  }
}

}  // namespace
}  // namespace halftone::cpu
