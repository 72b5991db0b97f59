// Where a decoded tile of V keeps its values.
#include <algorithm>

#include "cpu/attention/layout_map.h"
#include "format/page.h"

namespace halftone::cpu {
namespace {

/// Fills `word`, `second` and `shuffle`.
void find_words(QuadClass& quad) {
  std::array<std::int32_t, 4> word{};
  for (int i = 0; i < 4; ++i) {
    std::array<std::int32_t, 16> at{};
    for (int d = 0; d < 4; ++d) {
      for (int t = 0; t < 4; ++t) at[4 * d + t] = quad.token[four_tokens(i)[t]] + quad.dim[d];
    }
    std::array<std::int32_t, 16> sorted = at;
    std::sort(sorted.begin(), sorted.end());
    word[i] = sorted[0];
    const std::int32_t second = sorted[8] - sorted[0];
    std::array<std::uint8_t, 16> shuffle{};
    for (int k = 0; k < 16; ++k) {
      if (sorted[k] != word[i] + (k < 8 ? k : second + k - 8)) return;
      shuffle[k] = static_cast<std::uint8_t>(std::find(sorted.begin(), sorted.end(), at[k]) - sorted.begin());
    }
    if (i > 0 && (shuffle != quad.shuffle || second != quad.second)) return;
    quad.shuffle = shuffle;
    quad.second = second;
  }
  quad.word = word;
}

/// Fills `pair`. Their first tokens' places must be those that pair_at() takes.
void find_pair(QuadClass& quad) {
  const std::int32_t pair = quad.token[1];
  const auto is_first = [&](std::int32_t at) { return at >= 0 && at % (2 * pair) < pair; };
  for (int t = 0; t < kTileTokens; t += 2) {
    if (pair <= 0 || quad.token[t + 1] - quad.token[t] != pair || quad.token[t] % (2 * pair) != 0) return;
  }
  if (std::ranges::all_of(quad.dim, is_first)) quad.pair = pair;
}

}  // namespace

std::vector<QuadClass> make_v_quads(const MapKey& key) {
  const Element element = key.element;
  const int dim = key.dim;
  const auto address = [&](int token, int d) {
    if (row_order(element)) return token * dim + d;
    const page::Place place = page::v_place(page::v_order(dtype_of(element)), token, d, dim);
    return place.byte + place.nibble * kTileTokens * dim / 2;
  };
  std::vector<QuadClass> classes;
  for (int first = 0; first < dim; first += 4) {
    QuadClass quad;
    const int base = address(0, first);
    for (int t = 0; t < 16; ++t) quad.token[t] = address(t, first) - base;
    for (int d = 0; d < 4; ++d) quad.dim[d] = address(0, first + d) - base;
    auto at = std::find_if(classes.begin(), classes.end(),
                           [&](const QuadClass& c) { return c.token == quad.token && c.dim == quad.dim; });
    if (at == classes.end()) {
      find_words(quad);
      find_pair(quad);
      at = classes.insert(classes.end(), quad);
    }
    at->base.push_back(base);
    at->first_dim.push_back(first);
  }
  return classes;
}

std::vector<std::uint8_t> make_v_pairs(const MapKey& key, const std::vector<QuadClass>& quads) {
  constexpr int kValues = 32;
  if (row_order(key.element)) return {};
  std::vector<std::uint8_t> pairs(static_cast<std::size_t>(kTileTokens * key.dim / kValues));
  for (const QuadClass& q : quads) {
    if (q.pair != 1 && q.pair != 2) return {};
    for (const std::int32_t base : q.base) {
      if (base % (2 * q.pair) != 0) return {};
      for (int i = 0; i < 4 * kTileTokens; ++i) {
        std::uint8_t& pair = pairs[static_cast<std::size_t>(base + q.token[i / 4] + q.dim[i % 4]) / kValues];
        if (pair != 0 && pair != q.pair) return {};
        pair = static_cast<std::uint8_t>(q.pair);
      }
    }
  }
  return pairs;
}

}  // namespace halftone::cpu
