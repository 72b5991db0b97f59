// Direct path, K in row order: dot products of a few rows of Q with one tile. Lanes are dims.

#include "cpu/tiles.h"
#include "cpu/vec-inl.h"

#if defined(HALFTONE_CPU_QK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_QK_INL_H
#undef HALFTONE_CPU_QK_INL_H
#else
#define HALFTONE_CPU_QK_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

struct RowArgs {
  const std::uint8_t* data;  ///< first token
  std::int64_t stride;       ///< bytes from token to token
  int slices;                ///< vectors per row
  const float* q;            // [slice][R][N]
  float* dots;               // [R][kChunkTokens], 16 of each row are written
  Prefetcher* prefetcher;
};

template <Element kElement, int R>
HWY_NOINLINE void qk_rows(const RowArgs& a) {
  constexpr int kWish = kAccumulators / R;
  constexpr int T = kWish > 4 ? 4 : kWish;  // tokens at a time
  const F d;
  HWY_ALIGN float blocks[R][4 * kBlockSums];
  for (int quad = 0; quad < kTileTokens; quad += 4) {
    a.prefetcher->advance();
    VF sums[R][4];
    HALFTONE_UNROLL
    for (int t0 = 0; t0 < 4; t0 += T) {
      VF acc[T][R];
      HALFTONE_UNROLL
      for (int i = 0; i < T * R; ++i) acc[i / R][i % R] = hn::Zero(d);
      const std::uint8_t* p = a.data + (quad + t0) * a.stride;
      const float* q = a.q;
      for (int s = 0; s < a.slices; ++s, q += R * kLanes, p += kLanes * unit_bytes(kElement)) {
        VF query[R];
        HALFTONE_UNROLL
        for (int r = 0; r < R; ++r) query[r] = hn::LoadU(d, q + r * kLanes);
        HALFTONE_UNROLL
        for (int t = 0; t < T; ++t) {
          VF x;
          Decoder<kElement>::load(p + t * a.stride, &x);
          HALFTONE_UNROLL
          for (int r = 0; r < R; ++r) acc[t][r] = hn::MulAdd(x, query[r], acc[t][r]);
        }
      }
      HALFTONE_UNROLL
      for (int i = 0; i < T * R; ++i) sums[i % R][t0 + i / R] = acc[i / R][i % R];
    }
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) store_block_sums(sums[r], blocks[r] + quad / 4 * kBlockSums);
  }
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) store_sums(blocks[r], a.dots + r * kChunkTokens);
}

using RowFunction = void (*)(const RowArgs&);

template <Element kElement>
RowFunction qk_rows_of(int rows) {
  return rows == 4 ? qk_rows<kElement, 4> : rows == 2 ? qk_rows<kElement, 2> : qk_rows<kElement, 1>;
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_QK_INL_H
