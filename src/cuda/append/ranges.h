// Scales of plain rows, or records, of 16 bits, many at a time: extents of two values by one instruction, and
// a lane's four tokens shared out, so that each lane of four finds the scale of one of them for all.
#pragma once

#include "cuda/append/rows.h"
#include "cuda/device/pairs.h"

namespace halftone::cuda {

/// The extents of a lane's chunks of four tokens, then of the whole groups of one of them.
template <bool kAbsolute>
struct SharedRanges {
  static constexpr std::uint32_t kSigns = 0x80008000u;
  /// Absolute: the largest sizes of tokens 0 and 1, 2 and 3. Else of each token the largest value and the
  /// largest of the negated ones.
  static constexpr int kPairs = kAbsolute ? 2 : 4;
  std::uint32_t pairs[kPairs];

  /// Of a lane of four, the token whose group range() is of; and of a token, the lane.
  static __device__ __forceinline__ int token_of(int lane) { return (lane & 1) << 1 | (lane >> 1 & 1); }

  /// `kNan`: of NaN follows NaN; else it does not count where there is another value.
  template <bool kBFloat16, bool kNan = true>
  __device__ __forceinline__ void measure(const uint4 (&raw)[4], bool live) {
    // Halves of two pairs side by side, the larger ones.
    const auto fold = [](std::uint32_t a, std::uint32_t b) {
      return max_pair<kBFloat16, kNan>(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    };
    std::uint32_t most[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4& x = raw[k];
      if constexpr (kAbsolute) {
        most[k] = larger_pair<kBFloat16, kNan>(larger_pair<kBFloat16, kNan>(x.x, x.y),
                                               larger_pair<kBFloat16, kNan>(x.z, x.w)) &
                  ~kSigns;
      } else {
        most[k] = fold(max_pair<kBFloat16, kNan>(max_pair<kBFloat16, kNan>(x.x, x.y),
                                                 max_pair<kBFloat16, kNan>(x.z, x.w)),
                       min_pair<kBFloat16, kNan>(min_pair<kBFloat16, kNan>(x.x, x.y),
                                                 min_pair<kBFloat16, kNan>(x.z, x.w)) ^
                           kSigns);
      }
    }
    if constexpr (kAbsolute) {
      pairs[0] = fold(most[0], most[1]), pairs[1] = fold(most[2], most[3]);
    } else {
      constexpr std::uint32_t kNone = kBFloat16 ? 0xff80ff80u : 0xfc00fc00u;  // -inf
#pragma unroll
      for (int k = 0; k < 4; ++k) pairs[k] = live ? most[k] : kNone;
    }
  }

  /// Extends the ranges to those of other chunks of the same tokens.
  template <bool kBFloat16, bool kNan = true>
  __device__ __forceinline__ void include(const SharedRanges& other) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = max_pair<kBFloat16, kNan>(pairs[i], other.pairs[i]);
  }

  /// Of the group of 1 << `chunks_log2` >= 4 lanes, and of the lane's token. NaN at an end: there is one.
  template <bool kBFloat16, bool kNan = true>
  __device__ __forceinline__ codec::Range range(int lane, int chunks_log2) const {
    const bool odd = lane & 1, upper = lane & 2;
    // Each of two neighbours keeps half of what both have, and gives the other half.
    const auto halve = [](std::uint32_t kept, std::uint32_t given, int away) {
      return max_pair<kBFloat16, kNan>(kept, __shfl_xor_sync(~0u, given, away));
    };
    std::uint32_t both;
    if constexpr (kAbsolute) {
      both = halve(odd ? pairs[1] : pairs[0], odd ? pairs[0] : pairs[1], 1);
      both = halve(both, both, 2);
    } else {
      const std::uint32_t first = halve(odd ? pairs[2] : pairs[0], odd ? pairs[0] : pairs[2], 1);
      const std::uint32_t second = halve(odd ? pairs[3] : pairs[1], odd ? pairs[1] : pairs[3], 1);
      both = halve(upper ? second : first, upper ? first : second, 2);
    }
#pragma unroll
    for (int i = 2; i < 5; ++i) {
      if (i >= chunks_log2) break;
      both = halve(both, both, 1 << i);
    }
    if constexpr (kAbsolute) return {0.0f, half_of(both, upper, kBFloat16)};
    return {-half_of(both, true, kBFloat16), half_of(both, false, kBFloat16)};
  }
};

}  // namespace halftone::cuda
