// The blocked path: attention of many packed rows. Lanes are rows. Each chunk of K, then of V, is decoded to
// fp32 once; its elements are broadcast against vectors of rows, so no layout needs reordering:
//   S^T[token][row] = K[token][:] Q^T[:][row],   O^T[dim][row] += V^T[dim][token] P^T[token][row].
// A row's arithmetic does not depend on which other rows share its vector.
#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/blocked.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/attention/int8_rows-inl.h"
#include "cpu/attention/item-inl.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/pv-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Four tokens of decoded K against C vectors of rows.
template <int C>
HWY_INLINE void score_block(const float* k, std::ptrdiff_t k_stride, int width, const float* q, int rows,
                            float* scores) {
  const F d;
  VF acc[4][C];
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) acc[i / C][i % C] = hn::Zero(d);
  for (int i = 0; i < width; ++i) {
    VF query[C];
    HALFTONE_UNROLL
    for (int c = 0; c < C; ++c) query[c] = hn::Load(d, q + i * rows + c * kLanes);
    HALFTONE_UNROLL
    for (int t = 0; t < 4; ++t) {
      const VF x = hn::Set(d, k[t * k_stride + i]);
      HALFTONE_UNROLL
      for (int c = 0; c < C; ++c) acc[t][c] = hn::MulAdd(x, query[c], acc[t][c]);
    }
  }
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) hn::Store(acc[i / C][i % C], d, scores + i / C * rows + i % C * kLanes);
}

struct OutputArgs {
  const QuadClass* quads;
  const float* v;  ///< decoded chunk, tiles at tile_floats
  int tile_floats;
  int tiles;
  const float* p;      // [token][rows]
  const float* alpha;  // [rows]
  int rows;
  float* out;  // [v_dim][rows]
};

/// Four dims of O^T, C vectors of rows. kSelect as in pv-inl.h.
template <int C, bool kSelect>
HWY_INLINE void output_block(const OutputArgs& a, int quad, int column) {
  const F d;
  VF acc[4][C];
  float* out = a.out + a.quads->first_dim[quad] * a.rows + column;
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) {
    acc[i / C][i % C] = hn::Mul(hn::Load(d, out + i / C * a.rows + i % C * kLanes),
                                hn::Load(d, a.alpha + column + i % C * kLanes));
  }
  const std::ptrdiff_t dim1 = a.quads->dim[1], dim2 = a.quads->dim[2], dim3 = a.quads->dim[3];
  const float* p = a.p + column;
  for (int tile = 0; tile < a.tiles; ++tile) {
    const float* base = a.v + tile * a.tile_floats + a.quads->base[quad];
    for (int t = 0; t < kTileTokens; ++t, p += a.rows) {
      const float* at = base + a.quads->token[t];
      VF weight[C];
      HALFTONE_UNROLL
      for (int c = 0; c < C; ++c) weight[c] = hn::Load(d, p + c * kLanes);
      const VF value[4] = {hn::Set(d, at[0]), hn::Set(d, at[dim1]), hn::Set(d, at[dim2]),
                           hn::Set(d, at[dim3])};
      HALFTONE_UNROLL
      for (int i = 0; i < 4 * C; ++i) {
        VF v = value[i / C];
        if constexpr (kSelect) v = hn::IfThenElseZero(hn::Ne(weight[i % C], hn::Zero(d)), v);
        acc[i / C][i % C] = hn::MulAdd(v, weight[i % C], acc[i / C][i % C]);
      }
    }
  }
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) hn::Store(acc[i / C][i % C], d, out + i / C * a.rows + i % C * kLanes);
}

/// All quads of a class for C vectors of rows.
template <int C, bool kSelect>
HWY_NOINLINE void output_columns(const OutputArgs& a, int column) {
  for (int quad = 0; quad < static_cast<int>(a.quads->base.size()); ++quad) {
    output_block<C, kSelect>(a, quad, column);
  }
}

