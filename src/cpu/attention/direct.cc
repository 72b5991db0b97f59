// The direct path: attention of a few packed rows on codes as they lie in the cache.
#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/direct.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/attention/byte_dots-inl.h"
#include "cpu/attention/byte_sums-inl.h"
#include "cpu/attention/item-inl.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/pv-inl.h"
#include "cpu/attention/qk-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr QkFunction (*kQk[kElements])(int, int) = {
    qk_of<Element::kF32>, qk_of<Element::kF16>, qk_of<Element::kBF16>, qk_of<Element::kE4M3>,
    qk_of<Element::kI8>,  qk_of<Element::kI4>,  qk_of<Element::kU8>,   qk_of<Element::kU4>};
constexpr PvFunction (*kPv[kElements])(int, bool) = {
    pv_of<Element::kF32>, pv_of<Element::kF16>, pv_of<Element::kBF16>, pv_of<Element::kE4M3>,
    pv_of<Element::kI8>,  pv_of<Element::kI4>,  pv_of<Element::kU8>,   pv_of<Element::kU4>};

/// Up to four rows that one kernel call serves.
struct RowBlock {
  int first;
  int rows;  ///< 4, 2 or 1
  float* q;
  float* acc;
  QkFunction qk;
  PvFunction pv[2];  ///< without and with kSelect
#if HWY_TARGET == HWY_AVX3_DL
  ByteBlock bytes;  ///< if bytes of K are multiplied
  ByteDotFunction dot_bytes;
  ByteSumFunction sum_bytes;
#endif
};

class DirectItem {
 public:
  DirectItem(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer),
        item_(item),
        s_(scratch),
        k_map_(layer.maps->k),
        v_map_(layer.maps->v),
        transform_(layer) {}

  void run() {
    common_ = load_views(layer_, item_, 0, item_.rows, s_);
    fill_static(layer_.k, item_.kv_head, s_.k_scale, s_.k_min);
    fill_static(layer_.v, item_.kv_head, s_.v_scale, s_.v_min);
    std::fill_n(s_.max, item_.rows, planning::kMinusInfinity);
    std::fill_n(s_.sum, item_.rows, 0.0f);
    std::fill_n(s_.acc, item_.rows * acc_width(), 0.0f);
    make_blocks();
#if HWY_TARGET == HWY_AVX3_DL
    if (k_bytes_ && layer_.k.static_scale != nullptr)
      fill_static_columns(layer_.k, s_.k_scale[0], s_.k_min[0], s_.bytes);
    if (v_bytes_) std::fill_n(s_.bytes.offset_sums, item_.rows * layer_.v.groups * kLanes, 0.0f);
#endif

    const TileFinder finder(layer_, item_, s_);
    Chunk chunks[2];
    finder.find(item_.kv_begin, chunks[0]);
    for (int i = 0, begin = item_.kv_begin; begin < item_.kv_end; i ^= 1) {
      const Chunk& chunk = chunks[i];
      begin = chunk.begin + chunk.tiles * kTileTokens;
      const bool more = begin < item_.kv_end;
      if (more) finder.find(begin, chunks[i ^ 1]);
      attend(chunk, more ? &chunks[i ^ 1] : nullptr);
    }
    for (int b = 0; b < blocks_; ++b) gather_output(block_[b]);
    mark_nan(item_, s_);
  }

 private:
  void make_blocks() {
    const LayerMaps& maps = *layer_.maps;
    k_bytes_ = kByteKernels && !maps.k_columns.order.empty();
    v_bytes_ = kByteKernels && !maps.v_bytes.classes.empty();
    float* q = s_.q;
    float* acc = s_.acc;
    for (int first = 0; first < item_.rows;) {
      const int left = item_.rows - first;
      const int rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
      const auto v = static_cast<int>(layer_.v.element);
      RowBlock& block = block_[blocks_++];
      block = {first,
               rows,
               q,
               acc,
               kQk[static_cast<int>(layer_.k.element)](rows, layer_.k.groups),
               {kPv[v](rows, false), kPv[v](rows, true)}
#if HWY_TARGET == HWY_AVX3_DL
               ,
               {rows, s_.bytes.q + first * layer_.head_dim / 2, s_.bytes.q_start + first * kMaxGroups * 2,
                s_.bytes.q_sums + first * kMaxGroups * 3, s_.bytes.low + first * kMaxDim / 4, first},
               dot_bytes_of(layer_.k.element, rows),
               sum_bytes_of(layer_.v.element, rows, layer_.plan->problem)
#endif
      };
      load_block(block);
      q += rows * k_map_.width();
      acc += rows * acc_width();
      first += rows;
    }
    for (int b = 0; b < blocks_; ++b) advances_ += advances(block_[b].rows);
  }

