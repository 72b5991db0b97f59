// Blocked path: Q and K in bf16 as they are, on AVX-512 with BF16, where one instruction multiplies two dims
// of each lane.
//
// It is a chain of two fused multiply-adds, the upper half of a dword first, so that dims in their order give
// the bits of SingleProducts. But it makes zeros of subnormal numbers, its sums among them: items with
// numbers so small that a sum may be one are begun again in fp32.

#include <bit>
#include <cstring>

#include "cpu/attention/blocked-inl.h"
#include "cpu/attention/pair_products-inl.h"
#include "cpu/attention/tile_source-inl.h"

#if defined(HALFTONE_CPU_BF16_PAIRS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_BF16_PAIRS_INL_H
#undef HALFTONE_CPU_BF16_PAIRS_INL_H
#else
#define HALFTONE_CPU_BF16_PAIRS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

/// Two dims of each lane at a time.
struct PairProducts {
  static HWY_INLINE VF add(VF sum, VF a, VF b) {
    const I di;
    return add_pair_products(sum, hn::BitCast(di, a), hn::BitCast(di, b));
  }
};

/// Tiles whose K is bf16, for rows of Q that are. Pairs of dims lie in dwords, the first one above.
class PairSource : public TileSource {
 public:
  static constexpr bool kBytes = true;

  using TileSource::TileSource;

  static bool serves(const Layer& layer) {
    static const bool has = has_pair_products();
    return has && layer.k.element == Element::kBF16 && layer.args->q.dtype == DType::kBFloat16 &&
           !layer.rotate_k && layer.channels.scale == nullptr;
  }

  bool refused() const { return refused_; }

  void begin_queries(int rows) const { std::fill_n(s_.q, pairs() * rows, 0.0f); }

  void take_query(const Strip& strip, int r) {
    float* q = s_.q + strip.first * pairs() + (r - strip.first);
    for (int i = 0; i < pairs(); ++i, q += strip.rows) {
      const auto first = std::bit_cast<std::uint32_t>(s_.row[2 * i]),
                 second = std::bit_cast<std::uint32_t>(s_.row[2 * i + 1]);
      refused_ |= too_small(first) || too_small(second);
      *q = std::bit_cast<float>(first | second >> 16);
    }
  }

  void decode_k(float* out) {
    const I di;
    const VI zero = hn::Zero(di);
    auto small = hn::Ne(zero, zero);
    for (int i = 0; i < chunk_.tiles; ++i) {
      const Tile& tile = chunk_.tile[i];
      for (int t = 0; t < kTileTokens; ++t, out += pairs()) {
        const std::uint8_t* row = tile.k + t * tile.k_stride;
        for (int at = 0; at < pairs(); at += kLanes) {
          // head_dim 80 ends in the middle of a vector.
          const auto mask = hn::FirstN(di, static_cast<std::size_t>(pairs() - at));
          const VI x{_mm512_maskz_loadu_epi32(mask.raw, row + at * 4)};
          const auto below = [&](std::int32_t magnitude, std::int32_t least) HWY_ATTR {
            const VI half = hn::And(x, hn::Set(di, magnitude));
            return hn::And(hn::Ne(half, zero), hn::Lt(half, hn::Set(di, least)));
          };
          small = hn::Or(small, below(0x7fff0000, kLeastFactor << 16));
          small = hn::Or(small, below(0x7fff, kLeastFactor));
          _mm512_mask_storeu_ps(out + at, mask.raw, _mm512_castsi512_ps(_mm512_rol_epi32(x.raw, 16)));
        }
      }
    }
    refused_ |= !hn::AllFalse(di, small);
  }

  template <int C>
  HWY_INLINE void score_bytes_of(const Strip& strip, int token, int column, float* scores) const {
    score_block<C, PairProducts>(s_.decoded + token * pairs(), pairs(), pairs(),
                                 s_.q + strip.first * pairs() + column, strip.rows, scores);
  }

 private:
  int pairs() const { return layer_.head_dim / 2; }
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

#endif  // HALFTONE_CPU_BF16_PAIRS_INL_H