/// K of one tile as values, [token][width] in the order of the map.
template <Element kElement>
HWY_NOINLINE void decode_k(const Side& side, const KMap& map, const Tile& tile, const float* scale,
                           const float* min, float* out) {
  constexpr int P = planes_of(kElement);
  const F d;
  const int width = map.width();
  float* column = out;
  for (const KSegment& segment : map.segments) {
    const auto lane_group = hn::SetTableIndices(d, segment.lane_group.data());
    for (const KRun& run : segment.runs) {
      for (int token = 0; token < kTileTokens; ++token) {
        VF scales = hn::Set(d, 1.0f), mins = hn::Zero(d);
        if constexpr (!row_order(kElement)) {
          const int at = token * side.groups + segment.first_group;
          scales = hn::TableLookupLanes(hn::LoadU(d, scale + at), lane_group);
          mins = hn::TableLookupLanes(hn::LoadU(d, min + at), lane_group);
        }
        const std::uint8_t* p =
            tile.k + run.offset + token * (row_order(kElement) ? tile.k_stride : run.stride);
        float* to = column + token * width;
        for (int i = 0; i < run.count; ++i, p += run.step) {
          VF value[P];
          Decoder<kElement>::load(p, value);
          HALFTONE_UNROLL
          for (int plane = 0; plane < P; ++plane, to += kLanes) {
            VF x = value[plane];
            if constexpr (P > 1) x = hn::Mul(x, hn::Set(d, plane_unit(plane)));
            if constexpr (asymmetric(kElement)) {
              x = hn::MulAdd(x, scales, mins);
            } else if constexpr (!row_order(kElement)) {
              x = hn::Mul(x, scales);
            }
            hn::StoreU(x, d, to);
          }
        }
      }
      column += run.count * P * kLanes;
    }
  }
}

/// V of one tile as values, in the order of its bytes (see QuadClass).
template <Element kElement>
HWY_NOINLINE void decode_v(const Side& side, const VMap& map, const Tile& tile, const float* scale,
                           const float* min, float* out) {
  constexpr int P = planes_of(kElement);
  const F d;
  if constexpr (row_order(kElement)) {
    for (int token = 0; token < kTileTokens; ++token) {
      for (int i = 0; i < side.dim; i += kLanes) {
        VF x;
        Decoder<kElement>::load(tile.v + token * tile.v_stride + i * unit_bytes(kElement), &x);
        hn::StoreU(x, d, out + token * side.dim + i);
      }
    }
    return;
  }
  for (const VClass& cls : map.classes) {
    const std::ptrdiff_t group_a = cls.group_a * kTileTokens, group_b = cls.group_b * kTileTokens;
    for (const VStep& step : cls.steps) {
      const Spreader spread(step);
      const VF scales = spread(scale + group_a, scale + group_b);
      const VF mins = asymmetric(kElement) ? spread(min + group_a, min + group_b) : hn::Zero(d);
      for (int a = cls.first; a < cls.first + cls.count; ++a) {
        const std::int32_t byte = map.base[a] + step.offset;
        VF value[P];
        Decoder<kElement>::load(tile.v + byte, value);
        HALFTONE_UNROLL
        for (int plane = 0; plane < P; ++plane) {
          VF x = value[plane];
          if constexpr (P > 1) x = hn::Mul(x, hn::Set(d, plane_unit(plane)));
          x = asymmetric(kElement) ? hn::MulAdd(x, scales, mins) : hn::Mul(x, scales);
          hn::StoreU(x, d, out + byte + plane * (kTileTokens * side.dim / 2));
        }
      }
    }
  }
}

using DecodeK = void (*)(const Side&, const KMap&, const Tile&, const float*, const float*, float*);
using DecodeV = void (*)(const Side&, const VMap&, const Tile&, const float*, const float*, float*);
constexpr DecodeK kDecodeK[kElements] = {
    decode_k<Element::kF32>, decode_k<Element::kF16>, decode_k<Element::kBF16>, decode_k<Element::kE4M3>,
    decode_k<Element::kI8>,  decode_k<Element::kI4>,  decode_k<Element::kU8>,   decode_k<Element::kU4>};
constexpr DecodeV kDecodeV[kElements] = {
    decode_v<Element::kF32>, decode_v<Element::kF16>, decode_v<Element::kBF16>, decode_v<Element::kE4M3>,
    decode_v<Element::kI8>,  decode_v<Element::kI4>,  decode_v<Element::kU8>,   decode_v<Element::kU4>};