  /// Sums per row, before lanes are added up.
  int acc_width() const {
    return std::max(v_map_.accumulators() * v_map_.planes * kLanes,
                    static_cast<int>(layer_.maps->v_bytes.dims.size()));
  }

  /// How often the kernels of a block of `rows` rows call Prefetcher::advance() for a whole chunk.
  int advances(int rows) const {
    int k = kChunkTokens / 4, v = pv_blocks(v_map_, rows);
#if HWY_TARGET == HWY_AVX3_DL
    if (k_bytes_) k = byte_dot_advances(layer_.maps->k_columns, rows);
    if (v_bytes_) v = byte_sum_advances(layer_.maps->v_bytes, v_map_.planes == 2, rows);
#endif
    return k + v * kChunkTiles;
  }

  /// Q of a block, in the order of the K map and, if bytes are multiplied and it is finite, as digits.
  void load_block(RowBlock& block) {
    for (int r = 0; r < block.rows; ++r) {
      load_query(layer_, item_, block.first + r, s_.row);
#if HWY_TARGET == HWY_AVX3_DL
      k_bytes_ = k_bytes_ &&
                 store_digits(layer_.maps->k_columns, layer_.k.element, s_.row, block.bytes, r, s_.bytes);
#endif
      for (int i = 0; i < k_map_.width(); ++i) {
        const int dim = k_map_.dims[i];
        const float unit = asymmetric(layer_.k.element) ? 1.0f : plane_unit(i / kLanes % k_map_.planes);
        block.q[(i / kLanes * block.rows + r) * kLanes + i % kLanes] = dim < 0 ? 0.0f : s_.row[dim] * unit;
      }
    }
  }

  void attend(const Chunk& chunk, const Chunk* next) {
    if (next != nullptr) prefetcher_.begin(layer_, *next, advances_);
    if (v_bytes_ && layer_.v.has_min) {
      load_zero_points(chunk);
    } else {
      const int params = kTileTokens * layer_.v.groups;
      for (int i = 0; i < chunk.tiles; ++i)
        load_tile_params(layer_.v, chunk.tile[i].v_params, s_.v_scale + i * params, s_.v_min + i * params);
    }
    if (k_bytes_) {
      dot_chunk(chunk);
    } else {
      dot_tiles(chunk);
    }
    const bool partial = common_.partial(chunk);
    bool rescale = false;
    for (int b = 0; b < blocks_; ++b) rescale |= softmax(chunk, partial, block_[b]);
    if (v_bytes_) {
      sum_chunk(chunk, partial, rescale);
    } else {
      accumulate(chunk, partial, rescale, block_, blocks_);
    }
  }

  void dot_tiles(const Chunk& chunk) {
    const int k_params = kTileTokens * layer_.k.groups;
    for (int i = 0; i < chunk.tiles; ++i) {
      const Tile& tile = chunk.tile[i];
      load_tile_params(layer_.k, tile.k_params, s_.k_scale + i * k_params, s_.k_min + i * k_params);
      for (int b = 0; b < blocks_; ++b) {
        const RowBlock& block = block_[b];
        block.qk({&k_map_, tile.k, tile.k_stride, block.q, s_.k_scale + i * k_params, s_.k_min + i * k_params,
                  layer_.k.groups, s_.scores + block.first * kChunkTokens + i * kTileTokens, &prefetcher_});
      }
    }
  }

#if HWY_TARGET == HWY_AVX3_DL
  void dot_chunk(const Chunk& chunk) {
    const KColumns& map = layer_.maps->k_columns;
    load_columns(layer_.k, map, chunk, s_.bytes);
    for (int b = 0; b < blocks_; ++b) {
      block_[b].dot_bytes({&map, &s_.bytes, &block_[b].bytes, chunk.tiles * kTileTokens,
                           s_.scores + block_[b].first * kChunkTokens, &prefetcher_});
    }
  }

