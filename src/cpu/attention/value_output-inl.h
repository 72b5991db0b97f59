// Blocked path: values P times values V of a chunk, added to O^T.

#include "cpu/attention/layer.h"
#include "cpu/attention/pair_products-inl.h"
#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_VALUE_OUTPUT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_VALUE_OUTPUT_INL_H
#undef HALFTONE_CPU_VALUE_OUTPUT_INL_H
#else
#define HALFTONE_CPU_VALUE_OUTPUT_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

struct OutputArgs {
  const QuadClass* quads;
  const float* v;  ///< decoded chunk, tiles at tile_floats
  int tile_floats;
  int tiles;
  const float* p;      // [token][rows]
  const float* alpha;  // [rows]
  int rows;
  float* out;  // [v_dim][rows]
};

/// Four dims of O^T, C vectors of rows. kSelect as in pv-inl.h; kBf16: P are values of bf16, and sums may not
/// become subnormal.
template <int C, bool kSelect, bool kBf16>
HWY_INLINE void output_block(const OutputArgs& a, int quad, int column) {
  const F d;
  VF acc[4][C];
  float* out = a.out + a.quads->first_dim[quad] * a.rows + column;
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) {
    acc[i / C][i % C] = hn::Mul(hn::Load(d, out + i / C * a.rows + i % C * kLanes),
                                hn::Load(d, a.alpha + column + i % C * kLanes));
    if constexpr (kBf16) acc[i / C][i % C] = without_traces(acc[i / C][i % C]);
  }
  const std::ptrdiff_t dim1 = a.quads->dim[1], dim2 = a.quads->dim[2], dim3 = a.quads->dim[3];
  const float* p = a.p + column;
  for (int tile = 0; tile < a.tiles; ++tile) {
    const float* base = a.v + tile * a.tile_floats + a.quads->base[quad];
    for (int t = 0; t < kTileTokens; ++t, p += a.rows) {
      const float* at = base + a.quads->token[t];
      VF weight[C];
      HALFTONE_UNROLL
      for (int c = 0; c < C; ++c) weight[c] = hn::Load(d, p + c * kLanes);
      const VF value[4] = {hn::Set(d, at[0]), hn::Set(d, at[dim1]), hn::Set(d, at[dim2]),
                           hn::Set(d, at[dim3])};
      HALFTONE_UNROLL
      for (int i = 0; i < 4 * C; ++i) {
        VF v = value[i / C];
        if constexpr (kSelect) v = hn::IfThenElseZero(hn::Ne(weight[i % C], hn::Zero(d)), v);
        acc[i / C][i % C] = hn::MulAdd(v, weight[i % C], acc[i / C][i % C]);
      }
    }
  }
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) hn::Store(acc[i / C][i % C], d, out + i / C * a.rows + i % C * kLanes);
}

/// All quads of a class for C vectors of rows.
template <int C, bool kSelect, bool kBf16>
HWY_NOINLINE void output_columns(const OutputArgs& a, int column) {
  for (int quad = 0; quad < static_cast<int>(a.quads->base.size()); ++quad) {
    output_block<C, kSelect, kBf16>(a, quad, column);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_VALUE_OUTPUT_INL_H
