// O^T += V^T P^T.
#pragma once

#include "cuda/latent/few/codes.h"

namespace halftone::cuda {

/// V's scales of a warp's group of dims, by which it multiplies P: as powers of two apart, those of a block
/// are below 1 in f16. Like a running maximum the unit only rises.
template <LatentFewConfig C>
struct Scales {
  int unit;    // log2; O is in units of it, too
  float fall;  // of the last rise

  /// Of a block: `own` is the lane's token's. True if O must be multiplied with `fall`.
  __device__ bool raise(float own) {
    const int beyond = static_cast<int>(__float_as_uint(own) >> 23 & 0xff) - 126;  // log2 of a larger power
    if (!__any_sync(~0u, beyond > unit)) return false;
    const int before = unit;
    unit = __reduce_max_sync(~0u, beyond) + 1;
    fall = exp2_approx(static_cast<float>(before - unit));
    return true;
  }
  /// As B fragments want them.
  __device__ void factors(float own, unsigned lane, std::uint32_t (&to)[4]) const {
    // In two steps: a power of two may be beyond f32.
    const int half = -unit / 2;
    const float factor = own * power_of_two(half) * power_of_two(-unit - half);
    pairs(__half_as_ushort(__float2half_rn(factor)), lane, to);
  }
  /// Of f16 values, one for each lane, those of lanes 2 c + 8 i and the next one.
  static __device__ void pairs(std::uint16_t own, unsigned lane, std::uint32_t (&to)[4]) {
    const std::uint32_t both = own | __shfl_down_sync(~0u, std::uint32_t{own}, 1) << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __shfl_sync(~0u, both, 8 * i + lane % 4 * 2);
  }
};

/// A warp's 64 dims of O for all rows. Of an m-tile, 16 dims, a lane has first_of_pair() and the next dim:
/// rows g and g + 8 of the product, but for bf16, where they are dims g and g + 8 until pair() exchanges
/// them.
template <LatentFewConfig C>
struct Output {
  using Traits = LatentFewTraits<C>;
  static constexpr int kTiles = Traits::kRowTiles, kDimTiles = Traits::kDim / Traits::kOutputWarps / 16;
  static constexpr int kOffsets = Traits::kInteger ? kTiles : 0;
  float x[kDimTiles][kTiles][4];
  float offset[kOffsets + 1][4];  // of integers: what all dims of x lack, the sign or V's mins times P
  int unit[kTiles];               // log2 of what row 8 n + lane / 4 is in units of
  Scales<C> scales;

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) unit[n] = kNoUnit;
    scales.unit = kNoUnit;
#pragma unroll
    for (int n = 0; n < kOffsets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) offset[n][i] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0.0f;
      }
    }
  }

  /// Multiplies with a factor per row: those of the lane's rows 8 n + 2 c and the next one.
  __device__ void scale(const float2 (&by)[kTiles], bool offsets = true) {
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        x[m][n][0] *= by[n].x, x[m][n][1] *= by[n].y, x[m][n][2] *= by[n].x, x[m][n][3] *= by[n].y;
      }
    }
    if (!offsets) return;
