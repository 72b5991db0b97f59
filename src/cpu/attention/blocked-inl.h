// Attention of many packed rows: every chunk of keys is decoded to fp32 once, then multiplied with all rows.
// Where the values come from is a Source's matter: tiles as they lie, or tokens one by one.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/attention/code_output-inl.h"
#include "cpu/attention/item-inl.h"
#include "cpu/attention/key_products-inl.h"
#include "cpu/attention/pair_output-inl.h"

#if defined(HALFTONE_CPU_BLOCKED_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_BLOCKED_INL_H
#undef HALFTONE_CPU_BLOCKED_INL_H
#else
#define HALFTONE_CPU_BLOCKED_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// Every head_dim is a multiple of it.
inline constexpr int kTransposed = 16;

/// What a Source is that has K and V as values in fp32, and unless it says otherwise.
struct ValueSource {
  static constexpr bool kCodes = false;
  static constexpr bool kBytes = false;
  static constexpr bool kByteTiles = false;
  static constexpr bool kGroups = false;
  static constexpr bool kSums = false;
  static constexpr bool kRoundsWeights = false;
  static constexpr bool kBf16Weights = false;
  static float out_scale() { return 1.0f; }
  static bool refused() { return false; }
  static bool in_pairs() { return false; }
};

/// One item, a chunk at a time: K and V as values, then per strip of rows scores, softmax, output. A Source
/// decodes the chunks: `find(begin)` the next one, `decode_k(out)` to [token][width()], `decode_v(out)` to
/// there or a place of its own, which it returns. `chunk()` says which tokens it has, `excluded(t)` which of
/// them do not count; `out_scale()` multiplies the rows at the end. With kCodes Q and K are codes with a
/// scale per row, `scaled(dot, q_scale, t)`; with kBytes they are narrower than fp32: decode_k() keeps them
/// for itself, and `score_bytes_of<C>(strip, t, column, scores)` multiplies them, with kByteTiles
/// `score_tiles_of(strip, tokens, sums)` all of a strip, unless it returns false. Either takes up Q:
/// `begin_queries(rows)`, then `take_query(strip, r)` with row r of the item in Scratch::row, with kSums
/// without the factor of its rotation. With kGroups `score_groups_of<C, Products>(...)` multiplies Q and K.
/// With kRoundsWeights V are codes in CodeScratch, and so is P. With kBf16Weights P and V are values of bf16;
/// of a chunk with in_pairs() decode_v() gives dwords of two tokens (pair_output-inl.h).
template <class Source>
class BlockedItem {
 public:
  BlockedItem(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer), item_(item), s_(scratch), source_(layer, item, scratch), transform_(layer) {}

  /// False if the source refused: another one must begin again.
  bool run() {
    const int rows = (item_.rows + kLanes - 1) / kLanes * kLanes;
    rows_.find(layer_, item_, rows, s_);
    load_queries(rows);
    if (source_.refused()) return false;
    std::fill_n(s_.acc, layer_.v_dim * rows, 0.0f);

    for (int begin = item_.kv_begin; begin < item_.kv_end;) {
      source_.find(begin);
      attend(source_.chunk());
      if (source_.refused()) return false;
      begin += source_.chunk().tiles * kTileTokens;
    }
    for (int i = 0; i < rows_.strips; ++i) store_rows(rows_.strip[i]);
    mark_nan(item_, s_);
    return true;
  }

 private:
  static constexpr bool kOwnQueries = Source::kCodes || Source::kBytes;

  /// Q^T, per strip [dim in the order of the K map][rows].
  void load_queries(int rows) {
    const int width = source_.width();
    if constexpr (!Source::kBytes) std::fill_n(s_.q, width * rows, 0.0f);
    if constexpr (kOwnQueries) source_.begin_queries(rows);
    for (int r = 0; r < item_.rows; ++r) {
      const Strip& strip = rows_.strip[r / kStripRows];
      load_query<!Source::kSums>(layer_, item_, r, s_.row);
      if constexpr (kOwnQueries) source_.take_query(strip, r);
      if constexpr (Source::kBytes) continue;
      float* const q = s_.q + strip.first * width + (r - strip.first);
      for (int i = 0; i < width; ++i) {
        if (const int dim = source_.dim(i); dim >= 0) q[i * strip.rows] = s_.row[dim];
      }
    }
  }

