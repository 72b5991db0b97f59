// Blocked path, Arithmetic::kFullInt8 and kFp8: a block of V as codes of 8 bits with a scale per channel
// (format/value_block.h).
//
// All of a block that counts is decoded and quantised when an item comes to its first chunk there, whatever
// keys the item has: a channel's scale does not depend on how units are cut. Integers become dwords of
// four_tokens() where kernels multiply bytes; else codes are fp32, in the order in which V was decoded.

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/attention/fp8_rows-inl.h"
#include "cpu/attention/int8_rows-inl.h"
#include "cpu/attention/tiles.h"
#include "format/value_block.h"

#if defined(HALFTONE_CPU_VALUE_BLOCK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_VALUE_BLOCK_INL_H
#undef HALFTONE_CPU_VALUE_BLOCK_INL_H
#else
#define HALFTONE_CPU_VALUE_BLOCK_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// Integers; their scales stay in CodeScratch::v_scale.
struct Int8Channels {
  static constexpr bool kBytes = kByteKernels;
  static int8_row::Row channel(std::uint32_t largest) { return value_block::int8_channel(largest); }
  static HWY_INLINE VF value(VF x, VF inverse, VF /*scale*/) {
    const VF code = hn::Round(hn::Mul(x, inverse));
    return hn::IfThenZeroElse(hn::Eq(inverse, hn::Zero(F())), code);
  }
};

/// Codes of E4M3 times their scales, which is exact.
struct Fp8Channels {
  static constexpr bool kBytes = false;
  static fp8_row::Row channel(std::uint32_t largest) { return value_block::fp8_channel(largest); }
  static HWY_INLINE VF value(VF x, VF inverse, VF scale) {
    const VF code = round_e4m3(hn::Mul(x, inverse));
    return hn::Mul(hn::IfThenZeroElse(hn::Eq(inverse, hn::Zero(F())), code), scale);
  }
};

class ValueBlock {
 public:
  ValueBlock(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer),
        map_(layer.maps->v),
        s_(scratch.codes),
        kv_len_(item.kv_len),
        first_(static_cast<int>(
            value_block::first_counted(item.kv_len, item.q_len, layer.plan->problem.mask.window_left))) {}

  /// Makes the block of `token` the current one; false if it is already.
  bool begin(int token) {
    const int block = token / value_block::kTokens * value_block::kTokens;
    return std::exchange(block_, block) != block;
  }

  /// Those of its tiles that count, to be decoded to decoded().
  const Chunk& find(const TileFinder& finder) {
    const int begin = std::max(block_, first_ / kTileTokens * kTileTokens);
    finder.find_range(begin, std::min(kv_len_, block_ + value_block::kTokens), chunk_);
    return chunk_;
  }
  float* decoded() const { return s_.v + tile_of(chunk_.begin) * tile_floats(); }

  /// Decoded values become codes.
  template <class Channels>
  void finish() const {
    clear_uncounted();
    measure<Channels>();
#if HWY_TARGET == HWY_AVX3_DL
    if constexpr (Channels::kBytes) {
      pack();
      return;
    }
#endif
    quantize<Channels>();
  }

  /// Codes of the tiles from `token` on, and their first dwords' place.
  const float* at(int token) const { return s_.v + tile_of(token) * tile_floats(); }
  int first_word(int token) const { return tile_of(token) * 4; }

 private:
  int tile_floats() const { return kTileTokens * layer_.v_dim; }
  int tile_of(int token) const { return (token - block_) / kTileTokens; }

  /// Zeros replace what lies behind the last token, before the first counted one, and in bad pages.
  void clear_uncounted() const {
    float* tile = decoded();
    for (int i = 0; i < chunk_.tiles; ++i, tile += tile_floats()) {
      const int token = chunk_.begin + i * kTileTokens;
      if (chunk_.tile[i].excluded) {
        std::fill_n(tile, tile_floats(), 0.0f);
        continue;
      }
      for (int t = 0; t < kTileTokens; ++t) {
        if (token + t < first_ || token + t >= kv_len_) clear_values(layer_.maps->v_quads, t, tile);
      }
    }
  }

