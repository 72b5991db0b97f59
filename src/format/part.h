// One span of a page (K, V or a piece of them): its format and where its codes and params live. The orders
// themselves are in page.h.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "format/page.h"
#include "halftone/cache.h"

namespace halftone::page {

struct Part {
  KvPart which = KvPart::kK;  ///< whose fragments: kV only for a span that is no part of K
  KvOrder order = KvOrder::kRows;
  KvFormat format;
  int dim = 0;
  bool rotated = false;
  int k_first = -1, v_first = -1;  ///< as in KvSpan
  int groups = 0;                  ///< scales per token and head in the page; 0 without dynamic scales
  int row_bytes = 0;               ///< of rows: from a token's codes to the next token's
  // From a token's scale to the next token's, to that of its next group, and to its min, in bytes.
  int param_token = 0, param_group = 0, min_away = 0;
  int param_tile = 0;             ///< what a tile of the page adds: not 0 where params lie behind its records
  std::int64_t data_offset = 0;   ///< within a tile
  std::int64_t param_offset = 0;  ///< within a tile

  HT_HOST_DEVICE constexpr int scale_bytes() const { return dtype_bits(format.scale_dtype) / 8; }
  /// Byte offsets within a tile of the scale and of the min of (token % 16, group).
  HT_HOST_DEVICE constexpr std::int64_t scale_offset(int token, int group) const {
    return param_offset + std::int64_t{token} * param_token + std::int64_t{group} * param_group;
  }
  HT_HOST_DEVICE constexpr std::int64_t min_offset(int token, int group) const {
    return scale_offset(token, group) + min_away;
  }
  /// Likewise, of a tile that `before` others of its page precede.
  HT_HOST_DEVICE constexpr std::int64_t scale_offset(int before, int token, int group) const {
    return scale_offset(token, group) + std::int64_t{before} * param_tile;
  }
  /// Relative to data_offset.
  HT_HOST_DEVICE constexpr Place place(int token, int d) const {
    if (order == KvOrder::kRows) return place_in_rows(dtype_bits(format.dtype), token, d, row_bytes);
    return which == KvPart::kK ? place_k(format.dtype, token, d, dim) : place_v(format.dtype, token, d, dim);
  }
  /// The dim of `part`, K or V, that the span begins with; -1: it is no piece of it.
  HT_HOST_DEVICE constexpr int first_in(KvPart part) const { return part == KvPart::kK ? k_first : v_first; }
};

/// Span `index` of an already validated spec.
HT_HOST_DEVICE constexpr Part part_of(const KvCacheSpec& spec, const PageLayout& layout, int index) {
  const KvSpan span = spec.spans().span[index];
  Part p;
  p.which = span.k_first >= 0 ? KvPart::kK : KvPart::kV;
  p.order = span.order;
  p.format = span.format;
  p.dim = span.dims;
  p.rotated = span.rotate;
  p.k_first = span.k_first;
  p.v_first = span.v_first;
  p.groups = p.format.params_per_token(p.dim);
  p.data_offset = layout.spans[index].data_offset;
  p.param_offset = layout.spans[index].param_offset;
  const int scale_bytes = p.scale_bytes();
  if (layout.row_bytes != 0) {
    p.row_bytes = p.param_token = static_cast<int>(layout.row_bytes);
    p.param_group = scale_bytes;
    p.min_away = p.groups * scale_bytes;
    if (p.groups > 0 && params_apart(p.format)) {
      p.param_token = static_cast<int>(apart_bytes(p.format, p.dim));
      p.param_tile = kTileTokens * (p.param_token - p.row_bytes);
    }
  } else {
    const bool k = p.which == KvPart::kK;
    p.row_bytes = p.dim * dtype_bits(p.format.dtype) / 8;
    p.param_token = (k ? k_param_index(1, 0, p.groups) : v_param_index(1, 0)) * scale_bytes;
    p.param_group = (k ? k_param_index(0, 1, p.groups) : v_param_index(0, 1)) * scale_bytes;
    p.min_away = kTileTokens * p.groups * scale_bytes;
  }
  return p;
}

/// K or V of a cache that stores them apart.
HT_HOST_DEVICE constexpr Part part_of(const KvCacheSpec& spec, const PageLayout& layout, KvPart which) {
  return part_of(spec, layout, which == KvPart::kK ? 0 : 1);
}

/// The spans of an already validated spec, in order.
struct Parts {
  Part part[kMaxSpans];
  int count = 0;

  constexpr const Part* begin() const { return part; }
  constexpr const Part* end() const { return part + count; }
};
constexpr Parts parts_of(const KvCacheSpec& spec, const PageLayout& layout) {
  Parts parts;
  parts.count = spec.spans().count;
  for (int i = 0; i < parts.count; ++i) parts.part[i] = part_of(spec, layout, i);
  return parts;
}

}  // namespace halftone::page