  /// O^T of a strip as rows, not divided by the sum.
  void store_rows(const Strip& strip) {
    const float* const acc = s_.acc + strip.first * layer_.v_dim;
    float* const out = s_.out + strip.first * layer_.v_dim;
    const int count = std::min(item_.rows - strip.first, strip.rows);
    const float scale = source_.out_scale();
    for (int first = 0; first < layer_.v_dim; first += kTransposed) {  // v_dim is a multiple of it
      for (int r = 0; r < count; ++r) {
        for (int d = first; d < first + kTransposed; ++d) {
          float x = acc[d * strip.rows + r];
          // As before a next chunk, so that bits do not depend on what else the strip sees.
          if (Source::kBf16Weights && std::abs(x) < kLeastSum) x = 0;
          out[r * layer_.v_dim + d] = x * scale;
        }
      }
    }
  }

  void attend(const Chunk& chunk) {
    source_.decode_k(s_.decoded);
    const float* const v = source_.decode_v(s_.decoded_v);
    bool finite = false, checked = false;
    for (int i = 0; i < rows_.strips; ++i) {
      const Strip& strip = rows_.strip[i];
      if (chunk.begin >= strip.end || chunk.end <= strip.begin) continue;  // no row of it sees the chunk
      const bool by_tiles = score(strip, chunk);
      const bool partial = strip.common.partial(chunk);
      if constexpr (Source::kRoundsWeights) {
        for (int column = 0; column < strip.rows; column += kLanes) {
          if (by_tiles) {
            softmax_codes<true>(strip, chunk, partial, column);
          } else {
            softmax_codes<false>(strip, chunk, partial, column);
          }
        }
        add_codes(strip, chunk, v);
      } else {
        for (int column = 0; column < strip.rows; column += kLanes) softmax(strip, chunk, partial, column);
        const int floats = source_.tile_floats();
        // Weights that are rounded to 0 must not depend on what else the strip sees, either.
        const bool selects = (partial || Source::kBf16Weights) && source_.may_hold_nan();
        if (selects && !checked) {
          finite = all_finite(v, chunk.tiles * floats);
          checked = true;
        }
        const bool select = selects && !finite;
        for (const QuadClass& quads : source_.quads()) {
          const OutputArgs args{&quads,     v,
                                floats,     chunk.tiles,
                                s_.scores,  s_.alpha + strip.first,
                                strip.rows, s_.acc + strip.first * layer_.v_dim};
          for (int column = 0; column < strip.rows;) column += output_columns_of(args, select, column);
        }
      }
    }
  }

  void add_codes(const Strip& strip, const Chunk& chunk, const float* v) {
    if constexpr (Source::kRoundsWeights) {
      const CodeScratch& s = s_.codes;
      const std::int32_t* const words = s.v_codes + source_.first_word() * layer_.v_dim;
      const std::int32_t* turned = nullptr;
      if constexpr (Source::kByteTiles) turned = source_.turned_words();
      const CodeOutputArgs args{&source_.quads(),
                                v,
                                words,
                                turned,
                                layer_.v_dim,
                                chunk.tiles,
                                s_.scores,
                                s.p,
                                s_.alpha + strip.first,
                                s.factor,
                                s.v_scale,
                                strip.rows,
                                s_.acc + strip.first * layer_.v_dim};
      if (turned != nullptr) return output_code_tiles(args);
      for (int column = 0; column < strip.rows;) {
        const int vectors = vectors_at(strip, column);
        const auto output = vectors == 4 ? output_codes<4> : vectors == 2 ? output_codes<2> : output_codes<1>;
        output(args, column);
        column += vectors * kLanes;
      }
    }
  }

  /// How many vectors of rows kernels take from `column` of a strip on.
  static int vectors_at(const Strip& strip, int column) { return vectors_of((strip.rows - column) / kLanes); }
  static int vectors_of(int left) { return left >= 4 && kAccumulators >= 16 ? 4 : left >= 2 ? 2 : 1; }

