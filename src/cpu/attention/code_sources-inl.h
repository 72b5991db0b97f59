// Blocked path: tiles of K and V for arithmetic in 8 bits (docs/arithmetic.md).

#include <algorithm>

#include "cpu/attention/byte_tiles-inl.h"
#include "cpu/attention/fp8_rows-inl.h"
#include "cpu/attention/int8_rows-inl.h"
#include "cpu/attention/tile_source-inl.h"
#include "cpu/attention/value_block-inl.h"

#if defined(HALFTONE_CPU_CODE_SOURCES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_CODE_SOURCES_INL_H
#undef HALFTONE_CPU_CODE_SOURCES_INL_H
#else
#define HALFTONE_CPU_CODE_SOURCES_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// The same tiles for arithmetic in 8 bits: Q and K become integers.
class Int8Source : public TileSource {
 public:
  static constexpr bool kCodes = true;
  static constexpr bool kBytes = kByteKernels;

  Int8Source(const Layer& layer, const Item& item, Scratch& scratch)
      : TileSource(layer, item, scratch),
        width_(kBytes && layer.stored_k ? layer.head_dim : TileSource::width()),
        k_scale_(layer.stored_k ? scratch.k_scale : scratch.codes.k_scale) {}

  int width() const { return width_; }
  float key_scale(int token) const { return k_scale_[token]; }
  static bool scales_queries() { return true; }
  HWY_INLINE VF scaled(VF dot, VF q_scale, int token) const {
    return hn::Mul(dot, hn::Mul(q_scale, hn::Set(F(), k_scale_[token])));
  }

  void begin_queries(int rows) const {
    std::fill_n(s_.codes.q_scale, rows, 0.0f);
    if constexpr (!kBytes) return;
    std::fill_n(s_.codes.q, width_ / 4 * rows, 0);
    std::fill_n(s_.codes.q_start, rows, 0);
  }

  void take_query([[maybe_unused]] const Strip& strip, int r) const {
    CodeScratch& s = s_.codes;
    s.q_scale[r] = make_int8_codes(s_.row, layer_.head_dim);
#if HWY_TARGET == HWY_AVX3_DL
    const auto& dims = layer_.stored_k ? layer_.maps->k_columns.dims : layer_.maps->k.dims;
    std::int32_t* const q = s.q + strip.first * (width_ / 4) + (r - strip.first);
    s.q_start[r] = pack_int8_codes(s_.row, dims.data(), width_ / 4, strip.rows, q);
#endif
  }

  void decode_k(float* out) const {
    if (!layer_.stored_k) {
      TileSource::decode_k(out);
      quantize(out);
      return;
    }
#if HWY_TARGET == HWY_AVX3_DL
    for (int i = 0; i < chunk_.tiles; ++i) {
      const Tile& tile = chunk_.tile[i];
      load_tile_params(layer_.k, tile.k_params, s_.k_scale + i * kTileTokens, s_.k_min);
      copy_int8_codes(layer_.maps->k_columns, tile, width_, s_.codes.k + i * kTileTokens * width_);
    }
#else
    decode_codes(out);
#endif
  }

#if HWY_TARGET == HWY_AVX3_DL
  template <int C>
  HWY_INLINE void score_bytes_of(const Strip& strip, int token, int column, float* scores) const {
    const CodeScratch& s = s_.codes;
    score_bytes<C>(s.k + token * width_, width_, s.q + strip.first * (width_ / 4) + column,
                   s.q_start + strip.first + column, strip.rows, scores);
  }
#endif

 private:
  /// Values of K become codes, with their scales.
  void quantize(float* x) const {
    clear_padding(layer_.maps->k, chunk_.tiles * kTileTokens, x);
    for (int t = 0; t < chunk_.tiles * kTileTokens; ++t, x += width_) {
#if HWY_TARGET == HWY_AVX3_DL
      s_.codes.k_scale[t] = store_int8_codes(x, width_, s_.codes.k + t * width_);
#else
      s_.codes.k_scale[t] = make_int8_codes(x, width_);
#endif
    }
  }

  const int width_;             ///< elements of K from token to token
  const float* const k_scale_;  ///< [token of the chunk]
};

/// Arithmetic::kHalfInt8: V may be rounded to 16 bits.
class HalfInt8Source : public Int8Source {
 public:
  using Int8Source::Int8Source;

  bool may_hold_nan() const { return rounds() || TileSource::may_hold_nan(); }

  const float* decode_v(float* out) const {
    TileSource::decode_v(out);
    if (rounds()) round_values(layer_.v_type, chunk_.tiles * tile_floats(), out);
    return out;
  }

 private:
  bool rounds() const { return layer_.v_type != DType::kFloat32; }
};

/// The same where that type is bf16, to which P is rounded as well.
class HalfBf16Source : public HalfInt8Source {
 public:
  static constexpr bool kBf16Weights = true;

