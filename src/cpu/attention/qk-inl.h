// Direct path: dot products of a few rows of Q with the codes of one K tile, as they lie.

#include "cpu/attention/tiles.h"
#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_QK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_QK_INL_H
#undef HALFTONE_CPU_QK_INL_H
#else
#define HALFTONE_CPU_QK_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// How a token's scales enter. kCodes: not here, `dots` are those of the bare codes. kGroups: they differ
/// between the lanes of a token, so sums are scaled before lanes are added up. kAffine: code * scale + min
/// first; a min that enters through min * sum(q) would cancel against scale * sum(q * code).
enum class QkMode : std::uint8_t { kCodes, kGroups, kAffine };

struct QkArgs {
  const KMap* map;
  const std::uint8_t* data;  ///< K data of the tile
  std::int64_t stride;       ///< row order: bytes from token to token
  const float* q;      // [slice][plane][R][N], in the order of the map; times plane_unit() unless kAffine
  const float* scale;  // [16][groups]; not for kCodes
  const float* min;    // [16][groups]; kAffine
  int groups;
  float* dots;  // [R][kChunkTokens], 16 of each row are written
  Prefetcher* prefetcher;
};

/// Adds the dot products of T tokens over one segment of the map to acc; advances q past it.
template <Element kElement, int R, QkMode kMode, int T>
HWY_INLINE void qk_segment(const QkArgs& a, const KSegment& segment, int token, const float*& q,
                           VF (&acc)[T][R]) {
  constexpr int P = planes_of(kElement);
  const F d;
  VF scale[T][P], min[T];
  if constexpr (kMode == QkMode::kAffine) {
    const auto lane_group = hn::SetTableIndices(d, segment.lane_group.data());
    HALFTONE_UNROLL
    for (int t = 0; t < T; ++t) {
      const int at = (token + t) * a.groups + segment.first_group;
      scale[t][0] = hn::TableLookupLanes(hn::LoadU(d, a.scale + at), lane_group);
      if constexpr (P > 1) scale[t][1] = hn::Mul(scale[t][0], hn::Set(d, plane_unit(1)));
      min[t] = hn::TableLookupLanes(hn::LoadU(d, a.min + at), lane_group);
    }
  }
  for (const KRun& run : segment.runs) {
    const std::int64_t stride = row_order(kElement) ? a.stride : run.stride;
    const std::uint8_t* p = a.data + run.offset + token * stride;
    for (int i = 0; i < run.count; ++i, p += run.step, q += P * R * kLanes) {
      VF query[P][R];
      HALFTONE_UNROLL
      for (int j = 0; j < P * R; ++j) query[j / R][j % R] = hn::LoadU(d, q + j * kLanes);
      HALFTONE_UNROLL
      for (int t = 0; t < T; ++t) {
        VF code[P];
        Decoder<kElement>::load(p + t * stride, code);
        HALFTONE_UNROLL
        for (int plane = 0; plane < P; ++plane) {
          if constexpr (kMode == QkMode::kAffine)
            code[plane] = hn::MulAdd(code[plane], scale[t][plane], min[t]);
          HALFTONE_UNROLL
          for (int r = 0; r < R; ++r) acc[t][r] = hn::MulAdd(code[plane], query[plane][r], acc[t][r]);
        }
      }
    }
  }
}

template <int T, int R>
HWY_INLINE void set_zero(VF (&acc)[T][R]) {
  HALFTONE_UNROLL
  for (int i = 0; i < T * R; ++i) acc[i / R][i % R] = hn::Zero(F());
}

template <Element kElement, int R, QkMode kMode>
HWY_NOINLINE void qk_tile(const QkArgs& a) {
  constexpr int kWish = kAccumulators / R / (kMode == QkMode::kCodes ? 1 : 2);
  constexpr int T = kWish >= 4 ? 4 : kWish >= 2 ? 2 : 1;  // tokens at a time
  const F d;
  HWY_ALIGN float blocks[R][4 * kBlockSums];
  for (int quad = 0; quad < kTileTokens; quad += 4) {
    a.prefetcher->advance();
    VF sums[R][4];
    HALFTONE_UNROLL
    for (int t0 = 0; t0 < 4; t0 += T) {
      const int token = quad + t0;
      VF total[T][R];
      set_zero(total);
      const float* q = a.q;
      for (const KSegment& segment : a.map->segments) {
        if constexpr (kMode == QkMode::kGroups) {
          VF acc[T][R];
          set_zero(acc);
          qk_segment<kElement, R, kMode, T>(a, segment, token, q, acc);
          const auto lane_group = hn::SetTableIndices(d, segment.lane_group.data());
          HALFTONE_UNROLL
          for (int t = 0; t < T; ++t) {
            const float* scales = a.scale + (token + t) * a.groups + segment.first_group;
            const VF scale = hn::TableLookupLanes(hn::LoadU(d, scales), lane_group);
            HALFTONE_UNROLL
            for (int r = 0; r < R; ++r) total[t][r] = hn::MulAdd(acc[t][r], scale, total[t][r]);
          }
        } else {
          qk_segment<kElement, R, kMode, T>(a, segment, token, q, total);
        }
      }
      HALFTONE_UNROLL
      for (int i = 0; i < T * R; ++i) sums[i % R][t0 + i / R] = total[i / R][i % R];
    }
    HALFTONE_UNROLL
    for (int r = 0; r < R; ++r) store_block_sums(sums[r], blocks[r] + quad / 4 * kBlockSums);
  }
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) store_sums(blocks[r], a.dots + r * kChunkTokens);
}

using QkFunction = void (*)(const QkArgs&);

template <Element kElement, QkMode kMode>
QkFunction qk_rows(int rows) {
  return rows == 4   ? qk_tile<kElement, 4, kMode>
         : rows == 2 ? qk_tile<kElement, 2, kMode>
                     : qk_tile<kElement, 1, kMode>;
}

/// `groups`: scales per token.
template <Element kElement>
QkFunction qk_of(int rows, int groups) {
  if constexpr (asymmetric(kElement)) {
    return qk_rows<kElement, QkMode::kAffine>(rows);
  } else {
    if constexpr (!row_order(kElement)) {
      if (groups > 1) return qk_rows<kElement, QkMode::kGroups>(rows);
    }
    return qk_rows<kElement, QkMode::kCodes>(rows);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_QK_INL_H
