// What both paths do at the start of an item.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/attention/rotation-inl.h"
#include "cpu/attention/tiles.h"
#include "cpu/attention/vec-inl.h"
#include "cpu/element.h"

#if defined(HALFTONE_CPU_ITEM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_ITEM_INL_H
#undef HALFTONE_CPU_ITEM_INL_H
#else
#define HALFTONE_CPU_ITEM_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// Row `row` of the item's Q in fp32, in the basis in which K is stored; without kNormalises the factor of a
/// rotation is left out.
template <bool kNormalises = true>
HWY_INLINE void load_query(const Layer& layer, const Item& item, int row, float* out) {
  const int packed = item.row_begin + row;
  const int head = item.kv_head * layer.group + packed % layer.group;
  const TensorView& q = layer.args->q;
  load_row(q.dtype, row_at(q, item.q_first + packed / layer.group, head), layer.head_dim, out);
  if (layer.channels.scale != nullptr) {
    const std::int64_t first = std::int64_t{item.kv_head} * layer.head_dim;
    for (int d = 0; d < layer.head_dim; ++d) out[d] = layer.channels.folded(out[d], first + d);
  }
  if (!layer.rotate_k) return;
  if constexpr (kNormalises) {
    rotate_row(out, layer.head_dim);
  } else {
    rotate_stages(out, layer.head_dim);
  }
}

/// Fills the params of a whole chunk with a static scale and min.
HWY_INLINE void fill_static(const Side& side, int kv_head, float* scale, float* min) {
  if (side.static_scale == nullptr) return;
  const int at = side.static_per_head ? kv_head : 0;
  std::fill_n(scale, kChunkTokens, side.static_scale[at] * code_unit(side.element));
  std::fill_n(min, kChunkTokens, side.static_min == nullptr ? 0.0f : side.static_min[at]);
}

/// Which keys all rows of an item see, and which no row sees.
struct CommonView {
  std::int32_t begin = 0;
  std::int32_t end = INT32_MAX;

  /// True if some row does not see all tokens of `chunk`.
  HWY_INLINE bool partial(const Chunk& chunk) const {
    return chunk.excluded || chunk.begin < begin || chunk.begin + chunk.tiles * kTileTokens > end;
  }
};

/// Of rows [first, first + count) of the item, whose views it fills in.
HWY_INLINE CommonView load_views(const Layer& layer, const Item& item, int first, int count,
                                 Scratch& scratch) {
  CommonView common;
  for (int r = first; r < first + count; ++r) {
    scratch.view[r] = row_view(layer, item, r);
    common.begin = std::max(common.begin, scratch.view[r].begin);
    common.end = std::min({common.end, scratch.view[r].end, item.kv_end});
  }
  return common;
}

/// Rows of an item that go through a chunk together.
struct Strip {
  int first = 0;  ///< row of the item, a multiple of ItemRows::kRows
  int rows = 0;   ///< padded to whole vectors
  int begin = 0;  ///< keys [begin, end) are seen by some row
  int end = 0;
  CommonView common;
};

/// The rows of an item and padding, in strips of up to kRows, which divides kMaxRows.
template <int kRows>
struct ItemRows {
  Strip strip[kMaxRows / kRows];
  int strips = 0;
  std::int32_t begin[kMaxRows];  ///< keys [begin, end) of the item are seen
  std::int32_t end[kMaxRows];
  std::int32_t position[kMaxRows];
  float slope[kMaxRows];

  /// Those of a vector of rows.
  HWY_INLINE SeenKeys seen(int row) const { return {hn::LoadU(I(), begin + row), hn::LoadU(I(), end + row)}; }

  /// Of `rows` rows, those of the item and padding, which sees nothing; their states become empty ones.
  void find(const Layer& layer, const Item& item, int rows, Scratch& s) {
    for (int first = 0; first < rows; first += kRows) {
      const int count = std::min(item.rows - first, kRows);
      Strip& to = strip[strips++];
      to.first = first;
      to.rows = std::min(rows - first, kRows);
      to.common = load_views(layer, item, first, count, s);
      to.begin = INT32_MAX;
      for (int r = first; r < first + count; ++r) {
        to.begin = std::min(to.begin, s.view[r].begin);
        to.end = std::max(to.end, s.view[r].end);
      }
    }
    for (int r = item.rows; r < rows; ++r) s.view[r] = {0, 0, 0, 0};
    for (int r = 0; r < rows; ++r) {
      begin[r] = s.view[r].begin;
      end[r] = std::min(s.view[r].end, item.kv_end);
      position[r] = s.view[r].position;
      slope[r] = s.view[r].slope;
      s.max[r] = planning::kMinusInfinity;
      s.sum[r] = 0;
    }
  }
};

/// Rows are done: a row that read a NaN has it in its sum, and must not look empty.
HWY_INLINE void mark_nan(const Item& item, Scratch& scratch) {
  for (int r = 0; r < item.rows; ++r) {
    if (std::isnan(scratch.sum[r])) scratch.max[r] = scratch.sum[r];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_ITEM_INL_H
