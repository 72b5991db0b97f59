// Raw codes and scales of a token become f16: by lane 16 adjacent dims.
#pragma once

#include "cuda/device/ptx.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

template <int kWords>
struct Words {
  std::uint32_t x[kWords];
};
template <int kWords>
__device__ inline Words<kWords> load_shared(std::uint32_t at) {
  Words<kWords> w;
  if constexpr (kWords == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x[0]), "=r"(w.x[1]), "=r"(w.x[2]), "=r"(w.x[3])
                 : "r"(at)
                 : "memory");
  } else {
    static_assert(kWords == 2);
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w.x[0]), "=r"(w.x[1]) : "r"(at) : "memory");
  }
  return w;
}
__device__ inline uint4 load_shared_16_bytes(std::uint32_t at) {
  const Words<4> w = load_shared<4>(at);
  return {w.x[0], w.x[1], w.x[2], w.x[3]};
}
__device__ inline std::uint32_t load_shared_16_bits(std::uint32_t at) {
  std::uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
  return x;
}
__device__ inline void store_shared(std::uint32_t at, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

/// 16 codes of a lane.
template <LatentCodes kCodes>
struct Sixteen : Words<LatentRecord<kCodes>::kBits / 2> {
  using Raw = Words<LatentRecord<kCodes>::kBits / 2>;
  static constexpr int kBytes = sizeof(Raw), kTokenBytes = 32 * kBytes;  // of a lane, of a token in the ring

  /// Whether all lanes have codes. Where they are fewer, the last ones have what follows them.
  static constexpr bool kAll = LatentRecord<kCodes>::kLatent == 512;
  static __device__ bool has(int lane) { return kAll || lane < LatentRecord<kCodes>::kLatent / 16; }

  static __device__ Sixteen load(std::uint32_t at) { return {wide::load_shared<kBytes / 4>(at)}; }
  /// The first, or the `upper`, eight. `scale` and `min` are kept ones (KeptScales), twice.
  __device__ uint4 eight(bool upper, std::uint32_t scale, std::uint32_t min) const {
    if constexpr (kCodes == LatentCodes::kInt4) {
      // The even dims' nibbles and the odd ones' as bytes; with zeros between, denormals of f16.
      const std::uint32_t word = this->x[upper], even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
      const auto two = [&](std::uint32_t choice) {  // byte i of each, and above it the byte's sign: 0
        std::uint32_t x;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(even), "r"(odd), "r"(choice));
        constexpr std::uint32_t kUnit = 0x78007800u;  // 2^15
        return fma_f16x2(mul_f16x2(x, kUnit), scale, min);
      };
      return {two(0xc480), two(0xd591), two(0xe6a2), two(0xf7b3)};
    } else {
      const std::uint32_t a = this->x[2 * upper], b = this->x[2 * upper + 1];
      const uint2 low = four(a, scale), high = four(b, scale);
      return {low.x, low.y, high.x, high.y};
    }
  }

 private:
  static __device__ uint2 four(std::uint32_t codes, std::uint32_t scale) {
    if constexpr (kCodes == LatentCodes::kInt8) {
      const std::uint32_t offset = codes ^ 0x80808080u;  // q + 128, in the low bits of 1024 + q + 128
      const auto two = [&](std::uint32_t choice) {
        return mul_f16x2(add_f16x2(__byte_perm(offset, 0x64646464u, choice), 0xe480e480u), scale);  // - 1152
      };
      return {two(0x4140), two(0x4342)};
    }
    return {mul_f16x2(e4m3x2_to_f16x2(codes), scale), mul_f16x2(e4m3x2_to_f16x2(codes, true), scale)};
  }
};

/// A token's scales, or a lane's part of them, as they are multiplied: f16. Scales whose values f16 does not
/// hold well lose a power of two, the token's own, with which its products are multiplied later. Those of
/// integers are f16 as they stand, and however small they are, their values are exact to 2^-11; those of 4
/// bits get back what Sixteen leaves of its codes, 2^-9.
template <LatentCodes kCodes>
struct KeptScales {
  static constexpr bool kFloats = kCodes == LatentCodes::kFp8, kMins = kCodes == LatentCodes::kInt4;
  static constexpr bool kPowers = kCodes == LatentCodes::kFp8Apart;  // e8m0: bytes
  static constexpr int kPairs = (LatentRecord<kCodes>::kGroups + 1) / 2;
  static constexpr std::uint32_t kOnePowers = 0x7f7f7f7fu;  // e8m0 of 1
  // e4m3: log2 of the largest scale, times 448 within f16, and of the smallest one of f32, normal in f16;
  // what is left of a larger one.
  static constexpr int kLargest = 7, kSmallest = -14, kReduced = 6;

