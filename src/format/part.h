// One part of a page, K or V: its format and where its params live. Data places are in page.h.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "format/page.h"
#include "halftone/cache.h"

namespace halftone::page {

struct Part {
  KvPart which = KvPart::kK;
  KvFormat format;
  int dim = 0;
  bool rotated = false;
  int groups = 0;                 ///< scales per token and head in the page; 0 without dynamic scales
  std::int64_t data_offset = 0;   ///< within a tile
  std::int64_t param_offset = 0;  ///< within a tile

  HT_HOST_DEVICE constexpr int scale_bytes() const { return dtype_bits(format.scale_dtype) / 8; }
  /// Byte offsets within a tile of the scale and of the min of (token % 16, group).
  HT_HOST_DEVICE constexpr std::int64_t scale_offset(int token, int group) const {
    const int index = which == KvPart::kK ? k_param_index(token, group, groups) : v_param_index(token, group);
    return param_offset + std::int64_t{index} * scale_bytes();
  }
  HT_HOST_DEVICE constexpr std::int64_t min_offset(int token, int group) const {
    return scale_offset(token, group) + std::int64_t{kTileTokens} * groups * scale_bytes();
  }
  HT_HOST_DEVICE constexpr Place place(int token, int d) const {
    return which == KvPart::kK ? place_k(format.dtype, token, d, dim) : place_v(format.dtype, token, d, dim);
  }
};

/// The K or V part of an already validated spec.
HT_HOST_DEVICE constexpr Part part_of(const KvCacheSpec& spec, const PageLayout& layout, KvPart which) {
  Part p;
  p.which = which;
  const bool k = which == KvPart::kK;
  p.format = k ? spec.k_format : spec.v_format;
  p.dim = k ? spec.head_dim : spec.v_dim();
  p.rotated = k ? spec.rotate_k : spec.rotate_v;
  p.groups = p.format.params_per_token(p.dim);
  p.data_offset = k ? 0 : layout.v_data_offset;
  p.param_offset = k ? layout.k_param_offset : layout.v_param_offset;
  return p;
}

}  // namespace halftone::page
