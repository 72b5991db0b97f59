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
  const std::int32_t* p_words;  // or [16 rows][kWeightWords][row], of four tokens each
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

/// Four weights of 0 to 255 each, to integers, as bytes.
HWY_INLINE VI code_word(const VF (&weight)[4]) {
  VI code[4];
  HALFTONE_UNROLL
  for (int t = 0; t < 4; ++t) code[t] = VI{_mm512_cvtps_epi32(weight[t].raw)};
  const VI low = hn::Or(code[0], hn::ShiftLeft<8>(code[1])),
           high = hn::Or(code[2], hn::ShiftLeft<8>(code[3]));
  return hn::Or(low, hn::ShiftLeft<16>(high));
}

/// All dims for C vectors of rows.
template <int C>
HWY_NOINLINE void output_codes(const CodeOutputArgs& a, int column) {
  const F d;
  const I di;
  for (int dim = 0; dim < a.v_dim; dim += 4) {
    VI acc[4][C];
    HALFTONE_UNROLL
    for (int i = 0; i < 4 * C; ++i) acc[i / C][i % C] = hn::Zero(di);
    const std::int32_t* p = a.p_words + column * kWeightWords;
    const std::int32_t* v = a.v_words + dim;
    for (int word = 0; word < a.tiles * 4; ++word, p += kLanes, v += a.v_dim) {
      VI weight[C];
      HALFTONE_UNROLL
      for (int c = 0; c < C; ++c) weight[c] = hn::Load(di, p + c * kWeightWords * kLanes);
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

/// The same by tiles, of R x 16 rows, whose P stays in tiles 6 and 7. Sums in tile 0 + 2 kSet and 1 + 2 kSet.
template <int R, int kSet>
HWY_INLINE void sum_code_tiles(const std::int32_t* v, std::int32_t* sums) {
  load_tile<4>(v, kTileBytes);
  zero_tile<2 * kSet>();
  multiply_tiles<2 * kSet, 4, 6, TileProducts::kSignedLeft>();
  store_tile<2 * kSet>(sums, kTileBytes);
  if constexpr (R == 2) {
    zero_tile<2 * kSet + 1>();
    multiply_tiles<2 * kSet + 1, 4, 7, TileProducts::kSignedLeft>();
    store_tile<2 * kSet + 1>(sums + kTileRows * kLanes, kTileBytes);
  }
}

/// add_scaled() of 16 dims. kKeeps: alpha is 1.
template <int R, bool kKeeps>
HWY_INLINE void add_tile_sums(const CodeOutputArgs& a, int dim, int row, const std::int32_t* sums) {
  const F d;
  VF factor[R], alpha[R];
  __mmask16 weighs[R];
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) {
    factor[r] = hn::Load(d, a.factor + row + r * kLanes);
    alpha[r] = hn::Load(d, a.alpha + row + r * kLanes);
    weighs[r] = hn::Ne(factor[r], hn::Zero(d)).raw;
  }
  HALFTONE_UNROLL
  for (int i = 0; i < kTileRows * R; ++i) {
    const int r = i % R;
    float* const at = a.out + (dim + i / R) * a.rows + row + r * kLanes;
    const VF sum = hn::ConvertTo(d, hn::Load(I(), sums + (r * kTileRows + i / R) * kLanes));
    const VF x{_mm512_maskz_mul_ps(weighs[r], sum.raw, _mm512_set1_ps(a.scale[dim + i / R]))};
    const VF before = hn::Load(d, at);
    hn::Store(hn::MulAdd(x, factor[r], kKeeps ? before : hn::Mul(before, alpha[r])), d, at);
  }
}

template <int R, bool kKeeps>
HWY_NOINLINE void output_code_rows(const CodeOutputArgs& a, int row) {
  alignas(64) std::int32_t sums[2][R * kTileRows * kLanes];
  const std::int32_t* const p = a.p_words + row * kWeightWords;
  load_tile<6>(p, kTileBytes);
  if constexpr (R == 2) load_tile<7>(p + kWeightWords * kLanes, kTileBytes);
  const auto multiply = [&](int dim) HWY_ATTR {
    const std::int32_t* const v = a.v_turned + dim * kTileRows;
    if (dim / kTileRows % 2 == 0) {
      sum_code_tiles<R, 0>(v, sums[0]);
    } else {
      sum_code_tiles<R, 1>(v, sums[1]);
    }
  };
  // The next dims are on their way while these are added: what a tile has stored cannot be read at once.
  multiply(0);
  for (int dim = 0; dim < a.v_dim; dim += kTileRows) {
    if (dim + kTileRows < a.v_dim) multiply(dim + kTileRows);
    add_tile_sums<R, kKeeps>(a, dim, row, sums[dim / kTileRows % 2]);
  }
}

/// The same of all rows.
inline void output_code_tiles(const CodeOutputArgs& a) {
  const F d;
  const auto keeps = [&](int row) HWY_ATTR {
    return hn::AllTrue(d, hn::Eq(hn::Load(d, a.alpha + row), hn::Set(d, 1.0f)));
  };
  for (int row = 0; row < a.rows; row += 2 * kLanes) {
    const bool pair = row + kLanes < a.rows, same = keeps(row) && (!pair || keeps(row + kLanes));
    const auto output = pair ? (same ? output_code_rows<2, true> : output_code_rows<2, false>)
                             : (same ? output_code_rows<1, true> : output_code_rows<1, false>);
    output(a, row);
  }
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