  void load_zero_points(const Chunk& chunk) {
    const auto load = four_bits(layer_.v.element) ? load_v_zero_points<true> : load_v_zero_points<false>;
    load(layer_.v, chunk, s_.v_scale, s_.v_min, s_.bytes);
  }

  void sum_chunk(const Chunk& chunk, bool partial, bool rescale) {
    for (int b = 0; b < blocks_; ++b) {
      const RowBlock& block = block_[b];
      const float* alpha = rescale ? s_.alpha + block.first : nullptr;
      const bool done =
          block.sum_bytes({&layer_.maps->v_bytes, nullptr, &chunk, s_.v_scale, kTileTokens * layer_.v.groups,
                           s_.scores + block.first * kChunkTokens, alpha, block.acc, offset_sums(block),
                           layer_.v.groups, &s_.bytes, &prefetcher_});
      if (!done) sum_in_fp32(chunk, partial, alpha, block);
    }
  }

  /// A block's chunk whose weights do not fit into integers.
  void sum_in_fp32(const Chunk& chunk, bool partial, const float* alpha, const RowBlock& block) {
    const VBytes& map = layer_.maps->v_bytes;
    if (alpha != nullptr) {
      scale_sums(block.acc, static_cast<int>(map.dims.size()) / 16, block.rows, alpha);
      scale_sums(offset_sums(block), layer_.v.groups, block.rows, alpha);
    }
    float* p = s_.scores + block.first * kChunkTokens;
    if (!layer_.v.has_min && layer_.v.groups == 1) scale_groups(0, chunk, block, p, p);
    RowBlock part = block;  // with sums of its own, in memory that only the blocked path uses
    part.acc = s_.decoded;
    float* out = part.acc + block.rows * acc_width();
    static_assert(sizeof(s_.decoded) >= 5 * 4 * kMaxDim * sizeof(float));
    std::fill_n(part.acc, block.rows * acc_width(), 0.0f);
    accumulate(chunk, partial, false, &part, 1);
    gather_lanes(layer_.v, v_map_, block.rows, part.acc, out);
    add_to_bytes(map, block.rows, layer_.v_dim, out, block.acc);
  }

  float* offset_sums(const RowBlock& block) const {
    return s_.bytes.offset_sums + block.first * layer_.v.groups * kLanes;
  }
#else
  void load_zero_points(const Chunk&) {}
  void dot_chunk(const Chunk&) {}
  void sum_chunk(const Chunk&, bool, bool) {}
#endif

