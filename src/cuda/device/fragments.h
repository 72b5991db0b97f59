// From packed words to MMA A-fragments: the only code of the decode kernel that differs between formats.
//
// A masked nibble or byte, taken as f16 bits, is the denormal q * 2^-24 (or q * 2^-20 for a nibble in
// bits 4..7): exact, and the MMA handles it. The powers of two and the offset of signed codes are undone by
// the caller:
//   value = (element * 2^24 / 2^shift) - kBias.
//
// A last block of 16 dims (head_dim 80) is half a block: a lane owns 4 dims of K and 2 of V, step 0 and
// m-tile 0 are all there is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/ptx.h"
#include "halftone/types.h"

namespace halftone::cuda {

/// Whether a block of 32 dims has 16 only.
constexpr bool is_half_block(int block, int head_dim) { return head_dim % 32 != 0 && block == head_dim / 32; }

/// Loads string `index` of `count` strings of kBytes bytes (format/page.h: chunks of 16, then 8, 4 and 2).
template <int kBytes>
__device__ inline void load_string(const std::uint8_t* part, int index, int count,
                                   std::uint32_t (&words)[(kBytes + 3) / 4]) {
  static_assert(kBytes % 2 == 0);
#pragma unroll
  for (int c = 0; c < kBytes / 16; ++c) {
    const uint4 v = *reinterpret_cast<const uint4*>(part + (c * count + index) * 16);
    words[4 * c] = v.x, words[4 * c + 1] = v.y, words[4 * c + 2] = v.z, words[4 * c + 3] = v.w;
  }
  constexpr int kBase = kBytes / 16 * 16;
  if constexpr (kBytes % 16 >= 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(part + kBase * count + index * 8);
    words[kBase / 4] = v.x, words[kBase / 4 + 1] = v.y;
  }
  if constexpr (kBytes % 8 >= 4) {
    constexpr int kRest = kBytes / 8 * 8;
    words[kRest / 4] = *reinterpret_cast<const std::uint32_t*>(part + kRest * count + index * 4);
  }
  if constexpr (kBytes % 4 == 2) {
    constexpr int kRest = kBytes / 4 * 4;
    words[kRest / 4] = *reinterpret_cast<const std::uint16_t*>(part + kRest * count + index * 2);
  }
}

/// Two f16 denormals from the even (or, after a shift by 8, odd) bytes of a word of int8 codes. `flip` is
/// 0x00800080 for two's complement codes, which then stand as q + 128, and 0 for unsigned ones.
__device__ inline std::uint32_t even_bytes(std::uint32_t word, std::uint32_t flip) {
  return (word & 0x00ff00ffu) ^ flip;
}
/// Both. An instruction takes one immediate, so that a mask and a flip are two: with kWhole the word is
/// flipped as a whole, which is three of them for five, and a few registers more.
template <bool kWhole>
__device__ inline void split_bytes(std::uint32_t word, std::uint32_t flip, std::uint32_t& even,
                                   std::uint32_t& odd) {
  if constexpr (kWhole) {
    word ^= flip | flip << 8;
    even = word & 0x00ff00ffu;
    odd = __byte_perm(word, 0, 0x4341);
  } else {
    even = even_bytes(word, flip);
    odd = even_bytes(word >> 8, flip);
  }
}

/// Two bytes of half a block, from byte `first` on, to where a whole block's masks find them.
__device__ inline std::uint32_t spread_bytes(std::uint32_t word, int first) {
  return __byte_perm(word, 0, first == 0 ? 0x4140u : 0x4342u);
}

/// K of a tile: the A-fragments of the two k-steps of each block of 32 dims.
/// q_dim(step, slot): which of the lane's 8 dims stands at k = 2t, 2t+1, 2t+8, 2t+9 (slot 0..3) of a step.
/// half_dim(slot): which of its 4 dims in half a block.
/// q_shift(slot): the element there is 2^shift too large.
template <DType kType, int kDim>
struct KTile {
  static constexpr int kBytes = kDim * dtype_bits(kType) / 32;  // per string
  static constexpr int kWords = (kBytes + 3) / 4;
  static constexpr int kScaleLog2 = kType == DType::kFloat8E4M3 ? 0 : 24;