  /// S^T of a strip, [token][rows]; true: by tiles, in the order and the type of score_byte_tiles().
  bool score(const Strip& strip, const Chunk& chunk) {
    if constexpr (Source::kByteTiles) {
      if (source_.score_tiles_of(strip, chunk.tiles * kTileTokens, s_.scores)) return true;
    }
    for (int column = 0; column < strip.rows;) column += score_columns(strip, chunk, column);
    return false;
  }
  /// Of the next vectors of rows; returns how many rows that were.
  int score_columns(const Strip& strip, const Chunk& chunk, int column) {
    const int vectors = vectors_at(strip, column);
    const auto score = vectors == 4   ? &BlockedItem::score_vectors<4>
                       : vectors == 2 ? &BlockedItem::score_vectors<2>
                                      : &BlockedItem::score_vectors<1>;
    (this->*score)(strip, chunk, column);
    return kLanes * vectors;
  }

  template <int C>
  void score_vectors(const Strip& strip, const Chunk& chunk, int column) {
    const int width = source_.width();
    for (int t = 0; t < chunk.tiles * kTileTokens; t += 4) {
      float* scores = s_.scores + t * strip.rows + column;
      if constexpr (Source::kBytes) {
        source_.template score_bytes_of<C>(strip, t, column, scores);
      } else if constexpr (Source::kGroups) {
        source_.template score_groups_of<C, SingleProducts>(strip, t, width, column, scores);
      } else {
        const float* q = s_.q + strip.first * width + column;
        score_block<C>(s_.decoded + t * width, width, width, q, strip.rows, scores);
      }
    }
  }

  int output_columns_of(const OutputArgs& args, bool select, int column) const {
    const int left = (args.rows - column) / kLanes;
    const int vectors = select ? 1 : vectors_of(left);
    constexpr bool kBf16 = Source::kBf16Weights;
    auto output = select         ? output_columns<1, true, kBf16>
                  : vectors == 4 ? output_columns<4, false, kBf16>
                  : vectors == 2 ? output_columns<2, false, kBf16>
                                 : output_columns<1, false, kBf16>;
#if HWY_TARGET == HWY_AVX3_DL
    if (source_.in_pairs()) {
      output = vectors == 4 ? output_pairs<4> : vectors == 2 ? output_pairs<2> : output_pairs<1>;
    }
#endif
    output(args, column);
    return vectors * kLanes;
  }

  /// Where kLanes rows have a token's score, kByTiles: as score() has it then.
  template <bool kByTiles>
  float* score_of(const Strip& strip, int column, int token) const {
    return s_.scores + (kByTiles ? column * kBlockedTokens + token * kLanes : token * strip.rows + column);
  }

  /// Scores of kLanes rows become logits; returns the largest of them and `max`.
  template <bool kByTiles>
  VF make_logits(const Strip& strip, const Chunk& chunk, bool partial, int column, VF max) {
    const F d;
    const I di;
    const int row = strip.first + column;
    const auto load = [&](int t) HWY_ATTR {
      const VF x = hn::LoadU(d, score_of<kByTiles>(strip, column, t));
      return kByTiles ? hn::ConvertTo(d, hn::BitCast(di, x)) : x;
    };
    const VF slope = hn::LoadU(d, rows_.slope + row);
    const VI position = hn::LoadU(di, rows_.position + row);
    const SeenKeys seen = rows_.seen(row);
    VF q_scale = hn::Zero(d);
    if constexpr (Source::kCodes) q_scale = hn::Load(d, s_.codes.q_scale + row);
    if (!partial && transform_.only_multiplies()) {  // as below, without what each token would ask
      const VF scale = hn::Set(d, transform_.scale);
      for (int t = 0; t < chunk.tiles * kTileTokens; ++t) {
        VF x = load(t);
        if constexpr (Source::kCodes) x = source_.scaled(x, q_scale, t);
        x = hn::Mul(x, scale);
        max = larger(x, max);
        hn::StoreU(x, d, score_of<kByTiles>(strip, column, t));
      }
      return max;
    }
    for (int t = 0; t < chunk.tiles * kTileTokens; ++t) {
      const VI token = hn::Set(di, chunk.begin + t);
      VF x = load(t);
      if constexpr (Source::kCodes) x = source_.scaled(x, q_scale, t);
      x = transform_.apply(x, slope, position, token);
      if (partial) x = seen.masked(x, token, source_.excluded(t));
      max = larger(x, max);
      hn::StoreU(x, d, score_of<kByTiles>(strip, column, t));
    }
    return max;
  }