  /// Calls use(float*) with every vector of one plane of an accumulator's lanes.
  template <class Use>
  HWY_INLINE void for_vectors(const VClass& cls, int accumulator, int plane, const Use& use) const {
    const bool rows = row_order(layer_.v.element);
    const int steps = rows ? kTileTokens : static_cast<int>(cls.steps.size());
    float* tile = decoded() + (rows ? accumulator * kLanes : map_.base[accumulator]) +
                  plane * (kTileTokens * layer_.v_dim / 2);
    for (int i = 0; i < chunk_.tiles; ++i, tile += tile_floats()) {
      for (int step = 0; step < steps; ++step) {
        use(tile + (rows ? step * layer_.v_dim : cls.steps[step].offset));
      }
    }
  }

  const std::int16_t* dims_of(int accumulator, int plane) const {
    return map_.dims.data() + (accumulator * map_.planes + plane) * kLanes;
  }

  /// Scales of the channels and their inverses.
  template <class Channels>
  void measure() const {
    std::uint32_t largest[kMaxDim] = {};
    for (const VClass& cls : map_.classes) {
      for (int a = cls.first; a < cls.first + cls.count; ++a) {
        for (int plane = 0; plane < map_.planes; ++plane) {
          VI most = hn::Zero(I());
          for_vectors(cls, a, plane, [&](const float* x) HWY_ATTR {
            most = hn::Max(most, magnitude_bits(hn::LoadU(F(), x)));
          });
          HWY_ALIGN std::int32_t lanes[kMaxLanes];
          hn::Store(most, I(), lanes);
          const std::int16_t* dims = dims_of(a, plane);
          for (int lane = 0; lane < kLanes; ++lane) {
            largest[dims[lane]] = std::max(largest[dims[lane]], static_cast<std::uint32_t>(lanes[lane]));
          }
        }
      }
    }
    for (int d = 0; d < layer_.v_dim; ++d) {
      const auto channel = Channels::channel(largest[d]);
      s_.v_scale[d] = channel.scale;
      s_.v_inverse[d] = channel.inverse;
    }
  }

  template <class Channels>
  void quantize() const {
    const F d;
    for (const VClass& cls : map_.classes) {
      for (int a = cls.first; a < cls.first + cls.count; ++a) {
        for (int plane = 0; plane < map_.planes; ++plane) {
          HWY_ALIGN float scales[kMaxLanes], inverses[kMaxLanes];
          for (int lane = 0; lane < kLanes; ++lane) {
            const int dim = dims_of(a, plane)[lane];
            scales[lane] = s_.v_scale[dim];
            inverses[lane] = s_.v_inverse[dim];
          }
          const VF scale = hn::Load(d, scales), inverse = hn::Load(d, inverses);
          for_vectors(cls, a, plane, [&](float* x) HWY_ATTR {
            hn::StoreU(Channels::value(hn::LoadU(d, x), inverse, scale), d, x);
          });
        }
      }
    }
  }

#if HWY_TARGET == HWY_AVX3_DL
  static HWY_INLINE VI code_of(VF x, VF inverse) {
    const VI code = hn::NearestInt(hn::Mul(x, inverse));
    return hn::IfThenZeroElse(hn::RebindMask(I(), hn::Eq(inverse, hn::Zero(F()))), code);
  }

  /// Integers of the block as dwords of four tokens, [four tokens][dim].
  void pack() const {
    std::int32_t* out = s_.v_codes + tile_of(chunk_.begin) * 4 * layer_.v_dim;
    if (row_order(layer_.v.element)) {
      pack_rows(out);
      return;
    }
    for (const QuadClass& quads : layer_.maps->v_quads) {
      if (quads.word[0] >= 0) {
        pack_words(quads, out);
      } else {
        pack_single(quads, out);
      }
    }
  }

