// Blocked path, 16 bits: Q and K as values of bf16, on AVX-512 with BF16, where one instruction multiplies
// two dims of each lane.
//
// It is a chain of two fused multiply-adds, the upper half of a dword first, so that dims in their order give
// the bits of SingleProducts. But it makes zeros of subnormal numbers, its sums among them: items with
// numbers so small that a sum may be one are begun again in fp32.

#include <bit>

#include "cpu/attention/blocked-inl.h"
#include "cpu/attention/coded_keys-inl.h"
#include "cpu/attention/pair_products-inl.h"
#include "cpu/attention/tile_source-inl.h"

#if defined(HALFTONE_CPU_KEY_PAIRS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_KEY_PAIRS_INL_H
#undef HALFTONE_CPU_KEY_PAIRS_INL_H
#else
#define HALFTONE_CPU_KEY_PAIRS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

/// Two dims of each lane at a time.
struct PairProducts {
  static constexpr int kDims = 2;
  static HWY_INLINE VF add(VF sum, VF a, VF b) {
    const I di;
    return add_pair_products(sum, hn::BitCast(di, a), hn::BitCast(di, b));
  }
};

/// Whether Q and what a Base makes of K are values of bf16: codes are, of 8 bits or fewer.
inline bool takes_key_pairs(const Layer& layer) {
  static const bool has = has_pair_products();
  return has && layer.bf16_q && (layer.stored_k || layer.grouped_k || layer.k.element == Element::kBF16);
}

/// The tiles of a Base, TileSource, CodedKeys or GroupedKeys, where takes_key_pairs(). Pairs of dims lie in
/// dwords, the first one above.
template <class Base>
class KeyPairs : public Base {
 public:
  static constexpr bool kBytes = true;

  using Base::Base;

  bool refused() const { return refused_; }

  void begin_queries(int rows) const {
    if constexpr (Base::kCodes) Base::begin_queries(rows);
    std::fill_n(this->s_.q, pairs() * rows, 0.0f);
  }

  void take_query(const Strip& strip, int r) {
    if constexpr (Base::kCodes) Base::take_query(strip, r);
    float* q = this->s_.q + strip.first * pairs() + (r - strip.first);
    for (int i = 0; i < pairs(); ++i, q += strip.rows) {
      const std::uint32_t first = query_bits(2 * i), second = query_bits(2 * i + 1);
      refused_ |= too_small(first) || too_small(second);
      *q = std::bit_cast<float>(first | second >> 16);
    }
  }

  void decode_k(float* out) {
    const Chunk& chunk = this->chunk_;
    PairPacker packer;
    if constexpr (Base::kCodes) {
      Base::decode_k(out);
      packer.pack_neighbours(out, chunk.tiles * kTileTokens * Base::width(), out);
    } else {
      for (int t = 0; t < chunk.tiles * kTileTokens; ++t, out += pairs()) {
        const Tile& tile = chunk.tile[t / kTileTokens];
        packer.pack_bf16(tile.k + t % kTileTokens * tile.k_stride, pairs(), out);
      }
    }
    refused_ |= packer.too_small();
  }

  template <int C>
  HWY_INLINE void score_bytes_of(const Strip& strip, int token, int column, float* scores) const {
    if constexpr (Base::kGroups) {
      this->template score_groups_of<C, PairProducts>(strip, token, pairs(), column, scores);
    } else {
      score_block<C, PairProducts>(this->s_.decoded + token * pairs(), pairs(), pairs(),
                                   this->s_.q + strip.first * pairs() + column, strip.rows, scores);
    }
  }

 private:
  int pairs() const { return Base::width() / 2; }
  std::uint32_t query_bits(int column) const {
    const int dim = Base::dim(column);
    return dim < 0 ? 0 : std::bit_cast<std::uint32_t>(this->s_.row[dim]);
  }
  static bool too_small(std::uint32_t x) {
    const std::uint32_t magnitude = x & 0x7fffffffu;
    return magnitude != 0 && magnitude < std::uint32_t{kLeastFactor} << 16;
  }

  bool refused_ = false;  ///< a number below the least factor was met
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_KEY_PAIRS_INL_H
