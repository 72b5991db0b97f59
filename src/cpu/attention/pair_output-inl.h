// Blocked path on AVX-512 with BF16: packing values to pairs; and Arithmetic::kHalfInt8 with V in bf16, pairs
// of tokens of P and V, the first one in the upper half of a dword, so that sums take tokens in their order:
// the bits of fp32.

#include "cpu/attention/pair_products-inl.h"
#include "cpu/attention/value_output-inl.h"

#if defined(HALFTONE_CPU_PAIR_OUTPUT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_PAIR_OUTPUT_INL_H
#undef HALFTONE_CPU_PAIR_OUTPUT_INL_H
#else
#define HALFTONE_CPU_PAIR_OUTPUT_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

/// Packs values that are those of bf16, and finds out whether pair products may take them.
class PairPacker {
 public:
  // Written out: compilers give a constructor of their own no instruction set.
  HWY_INLINE PairPacker() {}

  /// A tile in row order.
  void pack_rows(const float* x, int dim, float* out) {
    for (int t = 0; t < kTileTokens; t += 2, x += 2 * dim, out += dim) {
      for (int d = 0; d < dim; d += kLanes) {
        const __m512i first = _mm512_loadu_si512(x + d), second = _mm512_loadu_si512(x + dim + d);
        // The upper halves of both.
        store(_mm512_mask_blend_epi16(kUpper, _mm512_srli_epi32(second, 16), first), out + d);
      }
    }
  }

  /// A tile in the order of packed codes (LayerMaps::v_pairs).
  void pack_blocks(const float* x, const std::vector<std::uint8_t>& pairs, float* out) {
    const __m512i near = order(1), far = order(2);
    for (const std::uint8_t distance : pairs) {
      const __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + kLanes);
      store(_mm512_permutex2var_epi16(low, distance == 1 ? near : far, high), out);
      x += 2 * kLanes;
      out += kLanes;
    }
  }

  /// Values of which 2 i and 2 i + 1 are pairs, a multiple of 32; `out` may be `x`.
  void pack_neighbours(const float* x, int count, float* out) {
    const __m512i near = order(1);
    for (int i = 0; i < count; i += 2 * kLanes) {
      const __m512i low = _mm512_loadu_si512(x + i), high = _mm512_loadu_si512(x + i + kLanes);
      store(_mm512_permutex2var_epi16(low, near, high), out + i / 2);
    }
  }

  /// A row of `pairs` pairs that are bf16 already. Writes whole vectors.
  void pack_bf16(const std::uint8_t* row, int pairs, float* out) {
    for (int i = 0; i < pairs; i += kLanes) {
      const __mmask16 mask = hn::FirstN(I(), static_cast<std::size_t>(pairs - i)).raw;
      store(_mm512_rol_epi32(_mm512_maskz_loadu_epi32(mask, row + i * 4), 16), out + i);
    }
  }

  /// Whether one is so small that a sum might be subnormal.
  bool too_small() const { return check_.too_small(); }

  /// Whether all are finite and none too_small().
  bool fit() const { return !too_small() && check_.finite(); }

 private:
  static constexpr __mmask32 kUpper = 0xaaaaaaaa;

  /// Which words of 32 values make dwords of pairs whose tokens lie `distance` apart.
  static __m512i order(int distance) {
    alignas(64) std::uint16_t words[32];
    for (int i = 0; i < 16; ++i) {
      const int first = i / distance * 2 * distance + i % distance;
      words[2 * i + 1] = static_cast<std::uint16_t>(2 * first + 1);
      words[2 * i] = static_cast<std::uint16_t>(2 * (first + distance) + 1);
    }
    return _mm512_load_si512(words);
  }

  HWY_INLINE void store(__m512i pairs, float* out) {
    check_.add(pairs);
    _mm512_storeu_ps(out, _mm512_castsi512_ps(pairs));
  }

  OperandCheck check_;
};

/// output_columns() of pairs: V and P are dwords of two tokens, in half as many places.
template <int C>
HWY_NOINLINE void output_pairs(const OutputArgs& a, int column) {
  const F d;
  const I di;
  std::ptrdiff_t pair[kTileTokens / 2];
  for (int i = 0; i < kTileTokens / 2; ++i) pair[i] = a.quads->pair_at(a.quads->token[2 * i]);
  const std::ptrdiff_t dim1 = a.quads->pair_at(a.quads->dim[1]), dim2 = a.quads->pair_at(a.quads->dim[2]),
                       dim3 = a.quads->pair_at(a.quads->dim[3]);
  for (std::size_t quad = 0; quad < a.quads->base.size(); ++quad) {
    VF acc[4][C];
    float* out = a.out + a.quads->first_dim[quad] * a.rows + column;
    HALFTONE_UNROLL
    for (int i = 0; i < 4 * C; ++i) {
      acc[i / C][i % C] = without_traces(hn::Mul(hn::Load(d, out + i / C * a.rows + i % C * kLanes),
                                                 hn::Load(d, a.alpha + column + i % C * kLanes)));
    }
    const float* base = a.v + a.quads->pair_at(a.quads->base[quad]);
    const float* p = a.p + column;
    for (int tile = 0; tile < a.tiles; ++tile, base += a.tile_floats) {
      for (int t = 0; t < kTileTokens / 2; ++t, p += a.rows) {
        const float* at = base + pair[t];
        VI weight[C];
        HALFTONE_UNROLL
        for (int c = 0; c < C; ++c) weight[c] = hn::BitCast(di, hn::Load(d, p + c * kLanes));
        const VF value[4] = {hn::Set(d, at[0]), hn::Set(d, at[dim1]), hn::Set(d, at[dim2]),
                             hn::Set(d, at[dim3])};
        HALFTONE_UNROLL
        for (int i = 0; i < 4 * C; ++i) {
          acc[i / C][i % C] =
              add_pair_products(acc[i / C][i % C], weight[i % C], hn::BitCast(di, value[i / C]));
        }
      }
    }
    HALFTONE_UNROLL
    for (int i = 0; i < 4 * C; ++i) hn::Store(acc[i / C][i % C], d, out + i / C * a.rows + i % C * kLanes);
  }
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_PAIR_OUTPUT_INL_H
