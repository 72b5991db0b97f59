// The direct path: attention of a few packed rows on codes as they lie in the cache.
#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/direct.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/columns-inl.h"
#include "cpu/item-inl.h"
#include "cpu/kernels.h"
#include "cpu/pv-inl.h"
#include "cpu/qk-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr RowFunction (*kRows[])(int) = {qk_rows_of<Element::kF32>, qk_rows_of<Element::kF16>,
                                         qk_rows_of<Element::kBF16>};
constexpr ColumnFunction (*kColumns[])(int) = {qk_columns_of<Element::kE4M3>, qk_columns_of<Element::kI8>,
                                               qk_columns_of<Element::kI4>, qk_columns_of<Element::kU8>,
                                               qk_columns_of<Element::kU4>};
constexpr PvFunction (*kPv[kElements])(int, bool) = {
    pv_of<Element::kF32>, pv_of<Element::kF16>, pv_of<Element::kBF16>, pv_of<Element::kE4M3>,
    pv_of<Element::kI8>,  pv_of<Element::kI4>,  pv_of<Element::kU8>,   pv_of<Element::kU4>};

/// Up to four rows that one kernel call serves.
struct RowBlock {
  int first;
  int rows;  ///< 4, 2 or 1
  float* q;
  float* q_sums;
  float* acc;
  RowFunction qk_rows;        ///< K in row order, else null
  ColumnFunction qk_columns;  ///< packed K, else null
  PvFunction pv[2];           ///< without and with kSelect
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
    common_ = load_views(layer_, item_, s_);
    fill_k_params(layer_.k, item_.kv_head, s_.k_scale, s_.k_min, s_.k_zero);
    fill_static(layer_.v, item_.kv_head, s_.v_scale, s_.v_min);
    std::fill_n(s_.max, item_.rows, planning::kMinusInfinity);
    std::fill_n(s_.sum, item_.rows, 0.0f);
    std::fill_n(s_.acc, item_.rows * v_map_.accumulators() * v_map_.planes * kLanes, 0.0f);
    make_blocks();

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
    const int k = static_cast<int>(layer_.k.element), v = static_cast<int>(layer_.v.element);
    constexpr int kPacked = static_cast<int>(Element::kE4M3);
    const bool rows_of_k = row_order(layer_.k.element);
    float* q = s_.q;
    float* q_sums = s_.q_sums;
    float* acc = s_.acc;
    for (int first = 0; first < item_.rows;) {
      const int left = item_.rows - first;
      const int rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
      RowBlock& block = block_[blocks_++];
      block = {first,
               rows,
               q,
               q_sums,
               acc,
               rows_of_k ? kRows[k](rows) : nullptr,
               rows_of_k ? nullptr : kColumns[k - kPacked](rows),
               {kPv[v](rows, false), kPv[v](rows, true)}};
      for (int r = 0; r < rows; ++r) load_row_of_block(block, r);
      advances_ += chunk_advances(rows);
      q += rows * k_map_.width();
      q_sums += rows * k_map_.blocks;
      acc += rows * v_map_.accumulators() * v_map_.planes * kLanes;
      first += rows;
    }
  }

  /// How often the kernels of a block of `rows` rows call Prefetcher::advance() for a whole chunk.
  int chunk_advances(int rows) const {
    const int k = row_order(layer_.k.element) ? kChunkTokens / 4 : static_cast<int>(k_map_.order.size());
    return k + kChunkTiles * pv_advances(v_map_, rows);
  }

  /// Row `r` of a block of Q, in the order that the kernel wants.
  void load_row_of_block(const RowBlock& block, int r) {
    load_query(layer_, item_, block.first + r, s_.row);
    const Element element = layer_.k.element;
    if (row_order(element)) {
      for (int i = 0; i < layer_.head_dim; ++i) {
        block.q[(i / kLanes * block.rows + r) * kLanes + i % kLanes] = s_.row[i];
      }
      return;
    }
    const int codes = four_bits(element) ? 8 : 4, dims = k_map_.block_columns * codes;
    for (int b = 0; b < k_map_.blocks; ++b) {
      float sum = 0;
      for (int i = b * dims; i < (b + 1) * dims; ++i) {
        const float x = s_.row[k_map_.dims[i]];
        sum += x;
        block.q[i * block.rows + r] = x / static_cast<float>(1u << column_exponent(element, i % codes));
      }
      block.q_sums[b * block.rows + r] = sum;
    }
  }

  void attend(const Chunk& chunk, const Chunk* next) {
    prefetcher_.start(layer_, next, advances_);
    const int v_params = kTileTokens * layer_.v.groups;
    for (int i = 0; i < chunk.tiles; ++i) {
      load_v_params(layer_.v, chunk.tile[i].v_params, s_.v_scale + i * v_params, s_.v_min + i * v_params);
    }
    if (row_order(layer_.k.element)) {
      dot_rows(chunk);
    } else {
      dot_columns(chunk);
    }
    const bool partial = chunk.tiles < kChunkTiles || common_.partial(chunk);
    bool rescale = false;
    for (int b = 0; b < blocks_; ++b) rescale |= softmax(chunk, partial, block_[b]);
    accumulate(chunk, partial, rescale);
  }

  void dot_rows(const Chunk& chunk) {
    for (int i = 0; i < chunk.tiles; ++i) {
      const Tile& tile = chunk.tile[i];
      for (int b = 0; b < blocks_; ++b) {
        float* dots = s_.scores + block_[b].first * kChunkTokens + i * kTileTokens;
        block_[b].qk_rows({tile.k, tile.k_stride, layer_.head_dim / kLanes, block_[b].q, dots, &prefetcher_});
      }
    }
  }

  void dot_columns(const Chunk& chunk) {
    for (int i = 0; i < chunk.tiles; ++i) {
      transpose_tile(k_map_, chunk.tile[i].k, s_.columns + i * kTileTokens);
      load_k_params(layer_.k, chunk.tile[i].k_params, i, s_.k_scale, s_.k_min, s_.k_zero);
    }
    for (int b = 0; b < blocks_; ++b) {
      block_[b].qk_columns({&k_map_,
                            s_.columns,
                            block_[b].q,
                            block_[b].q_sums,
                            {s_.k_scale, s_.k_min, s_.k_zero},
                            s_.scores + block_[b].first * kChunkTokens,
                            &prefetcher_});
    }
  }

  /// Whether V must be read by the kernels that expect anything: NaNs, or garbage in slots that are not seen.
  bool careful(const Chunk& chunk, bool partial) const {
    if (partial) return layer_.v.may_hold_nan();
    if (layer_.v.element != Element::kE4M3) return false;
    bool found = false;
    for (int i = 0; i < chunk.tiles; ++i) found |= holds_nan(chunk.tile[i].v, kTileTokens * layer_.v_dim);
    return found;
  }

  /// Turns a block's dots into p, with the scales of V if they enter there. Returns whether its accumulators
  /// must be scaled by alpha. Tokens beyond the chunk are masked, too: all loops run over whole chunks.
  bool softmax(const Chunk& chunk, bool partial, const RowBlock& block) {
    const F d;
    float* scores = s_.scores + block.first * kChunkTokens;
    const bool complete = partial || !transform_.only_scales();
    if (complete) complete_logits(chunk, partial, block);
    const VF scale = hn::Set(d, complete ? 1.0f : transform_.scale);

    HWY_ALIGN float buffer[kMaxLanes];
    const VF minus_infinity = hn::Set(d, planning::kMinusInfinity);
    VF reduced[4];
    for (int r = 0; r < 4; ++r) {
      const float* row = scores + std::min(r, block.rows - 1) * kChunkTokens;
      reduced[r] = hn::LoadU(d, row);
      for (int t = kLanes; t < kChunkTokens; t += kLanes)
        reduced[r] = hn::Max(hn::LoadU(d, row + t), reduced[r]);
    }
    reduce_four(reduced, MaxOp(), buffer);

    bool rescale = false;
    for (int i = 0; i < block.rows; i += kLanes) {
      const auto rows = hn::FirstN(d, static_cast<std::size_t>(block.rows - i));
      const VF before = hn::LoadU(d, s_.max + block.first + i), largest = hn::LoadU(d, buffer + i);
      const VF now = hn::IfThenElse(hn::Gt(largest, before), largest, before);  // a NaN is never a maximum
      const VF shift = hn::IfThenZeroElse(hn::Eq(now, minus_infinity), now);
      hn::BlendedStore(now, rows, d, s_.max + block.first + i);
      hn::BlendedStore(exp_nonpositive(hn::Sub(before, shift)), rows, d, s_.alpha + block.first + i);
      hn::StoreU(shift, d, buffer + i);
      rescale |= !hn::AllFalse(d, hn::And(rows, hn::Ne(now, before)));
    }

    const bool scaled = scales_whole_tokens();
    for (int r = 0; r < 4; ++r) {
      reduced[r] = hn::Zero(d);
      if (r >= block.rows) continue;
      float* row = scores + r * kChunkTokens;
      const VF shift = hn::Set(d, buffer[r]);
      HALFTONE_UNROLL
      for (int t = 0; t < kChunkTokens; t += kLanes) {
        const VF p = exp_nonpositive(hn::Sub(hn::Mul(hn::LoadU(d, row + t), scale), shift));
        reduced[r] = hn::Add(reduced[r], p);
        hn::StoreU(scaled ? scaled_weight(p, s_.v_scale + t) : p, d, row + t);
      }
    }
    reduce_four(reduced, AddOp(), buffer);
    for (int i = 0; i < block.rows; i += kLanes) {
      const auto rows = hn::FirstN(d, static_cast<std::size_t>(block.rows - i));
      float* sum = s_.sum + block.first + i;
      const VF alpha = hn::LoadU(d, s_.alpha + block.first + i);
      hn::BlendedStore(hn::MulAdd(hn::LoadU(d, sum), alpha, hn::LoadU(d, buffer + i)), rows, d, sum);
    }
    return rescale;
  }

  /// Scale, softcap, ALiBi and mask.
  void complete_logits(const Chunk& chunk, bool partial, const RowBlock& block) {
    const F d;
    const I di;
    const VF minus_infinity = hn::Set(d, planning::kMinusInfinity);
    for (int r = block.first; r < block.first + block.rows; ++r) {
      const RowView& view = s_.view[r];
      const VI begin = hn::Set(di, view.begin), end = hn::Set(di, std::min(view.end, item_.kv_end));
      for (int t = 0; t < kChunkTokens; t += kLanes) {
        const VI token = hn::Iota(di, chunk.begin + t);
        float* score = s_.scores + r * kChunkTokens + t;
        VF x =
            transform_.apply(hn::LoadU(d, score), hn::Set(d, view.slope), hn::Set(di, view.position), token);
        if (partial) {
          const int tile = t / kTileTokens;
          const bool excluded = tile >= chunk.tiles || chunk.tile[tile].excluded;
          x = excluded ? minus_infinity : hn::IfThenElse(visible(token, begin, end), x, minus_infinity);
        }
        hn::StoreU(x, d, score);
      }
    }
  }

  /// V is symmetric and its scales belong to whole tokens: they enter with p.
  bool scales_whole_tokens() const { return !layer_.v.has_min && layer_.v.groups == 1; }

  void accumulate(const Chunk& chunk, bool partial, bool rescale) {
    const Side& side = layer_.v;
    const bool select = careful(chunk, partial), packed = !row_order(side.element);
    PvArgs args{&v_map_,        nullptr, &chunk,  nullptr,     s_.scale_pattern,
                s_.min_pattern, nullptr, nullptr, &prefetcher_};
    for (const VClass& cls : v_map_.classes) {
      args.cls = &cls;
      if (side.has_min) param_patterns(cls, chunk);
      for (int b = 0; b < blocks_; ++b) {
        const RowBlock& block = block_[b];
        const float* weights = s_.scores + block.first * kChunkTokens;
        if (packed && (blocks_ > 1 || !cls.steps_repeat || scales_groups()))
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
    const int steps = static_cast<int>(cls.steps.size());
    for (int step = 0; step < steps; ++step) {
      const Spreader spread(cls.steps[step]);
      for (int i = 0; i < chunk.tiles; ++i) {
        const float* scale = s_.v_scale + i * params;
        const float* min = s_.v_min + i * params;
        const int pattern = (i * steps + step) * kLanes;
        const VF x = spread(scale + group_a, scale + group_b);
        for (int plane = 0; plane < planes; ++plane) {
          hn::StoreU(hn::Mul(x, hn::Set(d, plane_unit(plane))), d,
                     s_.scale_pattern + pattern * planes + plane * kLanes);
        }
        hn::StoreU(spread(min + group_a, min + group_b), d, s_.min_pattern + pattern);
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
    const int steps = static_cast<int>(cls.steps.size());
    for (int step = 0; step < steps; ++step) {
      const Spreader spread(cls.steps[step]);
      for (int i = 0; i < chunk.tiles; ++i) {
        float* pattern = s_.pattern + (i * steps + step) * block.rows * kLanes;
        for (int r = 0; r < block.rows; ++r) {
          const int at = r * kChunkTokens + i * kTileTokens;
          hn::StoreU(spread(a + at, b + at), F(), pattern + r * kLanes);
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
        for (int t = 0; t < kTileTokens; t += kLanes) {
          hn::StoreU(scaled_weight(hn::LoadU(F(), weights + at + t), scale + t), F(), out + at + t);
        }
      }
    }
    return out;
  }

  /// p * scale of kLanes tokens; 0 stays 0, whatever the scale of a token that the row does not see.
  static HWY_INLINE VF scaled_weight(VF p, const float* scale) {
    const F d;
    return hn::IfThenElseZero(hn::Ne(p, hn::Zero(d)), hn::Mul(p, hn::LoadU(d, scale)));
  }

  void gather_output(const RowBlock& block) {
    const int width = v_map_.accumulators() * v_map_.planes;
    for (int r = 0; r < block.rows; ++r) {
      float* out = s_.out + (block.first + r) * layer_.v_dim;
      std::fill_n(out, layer_.v_dim, 0.0f);
      for (int i = 0; i < width; ++i) {
        const float* acc = block.acc + (i * block.rows + r) * kLanes;
        const std::int16_t* dims = v_map_.dims.data() + i * kLanes;
        const float unit = layer_.v.has_min ? 1.0f : plane_unit(i % v_map_.planes);
        for (int lane = 0; lane < kLanes; ++lane) out[dims[lane]] += acc[lane] * unit;
      }
    }
  }

  const Layer& layer_;
  const Item& item_;
  Scratch& s_;
  const KMap& k_map_;
  const VMap& v_map_;
  const ScoreTransform transform_;
  CommonView common_;
  Prefetcher prefetcher_;
  int advances_ = 0;  ///< calls of prefetcher_.advance() per chunk
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
