// Blocked path, Arithmetic::kFullInt8: integers P times integers V of a chunk, added to O^T.
//
// Sums of up to 64 products of 255 and 127 stay below 2^24, so that they are exact in fp32 as well as in the
// byte products of AVX-512 with VNNI: the same bits.

#include "cpu/attention/byte_tiles-inl.h"
#include "cpu/attention/layer.h"
#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_CODE_OUTPUT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_CODE_OUTPUT_INL_H
#undef HALFTONE_CPU_CODE_OUTPUT_INL_H
#else
#define HALFTONE_CPU_CODE_OUTPUT_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// The largest code of P: e^0.
inline constexpr float kWeightLevels = 255.0f;

struct CodeOutputArgs {
  const std::vector<QuadClass>* quads;
  const float* v;                ///< codes of the chunk, tiles at 16 * v_dim
  const std::int32_t* v_words;   ///< or dwords of them, [four tokens][v_dim]
  const std::int32_t* v_turned;  ///< or, of 16 such, [v_dim][four tokens]; null: not so
  int v_dim;
  int tiles;
  const float* p;               // [token][rows]
  const std::int32_t* p_words;  // or [four tokens][rows]
  const float* alpha;           // [rows]
  const float* factor;          // [rows]
  const float* scale;           // [v_dim]
  int rows;
  float* out;  // [v_dim][rows]
};

/// O = O * alpha + (sum * scale) * factor. Rows whose factor is 0 see nothing of the chunk, whatever its
/// scales are.
template <int C>
HWY_INLINE void add_scaled(const CodeOutputArgs& a, int dim, int column, const VF (&sum)[4][C]) {
  const F d;
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) {
    const int row = column + i % C * kLanes;
    float* at = a.out + (dim + i / C) * a.rows + row;
    const VF factor = hn::Load(d, a.factor + row);
    VF x = hn::Mul(sum[i / C][i % C], hn::Set(d, a.scale[dim + i / C]));
    x = hn::IfThenElseZero(hn::Ne(factor, hn::Zero(d)), x);
    hn::Store(hn::MulAdd(x, factor, hn::Mul(hn::Load(d, at), hn::Load(d, a.alpha + row))), d, at);
  }
}

#if HWY_TARGET == HWY_AVX3_DL

/// All dims for C vectors of rows.
template <int C>
HWY_NOINLINE void output_codes(const CodeOutputArgs& a, int column) {
  const F d;
  const I di;
  for (int dim = 0; dim < a.v_dim; dim += 4) {
    VI acc[4][C];
    HALFTONE_UNROLL
    for (int i = 0; i < 4 * C; ++i) acc[i / C][i % C] = hn::Zero(di);
    const std::int32_t* p = a.p_words + column;
    const std::int32_t* v = a.v_words + dim;
    for (int word = 0; word < a.tiles * 4; ++word, p += a.rows, v += a.v_dim) {
      VI weight[C];
      HALFTONE_UNROLL
      for (int c = 0; c < C; ++c) weight[c] = hn::Load(di, p + c * kLanes);
      HALFTONE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const VI value = hn::Set(di, v[i]);
        HALFTONE_UNROLL
        for (int c = 0; c < C; ++c) acc[i][c] = add_byte_products(acc[i][c], weight[c], value);
      }
    }
    VF sum[4][C];
    HALFTONE_UNROLL
    for (int i = 0; i < 4 * C; ++i) sum[i / C][i % C] = hn::ConvertTo(d, acc[i / C][i % C]);
    add_scaled<C>(a, dim, column, sum);
  }
}

/// The same of all rows, by tiles.
inline void output_code_tiles(const CodeOutputArgs& a) {
  for_tiles(a.v_dim, a.rows, [&](auto l, auto r, int first, int row) HWY_ATTR {
    constexpr int L = decltype(l)::value, R = decltype(r)::value;
    ByteTileSums<L, R> sums;
    sums.template multiply<TileProducts::kSignedLeft>(
        {a.v_turned + first * kTileRows, kTileBytes, 0, kTileRows * kTileBytes},
        {a.p_words + row, a.rows * 4, 0, kTileBytes}, 1);
    for (int dim = 0; dim < L * kTileRows; dim += 4) {
      VF sum[4][R];
      HALFTONE_UNROLL
      for (int i = 0; i < 4 * R; ++i) {
        const std::int32_t* const tile = sums.of[dim / kTileRows][i % R];
        sum[i / R][i % R] = hn::ConvertTo(F(), hn::Load(I(), tile + (dim % kTileRows + i / R) * kLanes));
      }
      add_scaled<R>(a, first + dim, row, sum);
    }
  });
}

#else

inline void output_code_tiles(const CodeOutputArgs&) {}  // never called: no TileScope has tiles

template <int C>
HWY_NOINLINE void output_codes(const CodeOutputArgs& a, int column) {
  const F d;
  for (const QuadClass& quads : *a.quads) {
    for (std::size_t quad = 0; quad < quads.base.size(); ++quad) {
      VF sum[4][C];
      HALFTONE_UNROLL
      for (int i = 0; i < 4 * C; ++i) sum[i / C][i % C] = hn::Zero(d);
      const float* p = a.p + column;
      for (int tile = 0; tile < a.tiles; ++tile) {
        const float* base = a.v + tile * kTileTokens * a.v_dim + quads.base[quad];
        for (int t = 0; t < kTileTokens; ++t, p += a.rows) {
          VF weight[C];
          HALFTONE_UNROLL
          for (int c = 0; c < C; ++c) weight[c] = hn::Load(d, p + c * kLanes);
          HALFTONE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const VF value = hn::Set(d, base[quads.token[t] + quads.dim[i]]);
            HALFTONE_UNROLL
            for (int c = 0; c < C; ++c) sum[i][c] = hn::MulAdd(value, weight[c], sum[i][c]);
          }
        }
      }
      add_scaled<C>(a, quads.first_dim[quad], column, sum);
    }
  }
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_CODE_OUTPUT_INL_H
