// Blocked path by tiles (AMX): brings Q, K and V of an item to where tiles take them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/attention/code_sources-inl.h"
#include "cpu/attention/coded_keys-inl.h"
#include "cpu/attention/item-inl.h"
#include "cpu/attention/tile_operands-inl.h"
#include "cpu/attention/tile_source-inl.h"

#if defined(HALFTONE_CPU_TILE_LOADER_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_TILE_LOADER_INL_H
#undef HALFTONE_CPU_TILE_LOADER_INL_H
#else
#define HALFTONE_CPU_TILE_LOADER_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

inline constexpr float kLog2e = 1.44269504088896341f;

/// Operands of an item, in TileScratch; Q in int8 in CodeScratch. Source: TileSource, CodedKeys or
/// HalfInt8Source.
template <class Source>
class TileLoader {
  static constexpr bool kBytes = Source::kBytes;

 public:
  TileLoader(const Layer& layer, const Item& item, Scratch& scratch)
      : q_parts(kBytes || layer.bf16_q ? 1
                : half_queries(layer)  ? 2
                                       : 3),
        k_parts(kBytes || Source::kCodes || layer.k.element == Element::kBF16 ? 1
                : layer.k.element == Element::kF16                            ? 2
                                                                              : 3),
        v_codes(!kBytes && has_one_scale(layer.v)),
        v_parts(kBytes || v_codes || layer.v.element == Element::kBF16 ? 1 : 2),
        layer_(layer),
        item_(item),
        s_(scratch),
        t_(scratch.tiles),
        source_(layer, item, scratch),
        unit_(layer.plan->scale * kLog2e) {}

  const int q_parts, k_parts;  ///< bf16 of a value
  const bool v_codes;          ///< V are codes, whose scales P takes up
  const int v_parts;

  const Source& source() const { return source_; }
  /// Of 32 dims.
  int steps() const { return (source_.width() + kStepValues - 1) / kStepValues; }
  /// Of 16 rows from `row` on.
  std::int32_t* queries(int row, int part) const {
    return t_.q + part * kQueryPart + row * (steps() * kLanes);
  }
  /// K of int8, in tiles.
  std::uint8_t* key_bytes() const { return reinterpret_cast<std::uint8_t*>(t_.k); }
  /// Whether all of V of the span is; what is not is in TileScratch::v_wild instead.
  bool finite() const { return finite_; }
  /// Likewise of V's scales, where P takes them up.
  bool finite_scales() const { return finite_scales_; }

  /// Q of the item's rows, of `rows` with padding. False: it has numbers that products of bf16 do not take.
  bool load_queries(const ItemRows<kTiledRows>& of, int rows) {
    for (int i = 0; i < of.strips; ++i) {
      first_ = std::min(first_, of.strip[i].begin);
      last_ = std::max(last_, std::min(of.strip[i].end, item_.kv_end));
    }
    if constexpr (Source::kCodes) source_.begin_queries(rows);
    const int width = source_.width();
    OperandCheck check;
    float* const block = s_.decoded;  // [16][width], of which K has no need yet
    for (int first = 0; first < rows; first += kTileRows) {
      const Strip& strip = of.strip[first / kTiledRows];
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
      pack_queries(block, width, q_parts, check, to);
      if (width % kStepValues == 0) continue;
      for (int part = 0; part < q_parts; ++part)
        std::fill_n(to + part * kQueryPart + width / 2 * kLanes, 8 * kLanes, 0);
    }
    return !check.too_small();
  }

  /// K and V of tokens [begin, end) of a span, the rest of their blocks of 32 cleared. False: as above.
  bool load_span(int begin, int end) {
    const int span = begin / kSpanTokens * kSpanTokens;
    finite_scales_ = true;
    odd_scales_ = false;
    KeyPacker keys(k_parts, steps(), t_.k);
    ValuePacker values(layer_.v_dim, v_parts, t_.v);
    for (int before = begin / kStepValues * kStepValues; before < begin; before += kTileTokens)
      clear_tile(before - span, keys, values);
    int token = begin;
    while (token < end) {
      source_.find(token);
      const Chunk& chunk = source_.chunk();
      load_keys(chunk, token - span, keys);
      load_values(chunk, token - span, values);
      for (int i = 0; i < chunk.tiles; ++i)
        t_.excluded[(token - span) / kTileTokens + i] = chunk.tile[i].excluded;
      for (int t = 0; t < chunk.tiles * kTileTokens; ++t) {
        const float scale = source_.key_scale(t), factor = scale * unit_;
        t_.k_scale[token - span + t] = scale;
        t_.factor[token - span + t] = factor;
        const bool loses = std::abs(factor) < std::numeric_limits<float>::min() || std::isinf(factor);
        odd_scales_ |= loses && scale != 0.0f && std::isfinite(scale) && seen(token + t);
      }
      token += chunk.tiles * kTileTokens;
    }
    if (token % kStepValues != 0) clear_tile(token - span, keys, values);
    if (keys.too_small() || values.too_small() || odd_scales_) return false;
    finite_ = values.finite();
    if (!finite_) take_out_wild();
    look_ahead(end);
    return true;
  }

  /// Fetches the i-th of `count` parts of the next span.
  void fetch_ahead(int i, int count) {
    for (int n = i * ahead_.tiles / count; n < (i + 1) * ahead_.tiles / count; ++n) prefetcher_.advance();
  }

 private:
  alignas(64) static constexpr std::uint8_t kZeroRow[2 * kMaxDim] = {};  ///< of V in bf16

  /// Whether Q, as K meets them, are values of f16.
  static bool half_queries(const Layer& layer) {
    return layer.plan->problem.q_dtype == DType::kFloat16 && !layer.rotate_k &&
           layer.channels.scale == nullptr;
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
      if (v_codes) {
        for (int t = 0; t < kTileTokens; ++t) take_value_scale(to + t, counts[t] ? s_.v_scale[t] : 0.0f);
      }
      const bool all = std::ranges::all_of(counts, [](bool x) { return x; });
      if (all && turns_codes(tile.v, to, values)) continue;
      kDecodeV[static_cast<int>(layer_.v.element)](
          layer_.v, layer_.maps->v, tile, v_codes ? kOnes.data() : s_.v_scale, s_.v_min, s_.decoded_v);
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
    const float* const scale = v_codes ? nullptr : s_.v_scale;
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
    for (int t = 0; t < kSpanTokens && v_codes; ++t) {
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

  const Layer& layer_;
  const Item& item_;
  Scratch& s_;
  TileScratch& t_;
  Source source_;
  const float unit_;  ///< what scores are multiplied with besides scales of Q and K

  int first_ = INT32_MAX;  ///< tokens [first_, last_) are seen by some row
  int last_ = 0;
  bool finite_ = true;
  bool finite_scales_ = true;
  bool odd_scales_ = false;  ///< of the span, too small, or of K too large
  Chunk ahead_;              ///< the next span
  Prefetcher prefetcher_;
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_TILE_LOADER_INL_H
