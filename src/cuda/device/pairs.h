// Two values of 16 bits in a word, compared side by side.
#pragma once

#include <cstdint>

namespace halftone::cuda {

/// The larger magnitudes of two pairs of 16 bits, with any sign: NaN where one is, or, else, the other one.
template <bool kBFloat16, bool kNan = true>
__device__ __forceinline__ std::uint32_t larger_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  if constexpr (kBFloat16 && kNan) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kBFloat16) {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kNan) {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

/// The larger values, signs counted: NaN where one is, or, else, the other one.
template <bool kBFloat16, bool kNan = true>
__device__ __forceinline__ std::uint32_t max_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  if constexpr (kBFloat16 && kNan) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kBFloat16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kNan) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}
/// Likewise the smaller ones.
template <bool kBFloat16, bool kNan = true>
__device__ __forceinline__ std::uint32_t min_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  if constexpr (kBFloat16 && kNan) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kBFloat16) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kNan) {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

}  // namespace halftone::cuda
