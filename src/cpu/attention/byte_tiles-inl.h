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

/// Tiles 0 to 3 become sums that begin as `start` has them, of 16 rows each, for every token.
template <int L, int R>
HWY_INLINE void begin_tile_sums(const std::int32_t* start) {
  load_tile<0>(start, 0);
  if constexpr (R == 2) load_tile<1>(start + kLanes, 0);
  if constexpr (L == 2) load_tile<2>(start, 0);
  if constexpr (L == 2 && R == 2) load_tile<3>(start + kLanes, 0);
}

/// Sums of score_bytes() of all rows and `tokens`, as integers, [16 rows][kBlockedTokens][row]; `stride`: a
/// multiple of 64.
inline void score_byte_tiles(const std::uint8_t* k, int stride, const std::int32_t* q,
                             const std::int32_t* start, int rows, int tokens, float* sums) {
  for_tiles(tokens, rows, [&](auto l, auto r, int token, int row) HWY_ATTR {
    constexpr int L = decltype(l)::value, R = decltype(r)::value;
    begin_tile_sums<L, R>(start + row);
    add_products<L, R, TileProducts::kSignedRight>(
        {k + token * stride, stride, kTileBytes, kTileRows * stride},
        {q + row, rows * 4, kTileRows * rows * 4, kTileBytes}, stride / kTileBytes);
    TileSums{sums + row * kBlockedTokens + token * kLanes, kTileRows * kTileBytes,
             kBlockedTokens * kTileBytes}
        .template store<L, R>();
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
