// The block Hadamard rotation of a row, in vectors: the bits of hadamard::rotate().

#include "cpu/attention/vec-inl.h"
#include "format/hadamard.h"

#if defined(HALFTONE_CPU_ROTATION_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_ROTATION_INL_H
#undef HALFTONE_CPU_ROTATION_INL_H
#else
#define HALFTONE_CPU_ROTATION_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// A stage within a vector: (a + b, a - b) of the lanes that are kHalf apart. a - b is a + (-b).
template <int kHalf>
HWY_INLINE VF rotation_stage(VF x) {
  const F d;
  const VI lane = hn::Iota(I(), 0), half = hn::Set(I(), kHalf);
  const VF other = hn::TableLookupLanes(x, hn::IndicesFromVec(d, hn::Xor(lane, half)));
  const auto upper = hn::RebindMask(d, hn::Eq(hn::And(lane, half), half));
  return hn::Add(other, hn::IfThenElse(upper, hn::Neg(x), x));
}

/// The stages of a rotation of `x` [dim] in place, without its factor; the block has whole vectors.
HWY_INLINE void rotate_stages(float* x, int dim) {
  const F d;
  const int block = hadamard::block_size(dim);
  for (int i = 0; i < dim; i += kLanes) {
    VF v = hn::LoadU(d, x + i);
    if constexpr (kLanes > 1) v = rotation_stage<1>(v);
    if constexpr (kLanes > 2) v = rotation_stage<2>(v);
    if constexpr (kLanes > 4) v = rotation_stage<4>(v);
    if constexpr (kLanes > 8) v = rotation_stage<8>(v);
    hn::StoreU(v, d, x + i);
  }
  for (int h = kLanes; h < block; h *= 2) {
    for (int start = 0; start < dim; start += 2 * h) {
      for (int i = start; i < start + h; i += kLanes) {
        const VF a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + h);
        hn::StoreU(hn::Add(a, b), d, x + i);
        hn::StoreU(hn::Sub(a, b), d, x + i + h);
      }
    }
  }
}

/// `x` [dim] in place.
HWY_INLINE void rotate_row(float* x, int dim) {
  const F d;
  rotate_stages(x, dim);
  const VF factor = hn::Set(d, hadamard::factor(hadamard::block_size(dim)));
  for (int i = 0; i < dim; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), factor), d, x + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_ROTATION_INL_H
