// Blocked path: four tokens of K against vectors of rows of Q, whole rows at a time or group by group.

#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_KEY_PRODUCTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_KEY_PRODUCTS_INL_H
#undef HALFTONE_CPU_KEY_PRODUCTS_INL_H
#else
#define HALFTONE_CPU_KEY_PRODUCTS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// A dim of each lane at a time.
struct SingleProducts {
  static constexpr int kDims = 1;
  static HWY_INLINE VF add(VF sum, VF a, VF b) { return hn::MulAdd(a, b, sum); }
};

/// Adds the products of columns [begin, end) to acc [4][C].
template <int C, class Products>
HWY_INLINE void add_columns(const float* k, std::ptrdiff_t k_stride, int begin, int end, const float* q,
                            int rows, VF (&acc)[4][C]) {
  const F d;
  for (int i = begin; i < end; ++i) {
    VF query[C];
    HALFTONE_UNROLL
    for (int c = 0; c < C; ++c) query[c] = hn::Load(d, q + i * rows + c * kLanes);
    HALFTONE_UNROLL
    for (int t = 0; t < 4; ++t) {
      const VF x = hn::Set(d, k[t * k_stride + i]);
      HALFTONE_UNROLL
      for (int c = 0; c < C; ++c) acc[t][c] = Products::add(acc[t][c], x, query[c]);
    }
  }
}

/// Four tokens of decoded K against C vectors of rows, `width` Products.
template <int C, class Products = SingleProducts>
HWY_INLINE void score_block(const float* k, std::ptrdiff_t k_stride, int width, const float* q, int rows,
                            float* scores) {
  const F d;
  VF acc[4][C];
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) acc[i / C][i % C] = hn::Zero(d);
  add_columns<C, Products>(k, k_stride, 0, width, q, rows, acc);
  HALFTONE_UNROLL
  for (int i = 0; i < 4 * C; ++i) hn::Store(acc[i / C][i % C], d, scores + i / C * rows + i % C * kLanes);
}

/// What the sums over the codes of each group are multiplied with.
struct KeyGroups {
  const KMap* map;
  const float* scale;   ///< [token][group]
  const float* min;     ///< likewise, of asymmetric codes
  const float* q_sums;  ///< [group][rows]: what multiplies a min
};

/// The scores of a token after its group `g`, whose sums with codes are `dots`, from those before it. Their
/// order is part of the arithmetic (docs/arithmetic.md).
template <int C, bool kMin>
HWY_INLINE void add_group(const KeyGroups& groups, int t, int g, int rows, const VF (&dots)[C],
                          float* scores) {
  const F d;
  const int at = t * static_cast<int>(groups.map->groups.size()) + g;
  const VF scale = hn::Set(d, groups.scale[at]);
  HALFTONE_UNROLL
  for (int c = 0; c < C; ++c) {
    float* const score = scores + t * rows + c * kLanes;
    VF x = g == 0 ? hn::Mul(dots[c], scale) : hn::MulAdd(dots[c], scale, hn::Load(d, score));
    if constexpr (kMin) {
      x = hn::MulAdd(hn::Load(d, groups.q_sums + g * rows + c * kLanes), hn::Set(d, groups.min[at]), x);
    }
    hn::Store(x, d, score);
  }
}

/// score_block() of codes with a scale, or a scale and a min, per group.
template <int C, class Products, bool kMin>
HWY_INLINE void score_groups(const KeyGroups& groups, const float* k, std::ptrdiff_t k_stride, const float* q,
                             int rows, float* scores) {
  const int count = static_cast<int>(groups.map->groups.size());
  for (int g = 0; g < count; ++g) {
    VF acc[4][C];
    HALFTONE_UNROLL
    for (int i = 0; i < 4 * C; ++i) acc[i / C][i % C] = hn::Zero(F());
    for (const KRange& range : groups.map->groups[g]) {
      const int first = range.first / Products::kDims;
      add_columns<C, Products>(k, k_stride, first, first + range.count / Products::kDims, q, rows, acc);
    }
    HALFTONE_UNROLL
    for (int t = 0; t < 4; ++t) add_group<C, kMin>(groups, t, g, rows, acc[t], scores);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_KEY_PRODUCTS_INL_H
