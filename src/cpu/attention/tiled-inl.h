// Blocked path by tiles (AMX), 16 bits and half_int8: many rows of Q against spans of kSpanTokens.
//
// As elsewhere lanes are rows: S^T[token][row] = K Q^T and O^T[dim][row] += V^T P^T, so that nothing of the
// softmax leaves a lane. Logits are kept in base 2. A row's arithmetic does not depend on the rows beside it,
// nor on where its item's keys begin: spans and tiles lie at absolute places, and what a row does not see
// adds zeros.

#include <algorithm>
#include <bit>

#include "cpu/attention/item-inl.h"
#include "cpu/attention/tile_loader-inl.h"

#if defined(HALFTONE_CPU_TILED_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_TILED_INL_H
#undef HALFTONE_CPU_TILED_INL_H
#else
#define HALFTONE_CPU_TILED_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

/// Whether tiles serve the item: an output of 16 bits, to which P in 16 bits adds nothing that shows, and
/// operands that are not of fp32. Counted per request, as kDirectRows is.
inline bool takes_tiles(const Layer& layer, const Item& item) {
  const AttentionProblem& problem = layer.plan->problem;
  const MatrixTiles tiles = matrix_tiles();
  if (!tiles.pairs || item.q_len * layer.group <= kDirectRows) return false;
  if (problem.out_dtype == DType::kFloat32 || problem.q_dtype == DType::kFloat32) return false;
  if (layer.k.element == Element::kF32 || layer.v.element == Element::kF32) return false;
  if (layer.arithmetic == Arithmetic::k16Bit) return true;
  return layer.arithmetic == Arithmetic::kHalfInt8 && layer.bf16_weights && tiles.bytes &&
         layer.head_dim % kTileBytes == 0 && (layer.stored_k || layer.maps->k.width() == layer.head_dim);
}

/// 2^x for x up to about 0; 0 below `least`, NaN for NaN. 2^floor(x) times a polynomial of what is left
/// (relative error 8e-8, and the roundings).
HWY_INLINE __m512 exp2_above(__m512 x, __m512 least) {
  const __m512 f = _mm512_reduce_ps(x, 0x01);  // x - floor(x)
  __m512 y = _mm512_set1_ps(1.8671300724351007e-3f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.017030315901968e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.579991310966543e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.401644501528725e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931513118048794e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y, x);
}

/// One item. Source: TileSource, CodedKeys or HalfInt8Source.
template <class Source>
class TiledItem {
 public:
  TiledItem(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer),
        item_(item),
        s_(scratch),
        t_(scratch.tiles),
        loader_(layer, item, scratch),
        transform_(layer) {}

  /// False if the item has numbers that products of bf16 do not take: it must begin again in fp32.
  bool run() {
    const int rows = (item_.rows + kLanes - 1) / kLanes * kLanes;
    rows_.find(layer_, item_, rows, s_);
    std::fill_n(top_, rows, planning::kMinusInfinity);
    const TileScope tiles(true);
    if (!loader_.load_queries(rows_, rows)) return false;
    std::fill_n(s_.acc, layer_.v_dim * rows, 0.0f);
    for (int begin = item_.kv_begin; begin < item_.kv_end;) {
      const int end = std::min(item_.kv_end, begin / kSpanTokens * kSpanTokens + kSpanTokens);
      if (!loader_.load_span(begin, end)) return false;
      for (int i = 0; i < rows_.strips; ++i) {
        loader_.fetch_ahead(i, rows_.strips);
        attend(rows_.strip[i], begin, end);
      }
      begin = end;
    }
    for (int r = 0; r < item_.rows; ++r) s_.max[r] = top_[r] * kLn2;
    for (int i = 0; i < rows_.strips; ++i) store_rows(rows_.strip[i]);
    mark_nan(item_, s_);
    return true;
  }

 private:
  static constexpr bool kBytes = Source::kBytes;
  static constexpr float kLn2 = 0.693147180559945309f;
  static constexpr int kWeightsPart = kSpanTokens / 2 * kTiledRows;
  /// Of logits in base 2: below it P is 0. half_int8's: kLeastWeight; else that of exp_nonpositive().
  static constexpr float kLeast = kBytes ? -56.0f : -125.9f;

  float* output(int row) const { return s_.acc + row * layer_.v_dim; }
  float* scores(int column) const { return t_.scores + column * kSpanTokens; }
  std::int32_t* weights(int column, int part) const {
    return t_.p + part * kWeightsPart + column * (kSpanTokens / 2);
  }