  std::uint32_t low[kWords];   // token g
  std::uint32_t high[kWords];  // token g + 8

  static __device__ constexpr int q_dim(int step, int slot) {
    if constexpr (kType == DType::kInt4) return 2 * step + slot / 2 + slot % 2 * 4;
    if constexpr (kType == DType::kInt8) return 4 * step + slot / 2 + slot % 2 * 2;
    return 4 * step + slot;
  }
  static __device__ constexpr int half_dim(int slot) {
    return kType == DType::kFloat8E4M3 ? slot : slot / 2 + slot % 2 * 2;
  }
  static __device__ constexpr int q_shift(int slot) { return kType == DType::kInt4 && slot >= 2 ? 4 : 0; }

  __device__ inline void load(const std::uint8_t* part, int lane) {
    load_string<kBytes>(part, lane, 64, low);
    load_string<kBytes>(part, lane + 32, 64, high);
  }

  template <bool kWhole = false>
  __device__ inline void fragment(int block, int step, std::uint32_t flip, std::uint32_t (&a)[4]) const {
    if constexpr (kType == DType::kInt4) {
      const bool half = is_half_block(block, kDim);
      const std::uint32_t x = half ? spread_bytes(low[block], 0) : low[block] >> (8 * step);
      const std::uint32_t y = half ? spread_bytes(high[block], 0) : high[block] >> (8 * step);
      a[0] = x & 0x000f000fu, a[1] = y & 0x000f000fu;
      a[2] = x & 0x00f000f0u, a[3] = y & 0x00f000f0u;
    } else if constexpr (kType == DType::kInt8) {
      const std::uint32_t x = low[2 * block + step], y = high[2 * block + step];
      split_bytes<kWhole>(x, flip, a[0], a[2]);
      split_bytes<kWhole>(y, flip, a[1], a[3]);
    } else {
      const std::uint32_t x = low[2 * block + step], y = high[2 * block + step];
      a[0] = e4m3x2_to_f16x2(x), a[1] = e4m3x2_to_f16x2(y);
      a[2] = e4m3x2_to_f16x2(x, true), a[3] = e4m3x2_to_f16x2(y, true);
    }
  }
};

/// 16-bit K: token rows, read a block at a time.
template <int kDim>
struct KRows {
  static constexpr int kScaleLog2 = 0;
  const std::uint8_t* row_low;
  const std::uint8_t* row_high;
  int half_offset;  // of half a block, against a whole one
  uint4 low, high;

  static __device__ constexpr int q_dim(int step, int slot) { return 4 * step + slot; }
  static __device__ constexpr int half_dim(int slot) { return slot; }
  static __device__ constexpr int q_shift(int) { return 0; }

  __device__ inline void load(const std::uint8_t* part, int lane) {
    row_low = part + (lane / 4) * kDim * 2 + (lane % 4) * 16;
    row_high = row_low + 8 * kDim * 2;
    half_offset = -(lane % 4) * 8;
  }
  template <bool = false>
  __device__ inline void fragment(int block, int step, std::uint32_t, std::uint32_t (&a)[4]) {
    if (is_half_block(block, kDim)) {
      const uint2 x = *reinterpret_cast<const uint2*>(row_low + block * 64 + half_offset);
      const uint2 y = *reinterpret_cast<const uint2*>(row_high + block * 64 + half_offset);
      a[0] = x.x, a[1] = y.x, a[2] = x.y, a[3] = y.y;
      return;
    }
    if (step == 0) {
      low = *reinterpret_cast<const uint4*>(row_low + block * 64);
      high = *reinterpret_cast<const uint4*>(row_high + block * 64);
    }
    a[0] = step ? low.z : low.x, a[1] = step ? high.z : high.x;
    a[2] = step ? low.w : low.y, a[3] = step ? high.w : high.y;
  }
};

/// V of a tile: the A-fragments of the two m-tiles of each block of 32 dims. Of m-tile j, row g is dim 4g +
/// 2j of the block and row g + 8 is dim 4g + 2j + 1, which is 2^kOddShift too large. Of half a block they are
/// dims 2g and 2g + 1.
template <DType kType, int kDim>
struct VTile {
  static constexpr int kWords = kDim * dtype_bits(kType) / 64;
  static constexpr int kScaleLog2 = kType == DType::kFloat8E4M3 ? 0 : 24;
  static constexpr int kOddShift = kType == DType::kInt4 ? 4 : 0;