  /// Turns a block's dots into p, with the scales of V if they enter there. Returns whether its accumulators
  /// must be scaled by alpha.
  bool softmax(const Chunk& chunk, bool partial, const RowBlock& block) {
    const F d;
    float* scores = s_.scores + block.first * kChunkTokens;
    const int tokens = chunk.tiles * kTileTokens;
    const bool complete = partial || !transform_.only_scales() || scales_dots();
    if (complete) complete_logits(chunk, partial, block);
    const float scale = complete ? 1.0f : transform_.scale;

    // Four rows at a time, the last one repeated: their maxima, sums and states stand in four lanes.
    HWY_ALIGN float buffer[kMaxLanes] = {};
    VF reduced[4];
    for (int r = 0; r < 4; ++r) {
      const float* row = scores + std::min(r, block.rows - 1) * kChunkTokens;
      reduced[r] = hn::Set(d, planning::kMinusInfinity);
      for (int t = 0; t < tokens; t += kLanes) reduced[r] = hn::Max(hn::Load(d, row + t), reduced[r]);
    }
    reduce_four(reduced, MaxOp(), buffer);
    HWY_ALIGN float shifts[kMaxLanes];
    HWY_ALIGN float alphas[kMaxLanes];
    bool rescale = false;
    for (int r = 0; r < block.rows; ++r) {
      float& max = s_.max[block.first + r];
      const float before = max, largest = buffer[r] * scale;
      max = largest > before ? largest : before;  // a NaN is never a maximum
      shifts[r] = max == planning::kMinusInfinity ? 0.0f : max;
      buffer[r] = before - shifts[r];
      rescale |= max != before;
    }
    for (int r = 0; r < 4; r += kLanes) hn::Store(exp_nonpositive(hn::Load(d, buffer + r)), d, alphas + r);
    const bool scaled = scales_whole_tokens();
    for (int r = 0; r < 4; ++r) {
      reduced[r] = hn::Zero(d);
      if (r >= block.rows) continue;
      float* row = scores + r * kChunkTokens;
      const VF shift = hn::Set(d, shifts[r]), scales = hn::Set(d, scale);
      for (int t = 0; t < tokens; t += kLanes) {
        const VF logit = hn::Mul(hn::Load(d, row + t), scales);
        const VF p = exp_nonpositive(hn::Sub(logit, shift));
        reduced[r] = hn::Add(reduced[r], p);
        hn::Store(p, d, row + t);
      }
      for (int t = 0; scaled && t < tokens; t += kTileTokens) scale_weights(row + t, s_.v_scale + t, row + t);
    }
    reduce_four(reduced, AddOp(), buffer);
    for (int r = 0; r < block.rows; ++r) {
      s_.alpha[block.first + r] = alphas[r];
      s_.sum[block.first + r] = s_.sum[block.first + r] * alphas[r] + buffer[r];
    }
    return rescale;
  }

  /// K is symmetric and its scales belong to whole tokens: they have not entered the dots.
  bool scales_dots() const { return !k_bytes_ && !layer_.k.has_min && layer_.k.groups == 1; }

  /// From dots to logits: the scale of K if it has not entered yet, softmax scale, softcap, ALiBi and mask.
  void complete_logits(const Chunk& chunk, bool partial, const RowBlock& block) {
    const F d;
    const I di;
    const bool scaled = scales_dots();
    const VI lanes = hn::Iota(di, 0);
    for (int r = block.first; r < block.first + block.rows; ++r) {
      float* scores = s_.scores + r * kChunkTokens;
      const RowView& view = s_.view[r];
      const VF slope = hn::Set(d, view.slope);
      const VI position = hn::Set(di, view.position);
      const SeenKeys seen{hn::Set(di, view.begin), hn::Set(di, std::min(view.end, item_.kv_end))};
      for (int t = 0; t < chunk.tiles * kTileTokens; t += kLanes) {
        VF x = hn::Load(d, scores + t);
        if (scaled) x = hn::Mul(x, hn::LoadU(d, s_.k_scale + t));
        const VI token = hn::Add(lanes, hn::Set(di, chunk.begin + t));
        x = transform_.apply(x, slope, position, token);
        if (partial) x = seen.masked(x, token, chunk.tile[t / kTileTokens].excluded);
        hn::Store(x, d, scores + t);
      }
    }
  }

  /// V is symmetric and its scales belong to whole tokens: they enter with p.
  bool scales_whole_tokens() const { return !v_bytes_ && !layer_.v.has_min && layer_.v.groups == 1; }

  void accumulate(const Chunk& chunk, bool partial, bool rescale, const RowBlock* blocks, int count) {
    const Side& side = layer_.v;
    const bool select = partial && side.may_hold_nan(), packed = !row_order(side.element);
    PvArgs args{&v_map_,        nullptr, &chunk,  nullptr,     s_.scale_pattern,
                s_.min_pattern, nullptr, nullptr, &prefetcher_};
    for (const VClass& cls : v_map_.classes) {
      args.cls = &cls;
      if (side.has_min) param_patterns(cls, chunk);
      for (int b = 0; b < count; ++b) {
        const RowBlock& block = blocks[b];
        const float* weights = s_.scores + block.first * kChunkTokens;
        if (packed && (count > 1 || !cls.steps_repeat || scales_groups()))
          weight_patterns(cls, chunk, block, weights);
        args.p = packed ? s_.pattern : weights;
        args.alpha = rescale ? s_.alpha + block.first : nullptr;
        args.acc = block.acc;
        block.pv[select ? 1 : 0](args);
      }
    }
  }