  /// A strip's rows and tokens [begin, end), which lie in one span.
  void attend(const Strip& strip, int begin, int end) {
    const int span = begin / kSpanTokens * kSpanTokens;
    const int first = std::max(begin, strip.begin) / kStepValues * kStepValues - span;
    const int last = (std::min(end, strip.end) + kStepValues - 1) / kStepValues * kStepValues - span;
    if (first >= last || strip.begin >= end || strip.end <= begin) return;
    score(strip, first, last);
    bool partial = strip.common.begin > first + span || strip.common.end < last + span;
    for (int tile = first / kTileTokens; tile < last / kTileTokens; ++tile) partial |= t_.excluded[tile];
    for (int column = 0; column < strip.rows; column += kLanes)
      softmax(strip, span, first, last, partial, column);
    add_output(strip, first, last);
    if (!loader_.finite()) add_wild(strip, first, last);
  }

  void score(const Strip& strip, int first, int last) {
    const int width = loader_.source().width();
    for_tiles(last - first, strip.rows, [&](auto l, auto r, int token, int row) HWY_ATTR {
      constexpr int L = decltype(l)::value, R = decltype(r)::value;
      token += first;
      const TileSums sums{scores(row) + token * kLanes, kTileRows * kTileBytes, kTileRows * kSpanTokens * 4};
      if constexpr (kBytes) {
        begin_tile_sums<L, R>(s_.codes.q_start + strip.first + row);
        add_products<L, R, TileProducts::kSignedRight>(
            {loader_.key_bytes() + token * width, kTileBytes, kTileRows * kTileBytes, kTileRows * width},
            {s_.codes.q + strip.first * (width / 4) + row, strip.rows * 4, kTileRows * strip.rows * 4,
             kTileBytes},
            width / kTileBytes);
      } else {
        zero_tile_sums<L, R>();
        const std::ptrdiff_t tile = kTileRows * kTileBytes;
        // Products of parts that fp32 does not round away, small ones first.
        for (int sum = std::min(loader_.q_parts + loader_.k_parts - 2, kMaxParts - 1); sum >= 0; --sum) {
          for (int k = std::max(0, sum - loader_.q_parts + 1); k <= std::min(sum, loader_.k_parts - 1); ++k) {
            add_products<L, R, TileProducts::kPairs>(
                {t_.k + k * KeyPacker::kPart + token / kTileRows * loader_.steps() * kTileValues, kTileBytes,
                 tile, loader_.steps() * tile},
                {loader_.queries(strip.first + row, sum - k), kTileBytes, tile, loader_.steps() * tile},
                loader_.steps());
          }
        }
      }
      sums.template store<L, R>();
    });
  }

  static HWY_INLINE __m512 raw_score(const float* at) {
    if constexpr (kBytes) return _mm512_cvtepi32_ps(_mm512_load_si512(at));
    return _mm512_load_ps(at);
  }

  /// Online softmax of kLanes rows over tokens [first, last) of the span: P as pairs; what the rows have so
  /// far shrinks.
  void softmax(const Strip& strip, int span, int first, int last, bool partial, int column) {
    if (!transform_.only_multiplies()) {
      const float* const x_of = scores(column);
      const int row = strip.first + column;
      const __m512 before = _mm512_loadu_ps(top_ + row);
      const __m512 top = make_logits(strip, span, first, last, partial, column, before);
      return weigh(first, last, column, row, before, top, [&](int t, __m512 shift) HWY_ATTR {
        return _mm512_sub_ps(_mm512_load_ps(x_of + t * kLanes), shift);
      });
    }
    if (loader_.source().scales_queries()) {
      if (partial) return softmax_of_products<true, true>(strip, span, first, last, column);
      return softmax_of_products<true, false>(strip, span, first, last, column);
    }
    if (partial) return softmax_of_products<false, true>(strip, span, first, last, column);
    softmax_of_products<false, false>(strip, span, first, last, column);
  }

