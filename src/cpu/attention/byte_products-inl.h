// The instruction that multiplies bytes: AVX-512 with VNNI.

#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_BYTE_PRODUCTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_BYTE_PRODUCTS_INL_H
#undef HALFTONE_CPU_BYTE_PRODUCTS_INL_H
#else
#define HALFTONE_CPU_BYTE_PRODUCTS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

inline constexpr bool kByteKernels = HWY_TARGET == HWY_AVX3_DL;

#if HWY_TARGET == HWY_AVX3_DL

/// Adds to each lane of `sum` four products of an unsigned and a signed byte. In assembly because
/// Highway 1.0's attributes for this target leave avx512vnni out, although it asks the processor for it.
HWY_INLINE VI add_byte_products(VI sum, VI unsigned_bytes, VI signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(unsigned_bytes.raw), "v"(signed_bytes.raw));
  return sum;
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_BYTE_PRODUCTS_INL_H
