// From a chunk's values to its codes, in registers.
#pragma once

#include "cuda/device/lanes.h"
#include "cuda/device/ptx.h"
#include "format/codec.h"

namespace halftone::cuda {

/// The codes of a chunk, packed in the order of dims: 4, 2 or 1 words. `kF16`: scales are computed ones in
/// f16, or any that are computed of values which append accepts.
template <class Codec, DType kType, bool kF16>
struct ChunkCodes {
  static constexpr int kBits = dtype_bits(kType);
  std::uint32_t words[kBits / 4];

  /// `kWithin`: no value is beyond the levels of the scale.
  template <bool kWithin = false>
  __device__ __forceinline__ void encode(const codec::Params& params, const float (&x)[kChunk]) {
    if constexpr (kType == DType::kFloat8E4M3) {
      encode_e4m3(params, x);
    } else if constexpr (kType == DType::kInt4) {
      encode_int4<kWithin>(params, x);
    } else {
      std::uint32_t code[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if constexpr (kType == DType::kInt8) {
          code[i] = quantise<kWithin>(params, x[i]);
        } else {
          code[i] = Codec::encode(params, x[i]);
        }
      }
      pack(code);
    }
  }

  /// Whether values of an extent from which computed params follow need no limit when they are rounded. E4M3
  /// has one of its own.
  static __device__ __forceinline__ bool within(const codec::Params& params, const codec::Range& range) {
    if constexpr (kType == DType::kFloat8E4M3) {
      return true;
    } else {
      constexpr float kLevels = codec::quantisation_levels(kType, Codec::kUnsigned);
      return codec::ht_mul(codec::ht_sub(range.hi, params.min), params.inverse) < kLevels + 0.5f;
    }
  }
  /// Makes values codes already, and params those that leave them as they are: what encode() does without
  /// kWithin.
  static __device__ __forceinline__ void limit(codec::Params& params, float (&x)[kChunk]) {
    if constexpr (kType != DType::kFloat8E4M3) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[i] = static_cast<float>(Codec::quantise(params, x[i]));
      params.min = 0.0f, params.inverse = 1.0f;
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
  template <bool kWithin>
  static __device__ __forceinline__ std::uint32_t quantise(const codec::Params& params, float x) {
    if constexpr (kF16 && Codec::kUnsigned) {
      return Codec::template quantise_saturating<kWithin>(params, x);
    } else if constexpr (kWithin) {
      return static_cast<std::uint32_t>(codec::round_to_int(codec::ht_mul(x, params.inverse)));
    } else {
      return static_cast<std::uint32_t>(Codec::quantise(params, x));
    }
  }

  /// Codec::encode() as one sum of shifted numbers, in which all biases are one constant.
  template <bool kWithin>
  __device__ __forceinline__ void encode_int4(const codec::Params& params, const float (&x)[kChunk]) {
    words[0] = 0;
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      words[0] = words[0] * 16 + quantise<kWithin>(params, x[i]);
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