  /// Where logits are scores times factors. Whether some row of the strip does not see all (kMasked), or has
  /// a scale that is not 1 (kScales), must not change the bits of others.
  template <bool kScales, bool kMasked>
  HWY_NOINLINE void softmax_of_products(const Strip& strip, int span, int first, int last, int column) {
    const float* const x_of = scores(column);
    const int row = strip.first + column;
    const __m512 before = _mm512_loadu_ps(top_ + row);
    __m512 q_scale = _mm512_set1_ps(1.0f);
    if constexpr (kScales) q_scale = _mm512_loadu_ps(s_.codes.q_scale + row);
    const SeenKeys seen = rows_.seen(row);
    const auto factor = [&](int t) HWY_ATTR {
      const __m512 of_token = _mm512_set1_ps(t_.factor[t]);
      return kScales ? _mm512_mul_ps(of_token, q_scale) : of_token;
    };
    const auto masked = [&](__m512 x, int t) HWY_ATTR {
      if constexpr (!kMasked) return x;
      return seen.masked(VF{x}, hn::Set(I(), span + t), t_.excluded[t / kTileTokens]).raw;
    };
    __m512 top = before;
    for (int t = first; t < last; ++t)
      top = _mm512_max_ps(masked(_mm512_mul_ps(raw_score(x_of + t * kLanes), factor(t)), t), top);
    weigh(first, last, column, row, before, top, [&](int t, __m512 shift) HWY_ATTR {
      return masked(_mm512_fmsub_ps(raw_score(x_of + t * kLanes), factor(t), shift), t);
    });
  }

  /// Scores become logits in base 2, -inf where a row does not see the token; returns the largest of them and
  /// `top`.
  __m512 make_logits(const Strip& strip, int span, int first, int last, bool partial, int column,
                     __m512 top) {
    float* const x_of = scores(column);
    const int row = strip.first + column;
    const F d;
    const I di;
    const VF slope = hn::LoadU(d, rows_.slope + row);
    const VI position = hn::LoadU(di, rows_.position + row);
    const SeenKeys seen = rows_.seen(row);
    const VF log2e = hn::Set(d, kLog2e);
    VF q_scale = hn::Set(d, 1.0f);
    if constexpr (Source::kCodes) q_scale = hn::LoadU(d, s_.codes.q_scale + row);
    VF most{top};
    for (int t = first; t < last; ++t) {
      const VI token = hn::Set(di, span + t);
      const VF dot = hn::Mul(VF{raw_score(x_of + t * kLanes)}, hn::Mul(hn::Set(d, t_.k_scale[t]), q_scale));
      VF x = hn::Mul(transform_.apply(dot, slope, position, token), log2e);
      if (partial) x = seen.masked(x, token, t_.excluded[t / kTileTokens]);
      most = larger(x, most);
      hn::Store(x, d, x_of + t * kLanes);
    }
    return most.raw;
  }

  /// `logit_of(t, shift)`: a logit less the shift.
  template <class LogitOf>
  HWY_INLINE void weigh(int first, int last, int column, int row, __m512 before, __m512 top,
                        const LogitOf& logit_of) {
    if (!loader_.v_codes) {
      weigh_values<true>(first, last, column, row, before, top, logit_of,
                         [](__m512 p, int) HWY_ATTR { return p; });
    } else if (loader_.finite_scales()) {
      weigh_values<true>(first, last, column, row, before, top, logit_of, [this](__m512 p, int t) HWY_ATTR {
        return _mm512_mul_ps(p, _mm512_set1_ps(t_.v_scale[t]));
      });
    } else {  // a weight of 0 stays 0
      weigh_values<false>(first, last, column, row, before, top, logit_of, [this](__m512 p, int t) HWY_ATTR {
        const __mmask16 weighs = _mm512_cmp_ps_mask(p, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        return _mm512_maskz_mul_ps(weighs, p, _mm512_set1_ps(t_.v_scale[t]));
      });
    }
  }

  /// What the upper halves of weights leave; of what is not finite nothing.
  template <bool kFinite>
  static HWY_INLINE __m512 rest_of(__m512i x) {
    const __m512 rest = left_of_upper_halves(x);
    if constexpr (kFinite) return rest;
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(rest, rest, _CMP_ORD_Q), rest);
  }