#pragma unroll
    for (int n = 0; n < kOffsets; ++n) {
      offset[n][0] *= by[n].x, offset[n][1] *= by[n].y, offset[n][2] *= by[n].x, offset[n][3] *= by[n].y;
    }
  }

  /// A block whose P is in a slot.
  __device__ void add(const typename Traits::Shared& s, int stage, int slot) {
    const unsigned warp = this->warp(), lane = static_cast<unsigned>(thread_index()) % 32;
    std::uint32_t prob[2][kTiles][2];
    load_prob(s, slot, 0, lane, prob[0]);
    load_prob(s, slot, 1, lane, prob[1]);
    to_unit(s.units[slot], lane, prob);
    if constexpr (Traits::kApart) {
      if (is_rotary()) {
        to_bf16(prob);
        add_bf16(shared_address(s.rope[stage]), Traits::kRopePitch, 0, prob, lane);
        return;
      }
    }
    if constexpr (Traits::kScaled) scale_prob(Traits::scales(s, stage), prob, warp, lane);
    if constexpr (Traits::kBf16) {
      add_bf16(shared_address(s.codes[stage]), Traits::kRowPitch, warp, prob, lane);
    } else {
      add_block(shared_address(s.codes[stage]), prob, warp, lane);
    }
  }
  /// Whether the warp's dims are rotary ones, in bf16.
  static __device__ bool is_rotary() { return Traits::kApart && warp() == Traits::kOutputWarps - 1; }
  static __device__ unsigned warp() {
    return static_cast<unsigned>(thread_index() - Traits::kFirstOutput) / 32;
  }

  /// O in units of `unit`, all there is of it. Then every lane has pairs of adjacent dims: dim() and the next
  /// one.
  __device__ void settle() {
    if constexpr (Traits::kScaled) {
      const int late =
          is_rotary() || scales.unit == kNoUnit ? 0 : scales.unit + (Traits::kInteger ? kIntegerUnitLog2 : 0);
      constexpr bool kMins = Traits::kBits == 4;
      if constexpr (Traits::kInteger) add_offsets(kMins ? power_of_two(min(max(late, -126), 127)) : 1.0f);
#pragma unroll
      for (int n = 0; n < kTiles && !kMins; ++n) unit[n] += late;
    }
    if (Traits::kBf16 || is_rotary()) pair();
  }
  /// The first of the adjacent dims of m-tile `m` that the lane has.
  static __device__ unsigned dim(int m) {
    const unsigned g = static_cast<unsigned>(thread_index()) % 32 / 4, first = warp() * 16 * kDimTiles;
    if constexpr (Traits::kBits == 4) return first + m / 2 * 32 + 4 * g + m % 2 * 2;
    const bool exchanged = Traits::kBf16 || is_rotary();
    return first + m * 16 + (!exchanged ? 2 * g : g % 2 == 0 ? g : 8 + g - 1);
  }
  /// dim(m) - dim(0).
  static constexpr unsigned beyond(int m) { return Traits::kBits == 4 ? m / 2 * 32 + m % 2 * 2 : m * 16; }

 private:
  /// P of 16 tokens as B fragments.
  static __device__ void load_prob(const typename Traits::Shared& s, int slot, int half, unsigned lane,
                                   std::uint32_t (&prob)[kTiles][2]) {
    const std::uint32_t from = shared_address(s.prob[slot][half][0][0]) + lane * 16;
    if constexpr (kTiles == 1) {
      load_transposed(prob[0], from);
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        std::uint32_t words[4];
        load_transposed(words, from + n * 256);
        prob[n][0] = words[0], prob[n][1] = words[1], prob[n + 1][0] = words[2], prob[n + 1][1] = words[3];
      }
    }
  }

  /// Brings P from its tiles' units to that of O, which is raised if it is too small for that.
  __device__ void to_unit(const int2 (&units)[Traits::kRows], unsigned lane,
                          std::uint32_t (&prob)[2][kTiles][2]) {
    int2 rise[kTiles];
    int most = kNoUnit;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int2 own = units[8 * n + lane / 4];
      rise[n] = {own.x - unit[n], own.y - unit[n]};
      most = max(most, max(rise[n].x, rise[n].y));
    }
    if (__any_sync(~0u, most > 0)) {
      float2 by[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int raised = max(max(rise[n].x, rise[n].y), 0);
        unit[n] += raised, rise[n].x -= raised, rise[n].y -= raised;
        by[n] = of_columns(exp2_approx(static_cast<float>(-raised)), lane);
      }
      scale(by);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float power = exp2_approx(static_cast<float>(half == 0 ? rise[n].x : rise[n].y));
        const std::uint32_t both = Traits::kBf16 ? pack_bf16x2(power, power) : pack_f16x2(power, power);
#pragma unroll
        for (std::uint32_t& word : prob[half][n]) {
          word = Traits::kBf16 ? mul_bf16x2(word, both) : mul_f16x2(word, both);
        }
      }
    }
  }

  /// Of 8 rows, a value each in the lanes 4 row to 4 row + 3: those of the lane's columns of x.
  static __device__ float2 of_columns(float value, unsigned lane) {
    const unsigned from = lane % 4 * 8;
    return {__shfl_sync(~0u, value, from), __shfl_sync(~0u, value, from + 4)};
  }

  /// Multiplies P, of a block in the stage of `from`, with V's scales; what integers lack is added before.
  __device__ void scale_prob(const std::uint8_t* from, std::uint32_t (&prob)[2][kTiles][2], unsigned warp,
                             unsigned lane) {
    if constexpr (Traits::kBits == 4) {
      std::uint32_t mins[4];
      Scales<C>::pairs(few_min<C>(from, warp, lane), lane, mins);
#pragma unroll
      for (int half = 0; half < 2; ++half) add_offset(mins[2 * half], mins[2 * half + 1], prob[half]);
    }
    std::uint32_t factors[4];
    if (scales.raise(few_scale<C>(from, warp * 64 / Traits::kGroupDims, lane))) {
      float2 by[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) by[n] = {scales.fall, scales.fall};
      scale(by, Traits::kBits != 4);  // mins are not in units of the scales
    }
    scales.factors(few_scale<C>(from, warp * 64 / Traits::kGroupDims, lane), lane, factors);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) prob[half][n][i] = mul_f16x2(prob[half][n][i], factors[2 * half + i]);
      }
    }
    constexpr std::uint32_t kSign = 0x80808080u;  // -128 in units of the integers, twice
    if constexpr (Traits::kInteger && Traits::kBits == 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) add_offset(kSign, kSign, prob[half]);
    }
  }
  /// offset += P times what the tokens 2 c and 2 c + 1, and those eight later, of 16 lack in all dims.
  __device__ void add_offset(std::uint32_t first, std::uint32_t second,
                             const std::uint32_t (&prob)[kTiles][2]) {
    const std::uint32_t a[4] = {first, first, second, second};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma_f16(offset[n], a, prob[n][0], prob[n][1]);
  }
  /// x = x * by + offset.
  __device__ void add_offsets(float by) {
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = fmaf(x[m][n][i], by, offset[n][i]);
      }
    }
  }
  static __device__ void to_bf16(std::uint32_t (&prob)[2][kTiles][2]) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      std::uint32_t& word = prob[i / 2 / kTiles][i / 2 % kTiles][i % 2];
      const float2 p = unpack_f16x2(word);
      word = pack_bf16x2(p.x, p.y);
    }
  }

  /// Gives every lane pairs of adjacent dims.
  __device__ void pair() {
    const bool odd = thread_index() / 4 % 2;
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float &low = x[m][n][i], &high = x[m][n][2 + i];
          const float other = __shfl_xor_sync(~0u, odd ? low : high, 4);
          (odd ? low : high) = other;
        }
      }
    }
  }

  /// V in codes: an m-tile's 16 dims are 16 bytes of a token, or two m-tiles' 32 dims.
  __device__ void add_block(std::uint32_t codes, const std::uint32_t (&prob)[2][kTiles][2], unsigned warp,
                            unsigned lane) {
    constexpr bool kNibbles = Traits::kBits == 4;
    constexpr int kChunks = kDimTiles / (kNibbles ? 2 : 1);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      std::uint32_t words[4];  // two, or four, dims of two tokens
      load_transposed(words, codes + code_place<C>(lane, kChunks * warp + chunk));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const std::uint32_t first = words[2 * step], second = words[2 * step + 1];
        if constexpr (kNibbles) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int shift = 8 * m;
            const std::uint32_t a[4] = {first >> shift & 0x000f000fu, first >> (shift + 4) & 0x000f000fu,
                                        second >> shift & 0x000f000fu, second >> (shift + 4) & 0x000f000fu};
            multiply(x[2 * chunk + m], a, prob[step]);
          }
        } else if constexpr (Traits::kInteger) {
          const std::uint32_t a[4] = {even_codes(first), even_codes(first >> 8), even_codes(second),
                                      even_codes(second >> 8)};
          multiply(x[chunk], a, prob[step]);
        } else {
          const std::uint32_t low = __byte_perm(first, 0, 0x3120), high = __byte_perm(second, 0, 0x3120);
          const std::uint32_t a[4] = {e4m3x2_to_f16x2(low), e4m3x2_to_f16x2(low, true), e4m3x2_to_f16x2(high),
                                      e4m3x2_to_f16x2(high, true)};
          multiply(x[chunk], a, prob[step]);
        }
      }
    }
  }
  static __device__ void multiply(float (&sums)[kTiles][4], const std::uint32_t (&a)[4],
                                  const std::uint32_t (&prob)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma_f16(sums[n], a, prob[n][0], prob[n][1]);
  }

  /// V in bf16, `pitch` bytes from token to token: the warp's 64 dims are the `part`-th of those.
  __device__ void add_bf16(std::uint32_t values, unsigned pitch, unsigned part,
                           const std::uint32_t (&prob)[2][kTiles][2], unsigned lane) {
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        std::uint32_t a[4];
        const unsigned token = 16 * step + lane / 16 * 8 + lane % 8;
        const unsigned chunk = 2 * (kDimTiles * part + m) + lane / 8 % 2;
        load_transposed(a, values + swizzled_place(token, chunk, pitch));
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_bf16(x[m][n], a, prob[step][n][0], prob[step][n][1]);
      }
    }
  }
};

}  // namespace halftone::cuda
