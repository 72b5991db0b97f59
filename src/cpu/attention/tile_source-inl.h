// Blocked path: tiles of K and V, as they lie in pages or tensors, as values.

#include <array>

#include "cpu/attention/blocked-inl.h"
#include "cpu/attention/item-inl.h"
#include "cpu/attention/pv-inl.h"
#include "format/codec.h"

#if defined(HALFTONE_CPU_TILE_SOURCE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_TILE_SOURCE_INL_H
#undef HALFTONE_CPU_TILE_SOURCE_INL_H
#else
#define HALFTONE_CPU_TILE_SOURCE_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// A value of an asymmetric format, code * scale + min, rounded once as in dequantize(): codes of 8 bits, and
/// values rounded to 16, are made of it.
HWY_INLINE VF affine_value(VF code, VF scale, VF min) {
#if HWY_NATIVE_FMA
  return hn::MulAdd(code, scale, min);
#else
  const F d;
  HWY_ALIGN float x[kMaxLanes], scales[kMaxLanes], mins[kMaxLanes];
  hn::Store(code, d, x);
  hn::Store(scale, d, scales);
  hn::Store(min, d, mins);
  for (int i = 0; i < kLanes; ++i) x[i] = codec::ht_fma(x[i], scales[i], mins[i]);
  return hn::Load(d, x);
#endif
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
              x = affine_value(x, scales, mins);
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
          x = asymmetric(kElement) ? affine_value(x, scales, mins) : hn::Mul(x, scales);
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

/// Params that leave codes as they are: of a tile, and what lookups read beyond.
using TileParams = std::array<float, kTileTokens * kMaxGroups + kMaxLanes>;
constexpr TileParams kZeroMins{};
constexpr TileParams kOnes = [] {
  TileParams ones{};
  ones.fill(1.0f);
  return ones;
}();

/// The tiles of a request, as they lie in pages or tensors.
class TileSource : public ValueSource {
 public:
  TileSource(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer), s_(scratch), finder_(layer, item, scratch) {
    fill_static(layer.k, item.kv_head, s_.k_scale, s_.k_min);
    fill_static(layer.v, item.kv_head, s_.v_scale, s_.v_min);
  }

  int width() const { return layer_.maps->k.width(); }
  int dim(int column) const { return layer_.maps->k.dims[column]; }
  const std::vector<QuadClass>& quads() const { return layer_.maps->v_quads; }
  int tile_floats() const { return kTileTokens * layer_.v_dim; }
  bool may_hold_nan() const { return layer_.v.may_hold_nan(); }
  bool excluded(int token) const { return chunk_.tile[token / kTileTokens].excluded; }
  const Chunk& chunk() const { return chunk_; }
  void find(int begin) { finder_.find(begin, chunk_, kBlockedTokens); }
  /// Tokens [begin, end), which it does not go to.
  void look_ahead(int begin, int end, Chunk& chunk) const { finder_.find_range(begin, end, chunk); }

  void decode_k(float* out) const { decode_keys(false, out); }
  const float* decode_v(float* out) const {
    decode_values(chunk_, out);
    return out;
  }
  /// What the scores of a token of the chunk are multiplied with.
  static float key_scale(int /*token*/) { return 1.0f; }
  /// Whether those of a row of Q are, too.
  static bool scales_queries() { return false; }

 protected:
  /// Codes of K; the params stay in Scratch::k_scale and k_min, [token][group]. Where codes come out
  /// code_unit() times too small, the scales are as much larger.
  void decode_codes(float* out) const { decode_keys(true, out); }
  /// V of any tiles of the request as values.
  void decode_values(const Chunk& chunk, float* out) const {
    const int params = kTileTokens * layer_.v.groups;
    for (int i = 0; i < chunk.tiles; ++i) {
      float* scale = s_.v_scale + i * params;
      float* min = s_.v_min + i * params;
      load_tile_params(layer_.v, chunk.tile[i].v_params, scale, min);
      kDecodeV[static_cast<int>(layer_.v.element)](layer_.v, layer_.maps->v, chunk.tile[i], scale, min,
                                                   out + i * tile_floats());
    }
  }
  /// Where the chunk's codes of V begin in its block, whose channels are coded when the block begins.
  template <class Channels, class Block>
  const float* coded_values(Block& block) const {
    if (block.begin(chunk_.begin)) {
      const Chunk& found = block.find(finder_);  // first: it says where the decoded values begin
      decode_values(found, block.decoded());
      block.template finish<Channels>();
    }
    return block.at(chunk_.begin);
  }

  const Layer& layer_;
  Scratch& s_;
  const TileFinder finder_;
  Chunk chunk_;

 private:
  void decode_keys(bool as_codes, float* out) const {
    const int params = kTileTokens * layer_.k.groups;
    for (int i = 0; i < chunk_.tiles; ++i) {
      const Tile& tile = chunk_.tile[i];
      float* const scale = s_.k_scale + i * params;
      float* const min = s_.k_min + i * params;
      load_tile_params(layer_.k, tile.k_params, scale, min);
      kDecodeK[static_cast<int>(layer_.k.element)](
          layer_.k, layer_.maps->k, tile, as_codes ? kOnes.data() : scale, as_codes ? kZeroMins.data() : min,
          out + i * kTileTokens * width());
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_TILE_SOURCE_INL_H