  template <bool kFinite, class LogitOf, class Scaled>
  HWY_INLINE void weigh_values(int first, int last, int column, int row, __m512 before, __m512 top,
                               const LogitOf& logit_of, const Scaled& scaled) {
    const __m512 shift = shift_of(VF{top}).raw, least = _mm512_set1_ps(kLeast);
    __m512 sum = _mm512_setzero_ps();
    std::int32_t* const p = weights(column, 0);
    for (int tile = first; tile < last; tile += kTileTokens) {
      HALFTONE_UNROLL
      for (int pair = 0; pair < kTileTokens / 2; ++pair) {
        const int t = tile + 2 * pair;
        const __m512 low = exp2_above(logit_of(t, shift), least);
        const __m512 high = exp2_above(logit_of(t + 1, shift), least);
        sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
        const int at = (tile / 2 + pair_place(pair)) * kLanes;
        if constexpr (kBytes) {
          _mm512_store_si512(p + at, rounded_pairs(low, high));
        } else {
          const __m512i x = _mm512_castps_si512(scaled(low, t)), y = _mm512_castps_si512(scaled(high, t + 1));
          _mm512_store_si512(p + at, pair_upper_halves(x, y));
          _mm512_store_si512(p + kWeightsPart + at, rounded_pairs(rest_of<kFinite>(x), rest_of<kFinite>(y)));
        }
      }
    }
    const __m512 alpha = exp2_above(_mm512_sub_ps(before, shift), least);
    _mm512_storeu_ps(top_ + row, top);
    _mm512_storeu_ps(s_.sum + row, _mm512_fmadd_ps(_mm512_loadu_ps(s_.sum + row), alpha, sum));
    if (_mm512_cmp_ps_mask(alpha, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
    float* const out = output(row);
    for (int dim = 0; dim < layer_.v_dim; ++dim) {
      float* const sum_at = out + dim * kLanes;
      _mm512_store_ps(sum_at, _mm512_mul_ps(_mm512_load_ps(sum_at), alpha));
    }
  }

  void add_output(const Strip& strip, int first, int last) {
    for_tiles(layer_.v_dim, strip.rows, [&](auto l, auto r, int dim, int row) HWY_ATTR {
      constexpr int L = decltype(l)::value, R = decltype(r)::value;
      constexpr std::ptrdiff_t kTile = kTileRows * kTileBytes;
      const TileSums sums{output(strip.first + row) + dim * kLanes, kTile, layer_.v_dim * kTileBytes};
      sums.template load<L, R>();
      for (int i = 0; i < 3; ++i) {  // small ones first
        const int v = i == 0 ? 1 : 0, p = i == 1 ? 1 : 0;
        if (v >= loader_.v_parts || (p == 1 && kBytes)) continue;
        const int step = first / kStepValues;
        add_products<L, R, TileProducts::kPairs>(
            {t_.v + v * ValuePacker::kPart + (dim / kTileRows * kSpanSteps + step) * kTileValues, kTileBytes,
             kTile, kSpanSteps * kTile},
            {weights(row, p) + first / 2 * kLanes, kTileBytes, kTile, kSpanSteps * kTile},
            (last - first) / kStepValues);
      }
      sums.template store<L, R>();
    });
  }

  /// What is not finite of V, for rows with a weight for it.
  void add_wild(const Strip& strip, int first, int last) const {
    for (int dim = 0; dim < layer_.v_dim; ++dim) {
      for (int token = first; token < last; ++token) {
        const std::uint16_t x = t_.v_wild[ValuePacker::index(token, dim)];
        if (x == 0) continue;
        const float value = std::bit_cast<float>(std::uint32_t{x} << 16);
        for (int row = 0; row < strip.rows; ++row) {
          const auto pair = static_cast<std::uint32_t>(
              weights(row / kLanes * kLanes, 0)[token / 2 * kLanes + row % kLanes]);
          if ((pair >> (token % 2 * 16) & 0xffffu) == 0) continue;
          output(strip.first + row / kLanes * kLanes)[dim * kLanes + row % kLanes] += value;
        }
      }
    }
  }

  /// O^T of a strip as rows, not divided by the sum.
  void store_rows(const Strip& strip) {
    for (int row = strip.first; row < strip.first + strip.rows; row += kLanes) {
      for (int dim = 0; dim < layer_.v_dim; dim += kLanes) {
        __m512i x[16];
        HALFTONE_UNROLL
        for (int i = 0; i < 16; ++i) x[i] = _mm512_load_si512(output(row) + (dim + i) * kLanes);
        transpose_dwords(x);
        HALFTONE_UNROLL
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(s_.out + (row + i) * layer_.v_dim + dim, x[i]);
      }
    }
  }

  const Layer& layer_;
  const Item& item_;
  Scratch& s_;
  TileScratch& t_;
  TileLoader<Source> loader_;
  const ScoreTransform transform_;
  ItemRows<kTiledRows> rows_;
  alignas(64) float top_[kMaxRows];  ///< largest logit, in base 2
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_TILED_INL_H