  /// What decides about a token, of its scales: of f32 the largest and smallest that are not 0, else the log2
  /// of what is to be lost, below 1 if nothing. Powers of two may be small: down to 2^-24 they are exact, and
  /// what their products lose is 2^-25 at most. A token does not gain any, since its rope part would, too.
  struct Sizes {
    float most = 0.0f, least = 128.0f;
    int excess = 0;

    __device__ void add(float scale) {
      const float size = fabsf(scale);
      most = fmaxf(most, size), least = fminf(least, size == 0.0f ? 128.0f : size);
    }
    /// An e8m0 scale, in the low byte.
    __device__ void add_power(std::uint32_t x) {
      const int log2 = static_cast<int>(x & 0xff) - 127;
      excess = ::max(excess, log2 > kLargest ? log2 - kReduced : 0);
    }
    /// Two f16 scales, and mins.
    __device__ void add_pair(std::uint32_t scales, std::uint32_t mins) {
      constexpr int kScaleLimit = 15 + (kMins ? 5 : 6), kMinLimit = 15 + 14;  // biased exponents
      excess = ::max(excess, exponent_of(scales) - kScaleLimit);
      if constexpr (kMins) excess = ::max(excess, exponent_of(mins) - kMinLimit);
    }
    /// Among four lanes that have a part of a token each.
    __device__ void share() {
#pragma unroll
      for (int i = 1; i < 4; i *= 2) {
        if constexpr (kFloats) {
          most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
          least = fminf(least, __shfl_xor_sync(~0u, least, i));
        } else {
          excess = ::max(excess, __shfl_xor_sync(~0u, excess, i));
        }
      }
    }
    /// The token's power of two.
    __device__ int exponent() const {
      if constexpr (kFloats) {
        const bool small = least < power_of_two(kSmallest) && most != 0.0f;
        const int lost = ::max(static_cast<int>(__float_as_uint(most) >> 23) - 127 - kReduced, -100);
        return (most <= 128.0f) & !small ? 0 : lost;
      }
      return excess;
    }

   private:
    /// The larger biased exponent of two f16.
    static __device__ int exponent_of(std::uint32_t x) {
      return static_cast<int>(::max(x & 0x7c00u, x >> 16 & 0x7c00u) >> 10);
    }
  };

  /// Of a token: its scales, then its mins.
  using Raw = Words<LatentRecord<kCodes>::kScaleBytes / 4>;
  struct Token {
    std::uint32_t words[kPairs * (kMins ? 2 : 1)];
    int exponent;  // what they have lost, base 2
  };
  static __device__ Token of_token(const Raw& raw) {
    Sizes sizes;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kFloats) {
        sizes.add(__uint_as_float(raw.x[2 * i])), sizes.add(__uint_as_float(raw.x[2 * i + 1]));
      } else if constexpr (kPowers) {
        sizes.add_power(raw.x[i / 2] >> 16 * (i % 2));
        if (2 * i + 1 < LatentRecord<kCodes>::kGroups) sizes.add_power(raw.x[i / 2] >> (16 * (i % 2) + 8));
      } else {
        sizes.add_pair(raw.x[i], kMins ? raw.x[kPairs + i] : 0);
      }
    }
    Token token;
    token.exponent = sizes.exponent();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kFloats) {
        const float power = power_of_two(-token.exponent);
        token.words[i] =
            pack_f16x2(__uint_as_float(raw.x[2 * i]) * power, __uint_as_float(raw.x[2 * i + 1]) * power);
      } else if constexpr (kPowers) {
        token.words[i] = powers(raw.x[i / 2] >> 16 * (i % 2), token.exponent);
      } else {
        token.words[i] = kept_scales(raw.x[i], token.exponent);
        if constexpr (kMins) token.words[kPairs + i] = kept_mins(raw.x[kPairs + i], token.exponent);
      }
    }
    return token;
  }

  /// Two f16 scales, or mins, without a power of two.
  static __device__ std::uint32_t kept_scales(std::uint32_t scales, int exponent) {
    return mul_f16x2(scales, f16_power((kMins ? 9 : 0) - exponent));
  }
  static __device__ std::uint32_t kept_mins(std::uint32_t mins, int exponent) {
    return mul_f16x2(mins, f16_power(-exponent));
  }
  /// f16 of two e8m0 scales without a power of two.
  static __device__ std::uint32_t powers(std::uint32_t two, int exponent) {
    const auto power = [&](std::uint32_t e) {
      const int biased = min(static_cast<int>(e) - 127 - exponent + 15, 31);
      if (e == 0xff) return 0x7e00u;  // NaN
      return biased > 0 ? static_cast<std::uint32_t>(biased) << 10 : 0x200u >> min(-biased, 31);
    };
    return power(two & 0xff) | power(two >> 8 & 0xff) << 16;
  }

 private:
  /// 2^exponent twice, of a normal number.
  static __device__ std::uint32_t f16_power(int exponent) {
    return static_cast<std::uint32_t>(15 + exponent) * 0x04000400u;
  }
};

}  // namespace halftone::cuda::wide
