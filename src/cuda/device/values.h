// A few adjacent f32, f16 or bf16 elements of a tensor, to and from fp32 registers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/ptx.h"
#include "format/codec.h"
#include "halftone/types.h"

namespace halftone::cuda {

/// Elements that vector accesses take: 16 bytes of a 16-bit type, twice 16 bytes of f32.
inline constexpr int kVector = 8;

/// One of the two 16-bit elements of a word.
__device__ __forceinline__ float half_of(std::uint32_t word, bool high, bool bf16) {
  if (bf16) return __uint_as_float(high ? word & 0xffff0000u : word << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? word >> 16 : word & 0xffffu)));
}

__device__ __forceinline__ float load_value(DType type, const void* base, std::int64_t at) {
  if (type == DType::kFloat32) return __ldg(static_cast<const float*>(base) + at);
  const unsigned short half = __ldg(static_cast<const unsigned short*>(base) + at);
  return type == DType::kBFloat16 ? codec::f32_from_bf16(half) : __half2float(__ushort_as_half(half));
}

__device__ __forceinline__ void store_value(DType type, void* base, std::int64_t at, float x) {
  if (type == DType::kFloat32) {
    static_cast<float*>(base)[at] = x;
  } else {
    static_cast<std::uint16_t*>(base)[at] =
        type == DType::kBFloat16 ? codec::bf16_from_f32(x) : codec::f16_from_f32(x);
  }
}

/// The elements from `at` on, which is a multiple of 16 bytes if there are kVector of them.
template <int kCount>
__device__ __forceinline__ void load_values(DType type, const void* base, std::int64_t at,
                                            float (&x)[kCount]) {
  static_assert(kCount == 1 || kCount == kVector);
  if constexpr (kCount == 1) {
    x[0] = load_value(type, base, at);
  } else if (type == DType::kFloat32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
    const float4 low = __ldg(from), high = __ldg(from + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(base) + at));
    const std::uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      if (type == DType::kBFloat16) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }
}

/// Two values of bf16 or f16, rounded to nearest even.
__device__ __forceinline__ std::uint32_t pack_16bit(DType type, float low, float high) {
  return type == DType::kBFloat16 ? pack_bf16x2(low, high) : pack_f16x2(low, high);
}

/// Rounds to nearest even.
template <int kCount>
__device__ __forceinline__ void store_values(DType type, void* base, std::int64_t at,
                                             const float (&x)[kCount]) {
  static_assert(kCount == 1 || kCount == kVector);
  if constexpr (kCount == 1) {
    store_value(type, base, at, x[0]);
  } else if (type == DType::kFloat32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(base) + at);
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
  } else {
    std::uint32_t words[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      words[i] = pack_16bit(type, x[2 * i], x[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(base) + at) = {words[0], words[1], words[2],
                                                                         words[3]};
  }
}

}  // namespace halftone::cuda