  void pack_rows(std::int32_t* out) const {
    const F d;
    const VI byte = hn::Set(I(), 255);
    const float* tile = decoded();
    for (int i = 0; i < chunk_.tiles * 4; ++i, out += layer_.v_dim) {
      if (i > 0 && i % 4 == 0) tile += tile_floats();
      const auto tokens = four_tokens(i % 4);
      for (int dim = 0; dim < layer_.v_dim; dim += kLanes) {
        const VF inverse = hn::Load(d, s_.v_inverse + dim);
        VI codes[4];
        HALFTONE_UNROLL
        for (int t = 0; t < 4; ++t) {
          const VF x = hn::LoadU(d, tile + tokens[t] * layer_.v_dim + dim);
          codes[t] = hn::And(code_of(x, inverse), byte);
        }
        const VI low = hn::Or(codes[0], hn::ShiftLeft<8>(codes[1]));
        const VI high = hn::Or(codes[2], hn::ShiftLeft<8>(codes[3]));
        hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), I(), out + dim);
      }
    }
  }

  /// Where four tokens of four dims lie in two runs of eight values.
  void pack_words(const QuadClass& quads, std::int32_t* out) const {
    const F d;
    const hn::Half<F> half;
    const hn::Rebind<std::int8_t, F> byte;
    const auto order = hn::LoadU(byte, reinterpret_cast<const std::int8_t*>(quads.shuffle.data()));
    const int count = static_cast<int>(quads.base.size());
    HWY_ALIGN float inverses[kMaxDim / 4 * kMaxLanes];  // in the order of the values
    for (int quad = 0; quad < count; ++quad) {
      const float* inverse = s_.v_inverse + quads.first_dim[quad];
      for (int k = 0; k < 16; ++k) inverses[quad * kMaxLanes + quads.shuffle[k]] = inverse[k / 4];
    }
    const float* tile = decoded();
    for (int i = 0; i < chunk_.tiles; ++i, tile += tile_floats(), out += 4 * layer_.v_dim) {
      for (int quad = 0; quad < count; ++quad) {
        const VF inverse = hn::Load(d, inverses + quad * kMaxLanes);
        for (int w = 0; w < 4; ++w) {
          const float* x = tile + quads.base[quad] + quads.word[w];
          const VF values = hn::Combine(d, hn::LoadU(half, x + quads.second), hn::LoadU(half, x));
          const auto codes = hn::TableLookupBytes(hn::DemoteTo(byte, code_of(values, inverse)), order);
          std::int32_t* to = out + w * layer_.v_dim + quads.first_dim[quad];
          hn::StoreU(codes, byte, reinterpret_cast<std::int8_t*>(to));
        }
      }
    }
  }

  void pack_single(const QuadClass& quads, std::int32_t* out) const {
    const float* tiles = decoded();
    for (std::size_t quad = 0; quad < quads.base.size(); ++quad) {
      for (int d = 0; d < 4; ++d) {
        const int dim = quads.first_dim[quad] + d;
        const float inverse = s_.v_inverse[dim];
        const float* x = tiles + quads.base[quad] + quads.dim[d];
        for (int i = 0; i < chunk_.tiles * 4; ++i) {
          const float* tile = x + i / 4 * tile_floats();
          std::uint32_t dword = 0;
          for (int t = 0; t < 4; ++t) {
            const float value = tile[quads.token[four_tokens(i % 4)[t]]];
            const int code = inverse == 0.0f ? 0 : codec::round_to_int(codec::ht_mul(value, inverse));
            dword |= static_cast<std::uint32_t>(code & 255) << (8 * t);
          }
          out[i * layer_.v_dim + dim] = static_cast<std::int32_t>(dword);
        }
      }
    }
  }
#endif  // HWY_TARGET == HWY_AVX3_DL

  const Layer& layer_;
  const VMap& map_;
  CodeScratch& s_;
  const int kv_len_;
  const int first_;  ///< token that counts
  int block_ = -1;   ///< the current one's first token
  Chunk chunk_;      ///< its tiles
};

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_VALUE_BLOCK_INL_H
