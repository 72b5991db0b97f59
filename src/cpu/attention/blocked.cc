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
#include "cpu/attention/blocked-inl.h"
#include "cpu/attention/int8_rows-inl.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/pv-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

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

/// The tiles of a request, as they lie in pages or tensors.
class TileSource {
 public:
  static constexpr bool kCodes = false;
  static constexpr bool kBytes = false;

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

  void decode_k(float* out) const {
    const int params = kTileTokens * layer_.k.groups;
    for (int i = 0; i < chunk_.tiles; ++i) {
      float* scale = s_.k_scale + i * params;
      float* min = s_.k_min + i * params;
      load_tile_params(layer_.k, chunk_.tile[i].k_params, scale, min);
      kDecodeK[static_cast<int>(layer_.k.element)](layer_.k, layer_.maps->k, chunk_.tile[i], scale, min,
                                                   out + i * kTileTokens * width());
    }
  }

  void decode_v(float* out) const {
    const int params = kTileTokens * layer_.v.groups;
    for (int i = 0; i < chunk_.tiles; ++i) {
      float* scale = s_.v_scale + i * params;
      float* min = s_.v_min + i * params;
      load_tile_params(layer_.v, chunk_.tile[i].v_params, scale, min);
      kDecodeV[static_cast<int>(layer_.v.element)](layer_.v, layer_.maps->v, chunk_.tile[i], scale, min,
                                                   out + i * tile_floats());
    }
  }

 protected:
  const Layer& layer_;
  Scratch& s_;
  const TileFinder finder_;
  Chunk chunk_;
};

/// Scales that leave codes as they are: of a tile, and what lookups read beyond.
constexpr auto kOnes = [] {
  std::array<float, kTileTokens + kMaxLanes> ones{};
  ones.fill(1.0f);
  return ones;
}();

/// The same tiles for Arithmetic::kHalfInt8: Q and K become codes of 8 bits, V may be rounded.
class Int8Source : public TileSource {
 public:
  static constexpr bool kCodes = true;
  static constexpr bool kBytes = kByteKernels;

  Int8Source(const Layer& layer, const Item& item, Scratch& scratch)
      : TileSource(layer, item, scratch),
        width_(kBytes && layer.int8_k ? layer.head_dim : TileSource::width()),
        k_scale_(layer.int8_k ? scratch.k_scale : scratch.int8.k_scale) {}

  int width() const { return width_; }
  bool may_hold_nan() const { return rounds() || TileSource::may_hold_nan(); }
  float k_scale(int token) const { return k_scale_[token]; }

  void begin_queries(int rows) const {
    std::fill_n(s_.int8.q_scale, rows, 0.0f);
    if constexpr (!kBytes) return;
    std::fill_n(s_.int8.q, width_ / 4 * rows, 0);
    std::fill_n(s_.int8.q_start, rows, 0);
  }

  void take_query(int r, int rows) const {
    Int8Scratch& s = s_.int8;
    s.q_scale[r] = make_int8_codes(s_.row, layer_.head_dim);
#if HWY_TARGET == HWY_AVX3_DL
    const auto& dims = layer_.int8_k ? layer_.maps->k_columns.dims : layer_.maps->k.dims;
    s.q_start[r] = pack_int8_codes(s_.row, dims.data(), width_ / 4, rows, s.q + r);
#else
    (void)rows;
#endif
  }

  void decode_k(float* out) const {
    if (!layer_.int8_k) {
      TileSource::decode_k(out);
      quantize(out);
      return;
    }
    const int params = kTileTokens * layer_.k.groups;
    for (int i = 0; i < chunk_.tiles; ++i) {
      const Tile& tile = chunk_.tile[i];
      float* min = s_.k_min + i * params;
      load_tile_params(layer_.k, tile.k_params, s_.k_scale + i * params, min);
#if HWY_TARGET == HWY_AVX3_DL
      copy_int8_codes(layer_.maps->k_columns, tile, width_, s_.int8.k + i * kTileTokens * width_);
#else
      kDecodeK[static_cast<int>(layer_.k.element)](layer_.k, layer_.maps->k, tile, kOnes.data(), min,
                                                   out + i * kTileTokens * width_);
#endif
    }
  }

  void decode_v(float* out) const {
    TileSource::decode_v(out);
    if (rounds()) round_values(layer_.v_type, chunk_.tiles * tile_floats(), out);
  }

#if HWY_TARGET == HWY_AVX3_DL
  template <int C>
  HWY_INLINE void score_bytes_of(int token, int column, int rows, float* scores) const {
    const Int8Scratch& s = s_.int8;
    score_bytes<C>(s.k + token * width_, width_, s.q + column, s.q_start + column, rows, scores);
  }
#endif

 private:
  bool rounds() const { return layer_.v_type != DType::kFloat32; }

  /// Values of K become codes, with their scales.
  void quantize(float* x) const {
    clear_padding(layer_.maps->k, chunk_.tiles * kTileTokens, x);
    for (int t = 0; t < chunk_.tiles * kTileTokens; ++t, x += width_) {
#if HWY_TARGET == HWY_AVX3_DL
      s_.int8.k_scale[t] = store_int8_codes(x, width_, s_.int8.k + t * width_);
#else
      s_.int8.k_scale[t] = make_int8_codes(x, width_);
#endif
    }
  }

  const int width_;             ///< elements of K from token to token
  const float* const k_scale_;  ///< [token of the chunk]
};

void Blocked(const Layer& layer, const Item& item, Scratch& scratch) {
  if (layer.half_int8) {
    BlockedItem<Int8Source>(layer, item, scratch).run();
  } else {
    BlockedItem<TileSource>(layer, item, scratch).run();
  }
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
