// K or V as a decode kernel sees it: symmetry, groups, stored scales and mins.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention/part_config.h"

namespace halftone::cuda {

/// Properties of K or V.
template <PartConfig P>
struct Part {
  static constexpr bool kAsymmetric = P.asymmetric;
  static constexpr int group_of(int block) { return block / P.group_blocks; }
  template <int kBlocks>
  static constexpr int groups() {
    if constexpr (P.mode == ScaleMode::kStatic) return 0;
    if constexpr (P.mode == ScaleMode::kToken) return 1;
    return kBlocks / P.group_blocks;
  }
  /// The stored values of one token for all kBlocks blocks, from index * groups on.
  template <int kBlocks>
  static __device__ void load_blocks(const std::uint8_t* plane, int index, float (&values)[kBlocks]) {
    constexpr int kGroups = kBlocks / P.group_blocks;
    if constexpr (kGroups % 2 == 0) {
      std::uint32_t words[kGroups / 2];
      const std::uint32_t* at = reinterpret_cast<const std::uint32_t*>(plane) + index * (kGroups / 2);
      if constexpr (kGroups % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kGroups / 4; ++i) {
          const uint2 v = reinterpret_cast<const uint2*>(at)[i];
          words[2 * i] = v.x, words[2 * i + 1] = v.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kGroups / 2; ++i) words[i] = at[i];
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int group = b / P.group_blocks;
        const __half2 pair = *reinterpret_cast<const __half2*>(&words[group / 2]);
        values[b] = group % 2 ? __high2float(pair) : __low2float(pair);
      }
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) values[b] = load(plane, index * groups<kBlocks>() + group_of(b));
    }
  }
  /// A stored scale or min.
  static __device__ float load(const std::uint8_t* plane, int index) {
    return __half2float(reinterpret_cast<const __half*>(plane)[index]);
  }
  /// One stored value in both halves of an f16x2.
  static __device__ std::uint32_t load_twice(const std::uint8_t* plane, int index) {
    const std::uint32_t bits = reinterpret_cast<const std::uint16_t*>(plane)[index];
    return __byte_perm(bits, bits, 0x1010);
  }
  /// Two neighbouring stored values as f16x2.
  static __device__ std::uint32_t load_pair(const std::uint8_t* plane, int index) {
    return *reinterpret_cast<const std::uint32_t*>(plane + 2 * index);
  }
};

}  // namespace halftone::cuda
