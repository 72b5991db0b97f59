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

void StoreRow(DType dtype, const float* values, int count, void* row) {
  if (dtype == DType::kFloat32) {
    std::memcpy(row, values, static_cast<std::size_t>(count) * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    store_narrow(
        values, count, [](auto x) HWY_ATTR { return f16_bits(x); }, static_cast<std::uint16_t*>(row));
  } else {
    store_narrow(
        values, count, [](auto x) HWY_ATTR { return bf16_bits(x); }, static_cast<std::uint16_t*>(row));
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