  std::uint32_t words[kWords];

  __device__ inline void load(const std::uint8_t* part, int lane) {
    load_string<kWords * 4>(part, lane, 32, words);
  }
  template <bool kWhole = false>
  __device__ inline void fragment(int block, int j, std::uint32_t flip, std::uint32_t (&a)[4]) const {
    if constexpr (kType == DType::kInt4) {
      std::uint32_t x, y;
      if (is_half_block(block, kDim)) {
        x = spread_bytes(words[2 * block], 0), y = spread_bytes(words[2 * block], 2);
      } else {
        x = words[2 * block] >> (8 * j), y = words[2 * block + 1] >> (8 * j);
      }
      a[0] = x & 0x000f000fu, a[1] = x & 0x00f000f0u;
      a[2] = y & 0x000f000fu, a[3] = y & 0x00f000f0u;
    } else if constexpr (kType == DType::kInt8) {
      const std::uint32_t x = words[4 * block + 2 * j], y = words[4 * block + 2 * j + 1];
      split_bytes<kWhole>(x, flip, a[0], a[1]);
      split_bytes<kWhole>(y, flip, a[2], a[3]);
    } else {
      const std::uint32_t x = words[4 * block + 2 * j], y = words[4 * block + 2 * j + 1];
      a[0] = e4m3x2_to_f16x2(x), a[1] = e4m3x2_to_f16x2(x, true);
      a[2] = e4m3x2_to_f16x2(y), a[3] = e4m3x2_to_f16x2(y, true);
    }
  }
};

/// 16-bit V: token rows; pairs of tokens are woven by byte permutes.
template <int kDim>
struct VRows {
  static constexpr int kScaleLog2 = 0;
  static constexpr int kOddShift = 0;
  const std::uint8_t* row;
  int half_offset;
  uint2 even[2], odd[2];

  __device__ inline void load(const std::uint8_t* part, int lane) {
    row = part + (lane % 4) * 2 * kDim * 2 + (lane / 4) * 8;
    half_offset = -(lane / 4) * 4;
  }
  template <bool = false>
  __device__ inline void fragment(int block, int j, std::uint32_t, std::uint32_t (&a)[4]) {
    if (is_half_block(block, kDim)) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const std::uint8_t* at = row + block * 64 + half_offset + p * 8 * kDim * 2;
        even[p].x = *reinterpret_cast<const std::uint32_t*>(at);
        odd[p].x = *reinterpret_cast<const std::uint32_t*>(at + kDim * 2);
      }
    } else if (j == 0) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        even[p] = *reinterpret_cast<const uint2*>(row + block * 64 + p * 8 * kDim * 2);
        odd[p] = *reinterpret_cast<const uint2*>(row + block * 64 + (p * 8 + 1) * kDim * 2);
      }
    }
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const std::uint32_t x = j ? even[p].y : even[p].x, y = j ? odd[p].y : odd[p].x;
      a[2 * p] = __byte_perm(x, y, 0x5410);
      a[2 * p + 1] = __byte_perm(x, y, 0x7632);
    }
  }
};

template <DType kType, int kDim>
struct KReader : KTile<kType, kDim> {};
template <int kDim>
struct KReader<DType::kBFloat16, kDim> : KRows<kDim> {};
template <int kDim>
struct KReader<DType::kFloat16, kDim> : KRows<kDim> {};

template <DType kType, int kDim>
struct VReader : VTile<kType, kDim> {};
template <int kDim>
struct VReader<DType::kBFloat16, kDim> : VRows<kDim> {};
template <int kDim>
struct VReader<DType::kFloat16, kDim> : VRows<kDim> {};

}  // namespace halftone::cuda