  /// Online softmax of kLanes rows over the chunk; leaves p in scores, where the source has in_pairs() as
  /// dwords of two tokens, and the accumulators' factor in alpha.
  void softmax(const Strip& strip, const Chunk& chunk, bool partial, int column) {
    const F d;
    float* scores = s_.scores + column;
    const int row = strip.first + column;
    const VF before = hn::LoadU(d, s_.max + row);
    const VF max = make_logits<false>(strip, chunk, partial, column, before);
    const VF shift = shift_of(max);
    VF sum = hn::Zero(d);
    const auto weigh = [&](int t) HWY_ATTR {
      const VF p = exp_nonpositive(hn::Sub(hn::LoadU(d, scores + t * strip.rows), shift));
      sum = hn::Add(sum, p);
      return Source::kBf16Weights ? bf16_weight(p) : p;
    };
    const int tokens = chunk.tiles * kTileTokens;
    if (source_.in_pairs()) {
      const hn::RebindToUnsigned<F> word;
      for (int t = 0; t < tokens; t += 2) {
        const VF first = weigh(t), second = weigh(t + 1);
        const auto low = hn::BitCast(d, hn::ShiftRight<16>(hn::BitCast(word, second)));
        hn::StoreU(hn::Or(first, low), d, scores + t / 2 * strip.rows);
      }
    } else {
      for (int t = 0; t < tokens; ++t) hn::StoreU(weigh(t), d, scores + t * strip.rows);
    }
    const VF alpha = exp_nonpositive(hn::Sub(before, shift));
    hn::StoreU(alpha, d, s_.alpha + row);
    hn::StoreU(max, d, s_.max + row);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, s_.sum + row), alpha, sum), d, s_.sum + row);
  }

  /// The same with codes for p, relative to the largest logit of the chunk: in scores, or with kBytes as
  /// dwords of four_tokens(). The sum is that of p before it is rounded.
  template <bool kByTiles>
  void softmax_codes(const Strip& strip, const Chunk& chunk, bool partial, int column) {
    const F d;
    const int row = strip.first + column;
    const VF before = hn::LoadU(d, s_.max + row);
    const VF near =
        make_logits<kByTiles>(strip, chunk, partial, column, hn::Set(d, planning::kMinusInfinity));
    const VF max = hn::IfThenElse(hn::Gt(near, before), near, before);
    const VF near_shift = shift_of(near), shift = shift_of(max), levels = hn::Set(d, kWeightLevels);
    VF sum = hn::Zero(d);
    for (int i = 0; i < chunk.tiles * 4; ++i) {
      VF code[4];
      for (int t = 0; t < 4; ++t) {
        const int token = i / 4 * kTileTokens + four_tokens(i % 4)[t];
        float* const at = score_of<kByTiles>(strip, column, token);
        const VF p = exp_nonpositive(hn::Sub(hn::LoadU(d, at), near_shift));
        sum = hn::Add(sum, p);
        code[t] = hn::Mul(p, levels);
        if constexpr (!Source::kBytes) hn::StoreU(hn::Round(code[t]), d, at);
      }
#if HWY_TARGET == HWY_AVX3_DL
      hn::Store(code_word(code), I(), s_.codes.p + column * kWeightWords + i * kLanes);
#endif
    }
    const VF alpha = exp_nonpositive(hn::Sub(before, shift)), weight = exp_nonpositive(hn::Sub(near, shift));
    hn::StoreU(alpha, d, s_.alpha + row);
    hn::StoreU(hn::Mul(weight, hn::Set(d, 1 / kWeightLevels)), d, s_.codes.factor + column);
    hn::StoreU(max, d, s_.max + row);
    const VF kept = hn::Mul(hn::LoadU(d, s_.sum + row), alpha);
    hn::StoreU(hn::MulAdd(sum, weight, kept), d, s_.sum + row);
  }

  static bool all_finite(const float* x, int count) {
    const F d;
    VF worst = hn::Zero(d);
    for (int i = 0; i < count; i += kLanes) {  // x - x is 0 or NaN
      const VF value = hn::LoadU(d, x + i);
      worst = hn::Add(worst, hn::Sub(value, value));
    }
    return hn::AllTrue(d, hn::Eq(worst, hn::Zero(d)));
  }

  const Layer& layer_;
  const Item& item_;
  Scratch& s_;
  Source source_;
  const ScoreTransform transform_;
  ItemRows<kStripRows> rows_;
};

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_BLOCKED_INL_H
