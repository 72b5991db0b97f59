#include "cpu/element.h"

#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/element.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/rounding-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Stores values [i, count) in 16 bits, as `bits_of` has them, as far as there are whole vectors of `D`.
/// Returns the first one that is left.
template <class D, class BitsOf>
HWY_INLINE int store_vectors(D d, const float* values, int i, int count, const BitsOf& bits_of,
                             std::uint16_t* out) {
  const hn::Rebind<std::uint16_t, D> half;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (; i + lanes <= count; i += lanes)
    hn::StoreU(hn::DemoteTo(half, bits_of(hn::LoadU(d, values + i))), half, out + i);
  return i;
}

template <class BitsOf>
HWY_INLINE void store_halves(const float* values, int count, const BitsOf& bits_of, void* row) {
  auto* const out = static_cast<std::uint16_t*>(row);
  const int stored = store_vectors(hn::ScalableTag<float>(), values, 0, count, bits_of, out);
  store_vectors(hn::CappedTag<float, 1>(), values, stored, count, bits_of, out);
}

void StoreRow(DType dtype, const float* values, int count, void* row) {
  if (dtype == DType::kFloat32) {
    std::memcpy(row, values, static_cast<std::size_t>(count) * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    store_halves(
        values, count, [](auto x) HWY_ATTR { return f16_bits(x); }, row);
  } else {
    store_halves(
        values, count, [](auto x) HWY_ATTR { return bf16_bits(x); }, row);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halftone::cpu {

HWY_EXPORT(StoreRow);

void store_row(DType dtype, const float* values, int count, void* row) {
  HWY_DYNAMIC_DISPATCH(StoreRow)(dtype, values, count, row);
}

}  // namespace halftone::cpu
#endif  // HWY_ONCE
