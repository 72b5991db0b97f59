// Queries for the products with staged and packed keys: they become f16, or codes, with a scale per row, in
// their place in shared memory.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/device/range.h"
#include "cuda/device/values.h"
#include "cuda/prefill/codes.h"
#include "cuda/prefill/compute.h"
#include "format/fp8_row.h"
#include "format/hadamard.h"
#include "format/int8_row.h"

namespace halftone::cuda {

/// A warp's 16 rows of Q where they lie: chunks of 16-bit values, swizzled over a row of them. A row is of
/// two lanes, 16 apart.
template <PrefillConfig C, bool kBFloat16>
struct QueryRow {
  using Place = typename PrefillTraits<C>::Place;
  static constexpr int kPieces = C.head_dim / 8;  // of a row, 16 bytes each
  std::uint8_t* row;
  int index, half;  // of the row, and which lane of the two

  __device__ uint4& piece(int i) const {
    return *reinterpret_cast<uint4*>(row + i / Place::kPieces * (64 * PrefillTraits<C>::kRowBytes) +
                                     Place::piece(index, i % Place::kPieces));
  }
  static __device__ float value(std::uint32_t word, int i) { return half_of(word, i, kBFloat16); }

  static __device__ std::uint32_t larger(std::uint32_t most, const uint4& x) {
    return larger_pair<kBFloat16>(most, larger_pair<kBFloat16>(x));
  }
  /// Bits of the largest magnitude of the row, a NaN's if there is one. `pair`: larger() of the lane's
  /// values.
  static __device__ std::uint32_t largest(std::uint32_t pair) {
    return larger_bits<kBFloat16>(larger_pair<kBFloat16>(pair, __shfl_xor_sync(~0u, pair, 16)));
  }
  __device__ std::uint32_t largest() const {
    std::uint32_t most = 0;
#pragma unroll 4
    for (int i = 0; i < kPieces / 2; ++i) most = larger(most, piece(half * (kPieces / 2) + i));
    return largest(most);
  }
  __device__ void to_f16(float inverse) const {
#pragma unroll 2
    for (int i = half * (kPieces / 2); i < (half + 1) * (kPieces / 2); ++i) {
      const auto scaled = [&](std::uint32_t w) {
        return pack_f16x2(value(w, 0) * inverse, value(w, 1) * inverse);
      };
      const uint4 x = piece(i);
      uint4 y = {scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w)};
      if constexpr (PrefillTraits<C>::kFourBits) {  // 0, 4, 1, 5, 2, 6, 3, 7, as dims of K
        y = {__byte_perm(y.x, y.z, 0x5410), __byte_perm(y.x, y.z, 0x7632), __byte_perm(y.y, y.w, 0x5410),
             __byte_perm(y.y, y.w, 0x7632)};
      }
      piece(i) = y;
    }
  }
  /// Codes of four values.
  static __device__ std::uint32_t int8_codes(std::uint32_t low, std::uint32_t high, float inverse) {
    constexpr float kRound = 12582912.0f;  // adds to 1.5 * 2^23: rounds, and leaves the code in the low byte
    const auto code = [&](std::uint32_t w, int i) {
      return __float_as_uint(__fadd_rn(__fmul_rn(value(w, i), inverse), kRound));
    };
    return __byte_perm(__byte_perm(code(low, 0), code(low, 1), 0x0040),
                       __byte_perm(code(high, 0), code(high, 1), 0x0040), 0x5410);
  }
  static __device__ std::uint32_t e4m3_codes(std::uint32_t low, std::uint32_t high, float inverse) {
    return pack_e4m3x4(value(low, 0) * inverse, value(low, 1) * inverse, value(high, 0) * inverse,
                       value(high, 1) * inverse);
  }
  /// The row becomes codes, those of E4M3 in the order of K's (code_chunk()), in the first half of its
  /// pieces. Returns their scale.
  __device__ float to_codes() const {
    constexpr bool kE4m3 = PrefillTraits<C>::kE4m3;
    // Rows of so many dims a block at a time, since registers are few: its codes come to where blocks before
    // it lay, or it lies.
    constexpr int kBlocks = C.head_dim > 256 ? C.head_dim / 128 : 1, kBlock = kPieces / kBlocks;
    uint4 x[kBlock / 2];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) {
        x[i] = piece(first + i / 4 * 8 + (kE4m3 ? 2 * half + i % 2 + i % 4 / 2 * 4 : 4 * half + i % 4));
      }
    };
    std::uint32_t most = 0;
    if constexpr (kBlocks == 1) {
      load(0);
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) most = larger(most, x[i]);
      most = largest(most);
    } else {
      most = largest();
    }
    std::conditional_t<kE4m3, fp8_row::Row, int8_row::Row> as;
    if constexpr (kE4m3) {
      as = fp8_row::row_of(most);
    } else {
      as = int8_row::row_of(most);
    }
    const auto codes = [&](std::uint32_t low, std::uint32_t high) {
      return kE4m3 ? e4m3_codes(low, high, as.inverse) : int8_codes(low, high, as.inverse);
    };
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kBlock) {
      if constexpr (kBlocks > 1) load(first);
      __syncwarp();  // other lanes have read what lay there
#pragma unroll
      for (int i = 0; i < kBlock / 4; ++i) {
        const int from = i / 2 * 4 + (kE4m3 ? i % 2 : i % 2 * 2);
        const uint4 &a = x[from], &b = x[from + (kE4m3 ? 2 : 1)];
        piece(first / 2 + i / 2 * 4 + 2 * half + i % 2) = {codes(a.x, a.y), codes(a.z, a.w), codes(b.x, b.y),
                                                           codes(b.z, b.w)};
      }
    }
    return as.scale;
  }
  /// The scale of the row, which becomes f16 or codes.
  __device__ float operator()() const {
    if constexpr (PrefillTraits<C>::kCodes) {
      return to_codes();
    } else {
      const float scale = f16_scale(largest());
      to_f16(1.0f / scale);
      return scale;
    }
  }
};