/// Scales that leave codes as they are: of a tile, and what lookups read beyond.
constexpr auto kOnes = [] {
  std::array<float, kTileTokens + kMaxLanes> ones{};
  ones.fill(1.0f);
  return ones;
}();

class BlockedItem {
 public:
  BlockedItem(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer),
        item_(item),
        s_(scratch),
        k_map_(layer.maps->k),
        v_map_(layer.maps->v),
        quads_(layer.maps->v_quads),
        transform_(layer),
        key_width_(kByteKernels && layer.int8_k ? layer.head_dim : k_map_.width()),
        key_scale_(layer.int8_k ? scratch.k_scale : scratch.int8.k_scale),
        rows_((item.rows + kLanes - 1) / kLanes * kLanes) {}

  void run() {
    common_ = load_views(layer_, item_, s_);
    for (int r = item_.rows; r < rows_; ++r) s_.view[r] = {0, 0, 0, 0};
    for (int r = 0; r < rows_; ++r) {
      begin_[r] = s_.view[r].begin;
      end_[r] = std::min(s_.view[r].end, item_.kv_end);
      position_[r] = s_.view[r].position;
      slope_[r] = s_.view[r].slope;
      s_.max[r] = planning::kMinusInfinity;
      s_.sum[r] = 0;
    }
    fill_static(layer_.k, item_.kv_head, s_.k_scale, s_.k_min);
    fill_static(layer_.v, item_.kv_head, s_.v_scale, s_.v_min);
    std::fill_n(s_.acc, layer_.v_dim * rows_, 0.0f);
    if (layer_.half_int8) {
      load_int8_queries();
    } else {
      load_queries();
    }

    const TileFinder finder(layer_, item_, s_);
    Chunk chunk;
    for (int begin = item_.kv_begin; begin < item_.kv_end; begin += chunk.tiles * kTileTokens) {
      finder.find(begin, chunk, kBlockedTokens);
      attend(chunk);
    }
    for (int r = 0; r < item_.rows; ++r) {
      for (int d = 0; d < layer_.v_dim; ++d) s_.out[r * layer_.v_dim + d] = s_.acc[d * rows_ + r];
    }
    mark_nan(item_, s_);
  }

 private:
  /// Q^T, [dim in the order of the K map][rows].
  void load_queries() {
    std::fill_n(s_.q, key_width_ * rows_, 0.0f);
    for (int r = 0; r < item_.rows; ++r) {
      load_query(layer_, item_, r, s_.row);
      scatter_query(r);
    }
  }

  void scatter_query(int r) {
    for (int i = 0; i < key_width_; ++i) {
      if (k_map_.dims[i] >= 0) s_.q[i * rows_ + r] = s_.row[k_map_.dims[i]];
    }
  }

  /// The same as codes, with their scales.
  void load_int8_queries() {
    Int8Scratch& s = s_.int8;
    std::fill_n(s.q_scale, rows_, 0.0f);
#if HWY_TARGET == HWY_AVX3_DL
    std::fill_n(s.q, key_width_ / 4 * rows_, 0);
    std::fill_n(s.q_start, rows_, 0);
    const auto& dims = layer_.int8_k ? layer_.maps->k_columns.dims : k_map_.dims;
#else
    std::fill_n(s_.q, key_width_ * rows_, 0.0f);
#endif
    for (int r = 0; r < item_.rows; ++r) {
      load_query(layer_, item_, r, s_.row);
      s.q_scale[r] = make_int8_codes(s_.row, layer_.head_dim);
#if HWY_TARGET == HWY_AVX3_DL
      s.q_start[r] = pack_int8_codes(s_.row, dims.data(), key_width_ / 4, rows_, s.q + r);
#else
      scatter_query(r);
#endif
    }
  }