  /// Scales and mins of an asymmetric V in the lanes of a class.
  void param_patterns(const VClass& cls, const Chunk& chunk) {
    const F d;
    const int params = kTileTokens * layer_.v.groups, planes = v_map_.planes;
    const int group_a = cls.group_a * kTileTokens, group_b = cls.group_b * kTileTokens;
    float* scales = s_.scale_pattern;
    float* mins = s_.min_pattern;
    for (const VStep& step : cls.steps) {
      const Spreader spread(step);
      for (int i = 0; i < chunk.tiles; ++i) {
        const float* scale = s_.v_scale + i * params;
        const float* min = s_.v_min + i * params;
        const VF x = spread(scale + group_a, scale + group_b);
        for (int plane = 0; plane < planes; ++plane, scales += kLanes) {
          hn::StoreU(hn::Mul(x, hn::Set(d, plane_unit(plane))), d, scales);
        }
        hn::StoreU(spread(min + group_a, min + group_b), d, mins);
        mins += kLanes;
      }
    }
  }

  /// V is symmetric and its scales differ between the dims of a token.
  bool scales_groups() const { return !layer_.v.has_min && layer_.v.groups > 1; }

  /// p of a block in the lanes of a class, with the scales of its groups if they enter there.
  void weight_patterns(const VClass& cls, const Chunk& chunk, const RowBlock& block, const float* weights) {
    const float* a = weights;
    const float* b = weights;
    if (scales_groups()) {
      a = b = scale_groups(cls.group_a, chunk, block, weights, s_.weights[0]);
      if (cls.group_b != cls.group_a) b = scale_groups(cls.group_b, chunk, block, weights, s_.weights[1]);
    }
    float* pattern = s_.pattern;
    for (const VStep& step : cls.steps) {
      const Spreader spread(step);
      for (int i = 0; i < chunk.tiles; ++i) {
        for (int r = 0; r < block.rows; ++r, pattern += kLanes) {
          const int at = r * kChunkTokens + i * kTileTokens;
          hn::StoreU(spread(a + at, b + at), F(), pattern);
        }
      }
    }
  }

  /// p of a block times the scales of one group of V.
  const float* scale_groups(int group, const Chunk& chunk, const RowBlock& block, const float* weights,
                            float* out) {
    for (int i = 0; i < chunk.tiles; ++i) {
      const float* scale = s_.v_scale + (i * layer_.v.groups + group) * kTileTokens;
      for (int r = 0; r < block.rows; ++r) {
        const int at = r * kChunkTokens + i * kTileTokens;
        scale_weights(weights + at, scale, out + at);
      }
    }
    return out;
  }

  void gather_output(const RowBlock& block) {
    float* out = s_.out + block.first * layer_.v_dim;
#if HWY_TARGET == HWY_AVX3_DL
    if (v_bytes_)
      return gather_bytes(layer_.v, layer_.maps->v_bytes, block.rows, block.acc, offset_sums(block), out);
#endif
    gather_lanes(layer_.v, v_map_, block.rows, block.acc, out);
  }

  const Layer& layer_;
  const Item& item_;
  Scratch& s_;
  const KMap& k_map_;
  const VMap& v_map_;
  const ScoreTransform transform_;
  CommonView common_;
  Prefetcher prefetcher_;
  int advances_ = 0;      ///< calls of prefetcher_.advance() per chunk
  bool k_bytes_ = false;  ///< bytes of K are multiplied with digits of Q
  bool v_bytes_ = false;  ///< bytes of V are multiplied with digits of p
  RowBlock block_[kDirectRows];
  int blocks_ = 0;
};

void Direct(const Layer& layer, const Item& item, Scratch& scratch) {
  DirectItem(layer, item, scratch).run();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halftone::cpu {

HWY_EXPORT(Direct);

void direct_item(const Layer& layer, const Item& item, Scratch& scratch) {
  HWY_DYNAMIC_DISPATCH(Direct)(layer, item, scratch);
}

}  // namespace halftone::cpu
#endif  // HWY_ONCE