/// What QueryRow::to_codes() does, of a warp's rows, which are rotated as K is first, with the bits of
/// hadamard::rotate(): eight rows at a time, four lanes each, or four of eight, since registers are few.
template <PrefillConfig C>
struct RotatedQueries {
  static constexpr bool kE4m3 = PrefillTraits<C>::kE4m3;
  static constexpr int kRowLanes = C.head_dim > 256 ? 8 : 4, kRows = 32 / kRowLanes;  // at a time
  static constexpr int kOwn = C.head_dim / 8 / kRowLanes;                             // pieces of a lane
  static constexpr int kLaneBits = kE4m3 ? 0 : 1;  // of a piece's number: from this on two say whose it is
  static constexpr int kLastBit = kRowLanes == 8 ? 3 : -1;  // and this one
  static constexpr int kBlock = hadamard::block_size(C.head_dim);
  static_assert(kBlock >= 64 && kBlock <= 512);
  std::uint8_t* rows;  // 16 of them
  int lane;

  __device__ int number(int i) const {
    const int of_lane = lane / kRows;
    return of_lane % 4 << kLaneBits | (i & 1) << (kE4m3 ? 2 : 0) |
           (of_lane / 4 + i / 2 * (kRowLanes / 4)) * 8;
  }
  /// Stage `bit` over the pieces' numbers.
  template <int kBit>
  __device__ __forceinline__ void turn(float (&x)[kOwn][8]) const {
    constexpr bool kAcross = kBit == kLaneBits || kBit == kLaneBits + 1 || kBit == kLastBit;
    constexpr int kStep = kAcross || kBit < 3 ? 1 : 1 << (kBit - (kRowLanes == 8 ? 3 : 2));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!kAcross && (i & kStep) != 0) continue;
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        if constexpr (kAcross) {
          constexpr int kMask = kBit == kLastBit ? 16 : kRows << (kBit - kLaneBits);
          const float other = __shfl_xor_sync(~0u, x[i][d], kMask);
          x[i][d] = (lane & kMask) != 0 ? other - x[i][d] : x[i][d] + other;
        } else {
          const float a = x[i][d], b = x[i + kStep][d];
          x[i][d] = a + b, x[i + kStep][d] = a - b;
        }
      }
    }
  }
  /// Rotates the row that the lane has a part of. Returns the bits of its largest magnitude.
  __device__ std::uint32_t load(const QueryRow<C, false>& row, bool bfloat16, float (&x)[kOwn][8]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      unpack(row.piece(number(i)), bfloat16, x[i]);
      rotate_lanes<8, 8>(x[i], 0);
    }
    turn<0>(x), turn<1>(x), turn<2>(x);
    if constexpr (kBlock >= 128) turn<3>(x);
    if constexpr (kBlock >= 256) turn<4>(x);
    if constexpr (kBlock == 512) turn<5>(x);
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8 * kOwn; ++i) {
      x[i / 8][i % 8] *= hadamard::factor(kBlock);
      most = max(most, magnitude_bits(x[i / 8][i % 8]));
    }