  /// K of a chunk: values, or codes of 8 bits with their scales in key_scale_.
  void load_keys(const Chunk& chunk) {
    const int k_params = kTileTokens * layer_.k.groups, tile_elements = kTileTokens * key_width_;
    for (int i = 0; i < chunk.tiles; ++i) {
      const Tile& tile = chunk.tile[i];
      float* scale = s_.k_scale + i * k_params;
      float* min = s_.k_min + i * k_params;
      load_tile_params(layer_.k, tile.k_params, scale, min);
#if HWY_TARGET == HWY_AVX3_DL
      if (layer_.int8_k) {
        copy_int8_codes(layer_.maps->k_columns, tile, key_width_, s_.int8.k + i * tile_elements);
        continue;
      }
#endif
      kDecodeK[static_cast<int>(layer_.k.element)](
          layer_.k, k_map_, tile, layer_.int8_k ? kOnes.data() : scale, min, s_.decoded + i * tile_elements);
    }
    if (!layer_.half_int8 || layer_.int8_k) return;
    clear_padding(k_map_, chunk.tiles * kTileTokens, s_.decoded);
    for (int t = 0; t < chunk.tiles * kTileTokens; ++t) {
      float* row = s_.decoded + t * key_width_;
#if HWY_TARGET == HWY_AVX3_DL
      s_.int8.k_scale[t] = store_int8_codes(row, key_width_, s_.int8.k + t * key_width_);
#else
      s_.int8.k_scale[t] = make_int8_codes(row, key_width_);
#endif
    }
  }

  void attend(const Chunk& chunk) {
    load_keys(chunk);
    for (int column = 0; column < rows_;) column += score_columns(chunk, column);
    const bool partial = common_.partial(chunk);
    for (int column = 0; column < rows_; column += kLanes) softmax(chunk, partial, column);

    const int tile_floats = kTileTokens * layer_.v_dim, v_params = kTileTokens * layer_.v.groups;
    for (int i = 0; i < chunk.tiles; ++i) {
      const Tile& tile = chunk.tile[i];
      float* scale = s_.v_scale + i * v_params;
      float* min = s_.v_min + i * v_params;
      load_tile_params(layer_.v, tile.v_params, scale, min);
      kDecodeV[static_cast<int>(layer_.v.element)](layer_.v, v_map_, tile, scale, min,
                                                   s_.decoded + i * tile_floats);
    }
    const bool rounds = layer_.v_type != DType::kFloat32;
    if (rounds) round_values(layer_.v_type, chunk.tiles * tile_floats, s_.decoded);
    const bool select =
        partial && (rounds || layer_.v.may_hold_nan()) && !all_finite(chunk.tiles * tile_floats);
    for (const QuadClass& quads : quads_) {
      const OutputArgs args{&quads, s_.decoded, tile_floats, chunk.tiles, s_.scores, s_.alpha, rows_, s_.acc};
      for (int column = 0; column < rows_;) column += output_columns_of(args, select, column);
    }
  }

  /// S^T for the next vectors of rows; returns how many rows that were.
  int score_columns(const Chunk& chunk, int column) {
    const int left = (rows_ - column) / kLanes;
    const int vectors = left >= 4 && kAccumulators >= 16 ? 4 : left >= 2 ? 2 : 1;
    const auto score = vectors == 4   ? &BlockedItem::score_vectors<4>
                       : vectors == 2 ? &BlockedItem::score_vectors<2>
                                      : &BlockedItem::score_vectors<1>;
    (this->*score)(chunk, column);
    return kLanes * vectors;
  }

  template <int C>
  void score_vectors(const Chunk& chunk, int column) {
    for (int t = 0; t < chunk.tiles * kTileTokens; t += 4) {
      float* scores = s_.scores + t * rows_ + column;
#if HWY_TARGET == HWY_AVX3_DL
      if (layer_.half_int8) {
        score_bytes<C>(s_.int8.k + t * key_width_, key_width_, s_.int8.q + column, s_.int8.q_start + column,
                       rows_, scores);
        continue;
      }
#endif
      score_block<C>(s_.decoded + t * key_width_, key_width_, key_width_, s_.q + column, rows_, scores);
    }
  }

