// Scales and integers of a block of records in shared memory.
#pragma once

#include "cuda/device/fragments.h"
#include "cuda/latent/few/traits.h"

namespace halftone::cuda {

/// What integers are multiplied with after they were taken for f16: bytes and nibbles are denormals of it.
inline constexpr float kIntegerUnit = 0x1p24f;
inline constexpr int kIntegerUnitLog2 = 24;

/// Bytes 0 and 2 of a word of int8 codes, plus 128.
__device__ inline std::uint32_t even_codes(std::uint32_t word) { return even_bytes(word, 0x00800080u); }

/// The scale of a token for a group of dims. `scales`: of a stage.
template <LatentFewConfig C>
__device__ inline float few_scale(const std::uint8_t* scales, int group, unsigned token) {
  using Traits = LatentFewTraits<C>;
  const std::uint8_t* const own = scales + token * Traits::kScalePitch;
  if constexpr (Traits::kApart) return codec::f32_from_e8m0(own[group]);
  if constexpr (Traits::kInteger) {
    return __half2float(__ushort_as_half(reinterpret_cast<const std::uint16_t*>(own)[group]));
  }
  return reinterpret_cast<const float*>(own)[group];
}

/// The min of a token for a group of dims, in f16.
template <LatentFewConfig C>
__device__ inline std::uint16_t few_min(const std::uint8_t* scales, int group, unsigned token) {
  using Traits = LatentFewTraits<C>;
  return reinterpret_cast<const std::uint16_t*>(scales +
                                                token * Traits::kScalePitch)[Traits::kGroups + group];
}

/// What a code of 0, as integers are stored, stands for.
template <LatentFewConfig C>
__device__ inline float few_offset(const std::uint8_t* scales, int group, unsigned token) {
  if constexpr (LatentFewTraits<C>::kBits == 8) return -128.0f * few_scale<C>(scales, group, token);
  return __half2float(__ushort_as_half(few_min<C>(scales, group, token)));
}

}  // namespace halftone::cuda