#pragma unroll
    for (int i = 16; i >= kRows; i /= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
    return most;
  }
  /// Returns the scale of row `lane` % 16.
  __device__ float to_codes(bool bfloat16) const {
    float scale = 1.0f;
#pragma unroll 1
    for (int first = 0; first < 16; first += kRows) {
      const int own = first + lane % kRows;
      const QueryRow<C, false> row{rows + own * PrefillTraits<C>::kRowBytes, own % 8, 0};
      float x[kOwn][8];
      const std::uint32_t most = load(row, bfloat16, x);
      std::conditional_t<kE4m3, fp8_row::Row, int8_row::Row> as;
      if constexpr (kE4m3) {
        as = fp8_row::row_of(most);
      } else {
        as = int8_row::row_of(most);
      }
      const auto codes = [&](float(&v)[8]) {
#pragma unroll
        for (float& y : v) y = __fmul_rn(y, as.inverse);
        return kE4m3 ? e4m3_codes(v) : int8_codes(v);
      };
      __syncwarp();  // other lanes have read what lay there
#pragma unroll
      for (int i = 0; i < kOwn; i += 2) {  // two are 16 adjacent codes
        const uint2 a = codes(x[i]), b = codes(x[i + 1]);
        const int n = number(i);
        row.piece(kE4m3 ? n / 8 * 4 + n % 4 : n / 2) = {a.x, a.y, b.x, b.y};
      }
      if (lane % 16 / kRows * kRows == first) scale = as.scale;
    }
    return scale;
  }
};

/// The queries of an item, `queries` of the warpgroup, as the products with such keys take them. Where
/// several share them, by the first.
template <PrefillConfig C>
__device__ inline void scale_queries(Consumer<C>& c, std::uint8_t* queries, int kv_head) {
  if (c.share() > 0) return shared_rows_barrier(c);
  const int row = c.warp() * 16 + c.lane() % 16, half = c.lane() / 16;
  std::uint8_t* const at = queries + row * PrefillTraits<C>::kRowBytes;
  const auto scale = [&] {
    if constexpr (PrefillTraits<C>::kCodes) {
      if (c.p.rotate_k) {
        std::uint8_t* const rows = queries + c.warp() * (16 * PrefillTraits<C>::kRowBytes);
        return RotatedQueries<C>{rows, c.lane()}.to_codes(c.p.q_type == DType::kBFloat16);
      }
    }
    if (c.p.q_type == DType::kBFloat16) return QueryRow<C, true>{at, row % 8, half}();
    if constexpr (PrefillTraits<C>::kCodes || PrefillTraits<C>::kFourBits) {
      return QueryRow<C, false>{at, row % 8, half}();
    }
    return 1.0f;
  };
  float factor = scale() * c.p.scale_log2;
  if constexpr (PrefillTraits<C>::kPacked) {  // staged keys have it
    if (c.p.k.static_scale != nullptr) factor *= c.p.k.static_scale[kv_head * c.p.k.static_stride];
  }
  // Not 0, as of a row of zeros: masked logits stay infinite.
  c.s.query_factors[c.rows_index() * 64 + row] = factor == 0.0f ? 0x1p-126f : factor;
  fence_async_shared();
  shared_rows_barrier(c);
}

}  // namespace halftone::cuda