  int output_columns_of(const OutputArgs& args, bool select, int column) const {
    const int left = (rows_ - column) / kLanes;
    if (select) {
      output_columns<1, true>(args, column);
      return kLanes;
    }
    if (left >= 4 && kAccumulators >= 16) {
      output_columns<4, false>(args, column);
      return 4 * kLanes;
    }
    if (left >= 2) {
      output_columns<2, false>(args, column);
      return 2 * kLanes;
    }
    output_columns<1, false>(args, column);
    return kLanes;
  }

  /// Online softmax of kLanes rows over the chunk; leaves p in scores and the accumulators' factor in alpha.
  void softmax(const Chunk& chunk, bool partial, int column) {
    const F d;
    const I di;
    float* scores = s_.scores + column;
    const VF slope = hn::LoadU(d, slope_ + column);
    const VI position = hn::LoadU(di, position_ + column);
    const VI begin = hn::LoadU(di, begin_ + column);
    const VI end = hn::LoadU(di, end_ + column);
    const VF q_scale = hn::Load(d, s_.int8.q_scale + column);
    const VF minus_infinity = hn::Set(d, planning::kMinusInfinity);
    const int tokens = chunk.tiles * kTileTokens;
    const VF before = hn::LoadU(d, s_.max + column);
    VF max = before;
    for (int t = 0; t < tokens; ++t) {
      const VI token = hn::Set(di, chunk.begin + t);
      VF x = hn::LoadU(d, scores + t * rows_);
      if (layer_.half_int8) x = hn::Mul(x, hn::Mul(q_scale, hn::Set(d, key_scale_[t])));
      x = transform_.apply(x, slope, position, token);
      if (partial) {
        x = hn::IfThenElse(visible(token, begin, end), x, minus_infinity);
        if (chunk.tile[t / kTileTokens].excluded) x = minus_infinity;
      }
      max = hn::IfThenElse(hn::Gt(x, max), x, max);  // a NaN is never a maximum
      hn::StoreU(x, d, scores + t * rows_);
    }
    const VF shift = hn::IfThenZeroElse(hn::Eq(max, minus_infinity), max);
    VF sum = hn::Zero(d);
    for (int t = 0; t < tokens; ++t) {
      const VF p = exp_nonpositive(hn::Sub(hn::LoadU(d, scores + t * rows_), shift));
      sum = hn::Add(sum, p);
      hn::StoreU(p, d, scores + t * rows_);
    }
    const VF alpha = exp_nonpositive(hn::Sub(before, shift));
    hn::StoreU(alpha, d, s_.alpha + column);
    hn::StoreU(max, d, s_.max + column);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, s_.sum + column), alpha, sum), d, s_.sum + column);
  }

  bool all_finite(int count) const {
    const F d;
    VF worst = hn::Zero(d);
    for (int i = 0; i < count; i += kLanes) {  // x - x is 0 or NaN
      const VF x = hn::LoadU(d, s_.decoded + i);
      worst = hn::Add(worst, hn::Sub(x, x));
    }
    return hn::AllTrue(d, hn::Eq(worst, hn::Zero(d)));
  }

  const Layer& layer_;
  const Item& item_;
  Scratch& s_;
  const KMap& k_map_;
  const VMap& v_map_;
  const std::vector<QuadClass>& quads_;
  const ScoreTransform transform_;
  const int key_width_;           ///< elements of K from token to token
  const float* const key_scale_;  ///< [token of the chunk]
  const int rows_;                ///< padded to whole vectors
  CommonView common_;
  std::int32_t begin_[kMaxRows];
  std::int32_t end_[kMaxRows];
  std::int32_t position_[kMaxRows];
  float slope_[kMaxRows];
};

void Blocked(const Layer& layer, const Item& item, Scratch& scratch) {
  BlockedItem(layer, item, scratch).run();
}

int Lanes() { return kLanes; }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halftone::cpu {

HWY_EXPORT(Blocked);
HWY_EXPORT(Lanes);

void blocked_item(const Layer& layer, const Item& item, Scratch& scratch) {
  HWY_DYNAMIC_DISPATCH(Blocked)(layer, item, scratch);
}

int vector_lanes() { return HWY_DYNAMIC_DISPATCH(Lanes)(); }

}  // namespace halftone::cpu
#endif  // HWY_ONCE
