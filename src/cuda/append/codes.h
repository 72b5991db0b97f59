// From a chunk's values to its codes, in registers.
#pragma once

#include "cuda/device/lanes.h"
#include "cuda/device/ptx.h"
#include "format/codec.h"

namespace halftone::cuda {

/// The codes of a chunk, packed in the order of dims: 4, 2 or 1 words. `kF16`: scales are computed ones in
/// f16.
template <class Codec, DType kType, bool kF16>
struct ChunkCodes {
  static constexpr int kBits = dtype_bits(kType);
  std::uint32_t words[kBits / 4];

  __device__ __forceinline__ void encode(const codec::Params& params, const float (&x)[kChunk]) {
    if constexpr (kType == DType::kFloat8E4M3) {
      encode_e4m3(params, x);
    } else if constexpr (kType == DType::kInt4) {
      encode_int4(params, x);
    } else {
      std::uint32_t code[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if constexpr (kType == DType::kInt8) {
          code[i] = quantise(params, x[i]);
        } else {
          code[i] = Codec::encode(params, x[i]);
        }
      }
      pack(code);
    }
  }

 private:
  /// Codec::encode(), two values at a time.
  __device__ __forceinline__ void encode_e4m3(const codec::Params& params, const float (&x)[kChunk]) {
    std::uint16_t pairs[kChunk / 2];
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
          : "=h"(pairs[i])
          : "f"(codec::ht_mul(x[2 * i + 1], params.inverse)), "f"(codec::ht_mul(x[2 * i], params.inverse)));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = pairs[2 * i] | std::uint32_t{pairs[2 * i + 1]} << 16;
  }

  /// An integer code, in the low bits.
  static __device__ __forceinline__ std::uint32_t quantise(const codec::Params& params, float x) {
    if constexpr (kF16 && Codec::kUnsigned) {
      return Codec::quantise_saturating(params, x);
    } else {
      return static_cast<std::uint32_t>(Codec::quantise(params, x));
    }
  }

  /// Codec::encode() as one sum of shifted numbers, in which all biases are one constant.
  __device__ __forceinline__ void encode_int4(const codec::Params& params, const float (&x)[kChunk]) {
    words[0] = 0;
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      words[0] = words[0] * 16 + quantise(params, x[i]);
    }
    words[0] += Codec::kBias * 0x11111111u;
  }

  __device__ __forceinline__ void pack(const std::uint32_t (&code)[kChunk]) {
    if constexpr (kBits == 16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __byte_perm(code[2 * i], code[2 * i + 1], 0x5410);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] = __byte_perm(__byte_perm(code[4 * i], code[4 * i + 1], 0x0040),
                               __byte_perm(code[4 * i + 2], code[4 * i + 3], 0x0040), 0x5410);
      }
    }
  }
};

}  // namespace halftone::cuda