  using HalfInt8Source::HalfInt8Source;

#if HWY_TARGET == HWY_AVX3_DL
  const float* decode_v(float* out) {
    HalfInt8Source::decode_v(out);
    in_pairs_ = pack_pairs(out);
    return in_pairs_ ? s_.codes.v_pairs : out;
  }

  /// Whether V of the chunk are pairs, which are finite.
  bool in_pairs() const { return in_pairs_; }
  int tile_floats() const { return HalfInt8Source::tile_floats() / (in_pairs_ ? 2 : 1); }
  bool may_hold_nan() const { return !in_pairs_ && HalfInt8Source::may_hold_nan(); }

 private:
  bool pack_pairs(const float* x) const {
    static const bool has = has_pair_products();
    const bool rows = row_order(layer_.v.element);
    const std::vector<std::uint8_t>& blocks = layer_.maps->v_pairs;
    if (!has || (!rows && blocks.empty())) return false;
    const int floats = HalfInt8Source::tile_floats();
    PairPacker packer;
    float* out = s_.codes.v_pairs;
    for (int i = 0; i < chunk_.tiles; ++i, x += floats, out += floats / 2) {
      if (rows) {
        packer.pack_rows(x, layer_.v_dim, out);
      } else {
        packer.pack_blocks(x, blocks, out);
      }
    }
    return packer.fit();
  }

  bool in_pairs_ = false;
#endif
};

/// Arithmetic::kFullInt8: V in blocks of integers, which weights of 8 bits multiply.
class FullInt8Source : public Int8Source {
 public:
  static constexpr bool kRoundsWeights = true;
  static constexpr bool kByteTiles = true;

  FullInt8Source(const Layer& layer, const Item& item, Scratch& scratch)
      : Int8Source(layer, item, scratch),
        block_(layer, item, scratch),
        tiles_(item.rows >= kLeastTiledRows && matrix_tiles().bytes) {}

  /// Where the block's codes of the chunk begin: fp32, or with kBytes dwords in CodeScratch::v_codes, from
  /// first_word() on.
  const float* decode_v(float* /*unused*/) {
    const float* const v = coded_values<Int8Channels>(block_);
    if (tiles_.has()) {
      CodeScratch& s = s_.codes;
      turn_words(s.v_codes + first_word() * layer_.v_dim, chunk_.tiles * 4, layer_.v_dim, s.v_turned);
    }
    return v;
  }
  int first_word() const { return block_.first_word(chunk_.begin); }

  /// score_byte_tiles() of all of a strip's rows and tokens, if that can be.
  bool score_tiles_of(const Strip& strip, int tokens, float* sums) const {
    if (!tiles_.has() || width() % kTileBytes != 0) return false;
    const CodeScratch& s = s_.codes;
    const int dim = width();
    score_byte_tiles(s.k, dim, s.q + strip.first * (dim / 4), s.q_start + strip.first, strip.rows, tokens,
                     sums);
    return true;
  }
  /// CodeScratch::v_turned, if tiles multiply it.
  const std::int32_t* turned_words() const { return tiles_.has() ? s_.codes.v_turned : nullptr; }

 private:
  ValueBlock block_;
  const TileScope tiles_;
};

/// Arithmetic::kFp8: Q and K as codes of E4M3, V in blocks of such.
class Fp8Source : public TileSource {
 public:
  static constexpr bool kCodes = true;

  Fp8Source(const Layer& layer, const Item& item, Scratch& scratch)
      : TileSource(layer, item, scratch),
        k_scale_(layer.stored_k ? scratch.k_scale : scratch.codes.k_scale),
        block_(layer, item, scratch) {
    if (!layer.bare_v) return;
    std::fill_n(s_.v_scale, kChunkTokens, code_unit(layer.v.element));
    out_scale_ = layer.v.static_scale[layer.v.static_per_head ? item.kv_head : 0];
  }

  static bool may_hold_nan() { return true; }
  HWY_INLINE VF scaled(VF dot, VF q_scale, int token) const {
    return hn::Mul(dot, hn::Mul(q_scale, hn::Set(F(), k_scale_[token])));
  }
  float out_scale() const { return out_scale_; }
  void begin_queries(int rows) const { std::fill_n(s_.codes.q_scale, rows, 0.0f); }
  void take_query(const Strip& /*strip*/, int r) const {
    s_.codes.q_scale[r] = make_fp8_codes(s_.row, layer_.head_dim);
  }

  void decode_k(float* out) const {
    if (layer_.stored_k) {
      decode_codes(out);
      return;
    }
    TileSource::decode_k(out);
    clear_padding(layer_.maps->k, chunk_.tiles * kTileTokens, out);
    for (int t = 0; t < chunk_.tiles * kTileTokens; ++t, out += width()) {
      s_.codes.k_scale[t] = make_fp8_codes(out, width());
    }
  }

  const float* decode_v(float* /*unused*/) { return coded_values<Fp8Channels>(block_); }

 private:
  const float* const k_scale_;  ///< [token of the chunk]
  float out_scale_ = 1;
  ValueBlock block_;
};

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_CODE_SOURCES_INL_H
