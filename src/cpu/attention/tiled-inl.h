// Blocked path by tiles (AMX), 16 bits and half_int8: many rows of Q against spans of kSpanTokens.
//
// As elsewhere lanes are rows: S^T[token][row] = K Q^T and O^T[dim][row] += V^T P^T, so that nothing of the
// softmax leaves a lane. Logits are kept in base 2. A row's arithmetic does not depend on the rows beside it,
// nor on where its item's keys begin: spans and tiles lie at absolute places, and what a row does not see
// adds zeros.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/attention/code_sources-inl.h"
#include "cpu/attention/coded_keys-inl.h"
#include "cpu/attention/item-inl.h"
#include "cpu/attention/tile_operands-inl.h"
#include "cpu/attention/tile_source-inl.h"

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
/// (relative error 8e-8).
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
        source_(layer, item, scratch),
        transform_(layer),
        q_parts_(kBytes || layer.bf16_q ? 1
                 : half_queries(layer)  ? 2
                                        : 3),
        k_parts_(kBytes || Source::kCodes || layer.k.element == Element::kBF16 ? 1
                 : layer.k.element == Element::kF16                            ? 2
                                                                               : 3),
        v_codes_(!kBytes && has_one_scale(layer.v)),
        v_parts_(kBytes || v_codes_ || layer.v.element == Element::kBF16 ? 1 : 2),
        steps_((source_.width() + kStepValues - 1) / kStepValues) {}

  /// False if the item has numbers that products of bf16 do not take: it must begin again in fp32.
  bool run() {
    const int rows = (item_.rows + kLanes - 1) / kLanes * kLanes;
    rows_.find(layer_, item_, rows, s_);
    std::fill_n(top_, rows, planning::kMinusInfinity);
    first_ = INT32_MAX;
    last_ = 0;
    for (int i = 0; i < rows_.strips; ++i) {
      first_ = std::min(first_, rows_.strip[i].begin);
      last_ = std::max(last_, std::min(rows_.strip[i].end, item_.kv_end));
    }
    const TileScope tiles(true);
    if (!load_queries(rows)) return false;
    std::fill_n(s_.acc, layer_.v_dim * rows, 0.0f);
    for (int begin = item_.kv_begin; begin < item_.kv_end;) {
      const int end = std::min(item_.kv_end, begin / kSpanTokens * kSpanTokens + kSpanTokens);
      if (!load_span(begin, end)) return false;
      look_ahead(end);
      for (int i = 0; i < rows_.strips; ++i) {
        for (int n = i * ahead_.tiles / rows_.strips; n < (i + 1) * ahead_.tiles / rows_.strips; ++n)
          prefetcher_.advance();
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
  static constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
  alignas(64) static constexpr std::uint8_t kZeroRow[2 * kMaxDim] = {};  ///< of V in bf16
  static constexpr int kWeightsPart = kSpanTokens / 2 * kTiledRows;
  /// Of logits in base 2: below it P is 0. half_int8's: kLeastWeight; else that of exp_nonpositive().
  static constexpr float kLeast = kBytes ? -56.0f : -125.9f;

  /// Whether Q, as K meets it, are values of f16.
  static bool half_queries(const Layer& layer) {
    return layer.plan->problem.q_dtype == DType::kFloat16 && !layer.rotate_k &&
           layer.channels.scale == nullptr;
  }

  /// Of 16 rows from `row` on.
  std::int32_t* queries(int row, int part) const {
    return t_.q + part * kQueryPart + row * (steps_ * kLanes);
  }
  float* output(int row) const { return s_.acc + row * layer_.v_dim; }
  float* scores(int column) const { return t_.scores + column * kSpanTokens; }
  std::int32_t* weights(int column, int part) const {
    return t_.p + part * kWeightsPart + column * (kSpanTokens / 2);
  }

  bool load_queries(int rows) {
    if constexpr (Source::kCodes) source_.begin_queries(rows);
    const int width = source_.width();
    OperandCheck check;
    float* const block = s_.decoded;  // [16][width], of which K has no need yet
    for (int first = 0; first < rows; first += kTileRows) {
      const Strip& strip = rows_.strip[first / kTiledRows];
      for (int r = first; r < first + kTileRows; ++r) {
        if (r < item_.rows) {
          load_query(layer_, item_, r, s_.row);
          if constexpr (Source::kCodes) source_.take_query(strip, r);
        } else {
          std::fill_n(s_.row, layer_.head_dim, 0.0f);
        }
        if constexpr (!kBytes) order_query(block + (r - first) * width);
      }
      if constexpr (kBytes) continue;
      std::int32_t* const to = queries(first, 0);
      pack_queries(block, width, q_parts_, check, to);
      if (width % kStepValues == 0) continue;
      for (int part = 0; part < q_parts_; ++part)
        std::fill_n(to + part * kQueryPart + width / 2 * kLanes, 8 * kLanes, 0);
    }
    return !check.too_small();
  }

  /// Scratch::row in the order of K's columns.
  void order_query(float* out) const {
    const int width = source_.width();
    const std::int16_t* const dims = layer_.maps->k.dims.data();
    for (int i = 0; i < width; i += kLanes) {
      const __m512i dim =
          _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(dims + i)));
      const __mmask16 is_dim = _mm512_cmpge_epi32_mask(dim, _mm512_setzero_si512());
      _mm512_storeu_ps(out + i, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), is_dim, dim, s_.row, 4));
    }
  }

  /// K and V of tokens [begin, end), the rest of their blocks of 32 cleared.
  bool load_span(int begin, int end) {
    const int span = begin / kSpanTokens * kSpanTokens, width = source_.width();
    finite_scales_ = true;
    odd_scales_ = false;
    KeyPacker keys(k_parts_, steps_, t_.k);
    ValuePacker values(layer_.v_dim, v_parts_, t_.v);
    for (int token = begin / kStepValues * kStepValues; token < begin; token += kTileTokens)
      clear_tile(token - span, keys, values);
    for (int token = begin; token < end;) {
      source_.find(token);
      const Chunk& chunk = source_.chunk();
      load_keys(chunk, token - span, keys);
      load_values(chunk, token - span, values);
      for (int i = 0; i < chunk.tiles; ++i)
        t_.excluded[(token - span) / kTileTokens + i] = chunk.tile[i].excluded;
      for (int t = 0; t < chunk.tiles * kTileTokens; ++t) {
        const float scale = source_.key_scale(t), factor = scale * (transform_.scale * kLog2e);
        t_.k_scale[token - span + t] = scale;
        t_.factor[token - span + t] = factor;
        const bool loses = std::abs(factor) < std::numeric_limits<float>::min() || std::isinf(factor);
        odd_scales_ |= loses && scale != 0.0f && std::isfinite(scale) && seen(token + t);
      }
      token += chunk.tiles * kTileTokens;
      end_ = token;
    }
    if (end_ % kStepValues != 0) clear_tile(end_ - span, keys, values);
    if (keys.too_small() || values.too_small() || odd_scales_) return false;
    finite_ = values.finite();
    if (!finite_) take_out_wild();
    return true;
  }

  /// Begins to fetch the span from `begin` on, a tile at a time.
  void look_ahead(int begin) {
    ahead_.tiles = 0;
    if (begin >= item_.kv_end || !layer_.paged) return;
    source_.look_ahead(begin, std::min(item_.kv_end, begin + kSpanTokens), ahead_);
    prefetcher_.begin(layer_, ahead_, ahead_.tiles);
  }

  void clear_tile(int token, KeyPacker& keys, ValuePacker& values) {
    values.clear(token);
    t_.excluded[token / kTileTokens] = false;
    for (int t = token; t < token + kTileTokens; ++t) {
      t_.k_scale[t] = t_.factor[t] = t_.v_scale[t] = 0.0f;
      if constexpr (!kBytes) keys.clear(t, source_.width());
    }
    if constexpr (kBytes) {
      std::fill_n(key_bytes() + token * source_.width(), kTileTokens * source_.width(), std::uint8_t{0});
    }
  }

  std::uint8_t* key_bytes() const { return reinterpret_cast<std::uint8_t*>(t_.k); }

  bool seen(int token) const { return token >= first_ && token < last_; }

  void load_keys(const Chunk& chunk, int at, KeyPacker& keys) {
    const int width = source_.width(), tokens = chunk.tiles * kTileTokens;
    if constexpr (kBytes) {
      source_.decode_k(s_.decoded);
      for (int t = 0; t < tokens; ++t) {
        for (int i = 0; i < width; i += kTileBytes) {
          std::uint8_t* const to = key_bytes() + (at + t) / kTileRows * kTileRows * width + i * kTileRows +
                                   (at + t) % kTileRows * kTileBytes;
          std::memcpy(to, s_.codes.k + t * width + i, kTileBytes);
        }
      }
    } else {
      const bool copies = !Source::kCodes && layer_.k.element == Element::kBF16;
      if (!copies) {
        source_.decode_k(s_.decoded);
        if (width != layer_.head_dim) clear_padding(layer_.maps->k, tokens, s_.decoded);
      }
      for (int t = 0; t < tokens; ++t) {
        const Tile& tile = chunk.tile[t / kTileTokens];
        if (!seen(chunk.begin + t)) {
          keys.clear(at + t, width);
        } else if (copies) {
          keys.copy(at + t, tile.k + t % kTileTokens * tile.k_stride, width);
        } else {
          keys.pack(at + t, s_.decoded + t * width, width);
        }
      }
    }
  }

  void load_values(const Chunk& chunk, int at, ValuePacker& values) {
    for (int i = 0; i < chunk.tiles; ++i) {
      const int token = chunk.begin + i * kTileTokens, to = at + i * kTileTokens;
      const Tile& tile = chunk.tile[i];
      bool counts[kTileTokens];
      for (int t = 0; t < kTileTokens; ++t) counts[t] = seen(token + t) && !tile.excluded;
      if (layer_.v.element == Element::kBF16) {
        const std::uint8_t* from[kTileTokens];
        for (int t = 0; t < kTileTokens; ++t) {
          from[t] = counts[t] ? tile.v + t * tile.v_stride : kZeroRow;
        }
        values.turn_bf16(to, from);
        continue;
      }
      load_tile_params(layer_.v, tile.v_params, s_.v_scale, s_.v_min);
      if (v_codes_) {
        for (int t = 0; t < kTileTokens; ++t) take_value_scale(to + t, counts[t] ? s_.v_scale[t] : 0.0f);
      }
      const bool all = std::ranges::all_of(counts, [](bool x) { return x; });
      if (all && turns_codes(tile.v, to, values)) continue;
      kDecodeV[static_cast<int>(layer_.v.element)](
          layer_.v, layer_.maps->v, tile, v_codes_ ? kOnes.data() : s_.v_scale, s_.v_min, s_.decoded_v);
      for (int t = 0; t < kTileTokens; ++t) {
        if (!counts[t]) clear_values(layer_.maps->v_quads, t, s_.decoded_v);
      }
      if (row_order(layer_.v.element)) {
        values.turn_rows(to, s_.decoded_v);
      } else {
        for (const QuadClass& quads : source_.quads()) values.turn_quads(to, s_.decoded_v, quads);
      }
    }
  }

  void take_value_scale(int token, float scale) {
    t_.v_scale[token] = scale;
    finite_scales_ &= std::isfinite(scale);
    odd_scales_ |= scale != 0.0f && std::abs(scale) < kLeastWeight;
  }

  /// Straight from 8-bit codes with one scale.
  bool turns_codes(const std::uint8_t* codes, int to, ValuePacker& values) const {
    const Element element = layer_.v.element;
    if (!has_one_scale(layer_.v) || (element != Element::kI8 && element != Element::kE4M3)) return false;
    for (const QuadClass& quads : source_.quads()) {
      if (quads.word[0] < 0 || quads.second != 8) return false;
    }
    const float* const scale = v_codes_ ? nullptr : s_.v_scale;
    for (const QuadClass& quads : source_.quads()) {
      if (element == Element::kI8) {
        values.template turn_codes<Element::kI8>(to, codes, quads, scale);
      } else {
        values.template turn_codes<Element::kE4M3>(to, codes, quads, scale);
      }
    }
    return true;
  }

  /// Where token `t` of the span stands among those of V and P.
  static int value_place(int t) {
    return t / kTileTokens * kTileTokens + 2 * pair_place(t % kTileTokens / 2) + t % 2;
  }

  static bool wild(std::uint16_t x) { return (x & 0x7f80) == 0x7f80; }

  /// What is not finite of V goes to v_wild: a weight of 0 must not make a NaN of it.
  void take_out_wild() {
    // A weight times a scale of 0 does not tell that it is one.
    for (int t = 0; t < kSpanTokens && v_codes_; ++t) {
      if (t_.v_scale[t] != 0.0f) continue;
      t_.v_scale[t] = 1.0f;
      for (int dim = 0; dim < layer_.v_dim; ++dim) {
        std::uint16_t& x = t_.v[ValuePacker::index(value_place(t), dim)];
        if (!wild(x)) x = 0;
      }
    }
    for (int i = 0; i < kSpanTokens * layer_.v_dim; ++i) {
      std::uint16_t& x = t_.v[i];
      t_.v_wild[i] = wild(x) ? x : 0;
      if (!wild(x)) continue;
      x = 0;
      t_.v[ValuePacker::kPart + i] = 0;
    }
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
    if (!finite_) add_wild(strip, first, last);
  }

  void score(const Strip& strip, int first, int last) {
    const int width = source_.width();
    for_tiles(last - first, strip.rows, [&](auto l, auto r, int token, int row) HWY_ATTR {
      constexpr int L = decltype(l)::value, R = decltype(r)::value;
      token += first;
      const TileSums sums{scores(row) + token * kLanes, kTileRows * kTileBytes, kTileRows * kSpanTokens * 4};
      if constexpr (kBytes) {
        const std::int32_t* const start = s_.codes.q_start + strip.first + row;
        load_tile<0>(start, 0);  // the same for each token
        if constexpr (R == 2) load_tile<1>(start + kLanes, 0);
        if constexpr (L == 2) load_tile<2>(start, 0);
        if constexpr (L == 2 && R == 2) load_tile<3>(start + kLanes, 0);
        add_products<L, R, TileProducts::kSignedRight>(
            {key_bytes() + token * width, kTileBytes, kTileRows * kTileBytes, kTileRows * width},
            {s_.codes.q + strip.first * (width / 4) + row, strip.rows * 4, kTileRows * strip.rows * 4,
             kTileBytes},
            width / kTileBytes);
      } else {
        zero_tile_sums<L, R>();
        const std::ptrdiff_t tile = kTileRows * kTileBytes;
        // Products of parts that fp32 does not round away, small ones first.
        for (int sum = std::min(q_parts_ + k_parts_ - 2, kMaxParts - 1); sum >= 0; --sum) {
          for (int k = std::max(0, sum - q_parts_ + 1); k <= std::min(sum, k_parts_ - 1); ++k) {
            add_products<L, R, TileProducts::kPairs>(
                {t_.k + k * KeyPacker::kPart + token / kTileRows * steps_ * kTileValues, kTileBytes, tile,
                 steps_ * tile},
                {queries(strip.first + row, sum - k), kTileBytes, tile, steps_ * tile}, steps_);
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
    if (source_.scales_queries()) {
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
    const __m512 before = _mm512_loadu_ps(top_ + row),
                 minus_infinity = _mm512_set1_ps(planning::kMinusInfinity);
    __m512 q_scale = _mm512_set1_ps(1.0f);
    if constexpr (kScales) q_scale = _mm512_loadu_ps(s_.codes.q_scale + row);
    const __m512i begin = _mm512_loadu_si512(rows_.begin + row), end = _mm512_loadu_si512(rows_.end + row);
    const auto factor = [&](int t) HWY_ATTR {
      const __m512 of_token = _mm512_set1_ps(t_.factor[t]);
      return kScales ? _mm512_mul_ps(of_token, q_scale) : of_token;
    };
    const auto sees = [&](int t) HWY_ATTR {
      if (t_.excluded[t / kTileTokens]) return __mmask16{0};
      const __m512i token = _mm512_set1_epi32(span + t);
      return _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(token, begin), token, end);
    };
    __m512 top = before;
    for (int t = first; t < last; ++t) {
      const __m512 x = _mm512_mul_ps(raw_score(x_of + t * kLanes), factor(t));
      top = kMasked ? _mm512_mask_max_ps(top, sees(t), x, top) : _mm512_max_ps(x, top);
    }
    weigh(first, last, column, row, before, top, [&](int t, __m512 shift) HWY_ATTR {
      const __m512 x = _mm512_fmsub_ps(raw_score(x_of + t * kLanes), factor(t), shift);
      return kMasked ? _mm512_mask_mov_ps(minus_infinity, sees(t), x) : x;
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
    const VI begin = hn::LoadU(di, rows_.begin + row), end = hn::LoadU(di, rows_.end + row);
    const VF minus_infinity = hn::Set(d, planning::kMinusInfinity), log2e = hn::Set(d, kLog2e);
    VF q_scale = hn::Set(d, 1.0f);
    if constexpr (Source::kCodes) q_scale = hn::LoadU(d, s_.codes.q_scale + row);
    VF most{top};
    for (int t = first; t < last; ++t) {
      const VI token = hn::Set(di, span + t);
      const VF dot = hn::Mul(VF{raw_score(x_of + t * kLanes)}, hn::Mul(hn::Set(d, t_.k_scale[t]), q_scale));
      VF x = hn::Mul(transform_.apply(dot, slope, position, token), log2e);
      if (partial) {
        x = hn::IfThenElse(visible(token, begin, end), x, minus_infinity);
        if (t_.excluded[t / kTileTokens]) x = minus_infinity;
      }
      most = larger(x, most);
      hn::Store(x, d, x_of + t * kLanes);
    }
    return most.raw;
  }

  /// `logit_of(t, shift)`: a logit less the shift.
  template <class LogitOf>
  HWY_INLINE void weigh(int first, int last, int column, int row, __m512 before, __m512 top,
                        const LogitOf& logit_of) {
    if (!v_codes_) {
      weigh_values<true>(first, last, column, row, before, top, logit_of,
                         [](__m512 p, int) HWY_ATTR { return p; });
    } else if (finite_scales_) {
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
        if (v >= v_parts_ || (p == 1 && kBytes)) continue;
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
  Source source_;
  const ScoreTransform transform_;
  const int q_parts_, k_parts_;  ///< bf16 of a value
  const bool v_codes_;           ///< V are codes, whose scales P takes up
  const int v_parts_;
  const int steps_;  ///< of 32 dims
  ItemRows<kTiledRows> rows_;
  Chunk ahead_;  ///< the next span
  Prefetcher prefetcher_;
  alignas(64) float top_[kMaxRows];  ///< largest logit, in base 2
  int first_ = 0;                    ///< tokens [first_, last_) are seen by some row
  int last_ = 0;
  int end_ = 0;                ///< of the span's tiles
  bool finite_ = true;         ///< V of the span
  bool finite_scales_ = true;  ///< and its scales, where P takes them up
  bool odd_scales_ = false;
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_TILED_INL_H
