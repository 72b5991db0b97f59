// Products of bytes by tiles (AMX), for many rows: the same exact sums as add_byte_products(), 16 x 16 of
// them over 64 bytes by one instruction. Four bytes of each of 16 rows, as that one has them, are a row of a
// right operand; a left one has 64 adjacent bytes of a token, or dim.

#include "cpu/attention/byte_products-inl.h"
#include "cpu/attention/matrix_tiles-inl.h"

#if defined(HALFTONE_CPU_BYTE_TILES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_BYTE_TILES_INL_H
#undef HALFTONE_CPU_BYTE_TILES_INL_H
#else
#define HALFTONE_CPU_BYTE_TILES_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// Rows of an item from which on tiles multiply them: V is turned for all, however few.
inline constexpr int kLeastTiledRows = 32;

#if HWY_TARGET == HWY_AVX3_DL

/// Sums of L x R tiles, [left][right][16][16].
template <int L, int R>
struct ByteTileSums {
  alignas(64) std::int32_t of[L][R][kTileRows * kLanes];

  template <TileProducts kProducts>
  HWY_INLINE void multiply(const TileOperand& a, const TileOperand& b, int steps) {
    zero_tile_sums<L, R>();
    add_products<L, R, kProducts>(a, b, steps);
    TileSums{of, sizeof of[0], sizeof of[0][0]}.template store<L, R>();
  }
};

/// score_bytes() of all rows and `tokens`; `stride`: a multiple of 64.
inline void score_byte_tiles(const std::uint8_t* k, int stride, const std::int32_t* q,
                             const std::int32_t* start, int rows, int tokens, float* scores) {
  for_tiles(tokens, rows, [&](auto l, auto r, int token, int row) HWY_ATTR {
    constexpr int L = decltype(l)::value, R = decltype(r)::value;
    ByteTileSums<L, R> sums;
    sums.template multiply<TileProducts::kSignedRight>(
        {k + token * stride, stride, kTileBytes, kTileRows * stride},
        {q + row, rows * 4, kTileRows * rows * 4, kTileBytes}, stride / kTileBytes);
    for (int i = 0; i < L; ++i) {
      for (int t = 0; t < kTileRows; ++t) {
        float* const to = scores + (token + i * kTileRows + t) * rows + row;
        for (int j = 0; j < R; ++j) {
          const VI sum =
              hn::Add(hn::Load(I(), sums.of[i][j] + t * kLanes), hn::Load(I(), start + row + j * kLanes));
          hn::Store(hn::ConvertTo(F(), sum), F(), to + j * kLanes);
        }
      }
    }
  });
}

/// Dwords of V, [words][dim], as left operands: [dim][16 words], zeros behind the last.
inline void turn_words(const std::int32_t* words, int count, int dims, std::int32_t* out) {
  for (int d = 0; d < dims; d += kTileRows) {
    __m512i x[kTileRows];
    HALFTONE_UNROLL
    for (int word = 0; word < kTileRows; ++word)
      x[word] = word < count ? _mm512_loadu_si512(words + word * dims + d) : _mm512_setzero_si512();
    transpose_dwords(x);
    HALFTONE_UNROLL
    for (int i = 0; i < kTileRows; ++i) _mm512_storeu_si512(out + (d + i) * kTileRows, x[i]);
  }
}

#else

// Never called: no TileScope has tiles.
inline void score_byte_tiles(const std::uint8_t*, int, const std::int32_t*, const std::int32_t*, int, int,
                             float*) {}
inline void turn_words(const std::int32_t*, int, int, std::int32_t*) {}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_BYTE_TILES_INL_H
