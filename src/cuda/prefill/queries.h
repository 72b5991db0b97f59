// Queries for the products with staged and packed keys: they become f16, or codes, with a scale per row, in
// their place in shared memory.
#pragma once

#include "cuda/device/range.h"
#include "cuda/device/values.h"
#include "cuda/prefill/compute.h"
#include "format/fp8_row.h"
#include "format/int8_row.h"

namespace halftone::cuda {

/// A warp's 16 rows of Q where they lie: chunks of 16-bit values, swizzled over a row of them. A row is of
/// two lanes, 16 apart. A few registers suffice: the products of the item before may still be under way.
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

  /// Bits of the largest magnitude of the row, a NaN's if there is one.
  __device__ std::uint32_t largest() const {
    std::uint32_t most = 0;  // of even and odd values: integers order them
#pragma unroll 4
    for (int i = 0; i < kPieces / 2; ++i) {
      const uint4 x = piece(half * (kPieces / 2) + i);
      most = __vmaxu2(most, __vmaxu2(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu));
      most = __vmaxu2(most, __vmaxu2(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu));
    }
    most = max(most >> 16, most & 0xffffu);
    return magnitude_bits(value(max(most, __shfl_xor_sync(~0u, most, 16)), 0));
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
  /// A chunk's 64 values at a time become half a chunk, those of E4M3 in the order of K's (code_chunk()):
  /// they lie where values lay that have been read.
  __device__ void to_codes(float inverse) const {
    const auto codes = [&](std::uint32_t low, std::uint32_t high) {
      return PrefillTraits<C>::kE4m3 ? e4m3_codes(low, high, inverse) : int8_codes(low, high, inverse);
    };
    constexpr bool kApart = PrefillTraits<C>::kE4m3;
#pragma unroll 1
    for (int chunk = 0; chunk < C.head_dim / 64; ++chunk) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = piece(8 * chunk + (kApart ? 2 * half + i % 2 + i / 2 * 4 : 4 * half + i));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 &a = x[kApart ? i : 2 * i], &b = x[kApart ? i + 2 : 2 * i + 1];
        piece(4 * chunk + 2 * half + i) = {codes(a.x, a.y), codes(a.z, a.w), codes(b.x, b.y),
                                           codes(b.z, b.w)};
      }
    }
  }
  /// The scale of the row, which becomes f16 or codes.
  __device__ float operator()() const {
    if constexpr (PrefillTraits<C>::kCodes) {
      using As = std::conditional_t<PrefillTraits<C>::kE4m3, fp8_row::Row, int8_row::Row>;
      As as;
      if constexpr (PrefillTraits<C>::kE4m3) {
        as = fp8_row::row_of(largest());
      } else {
        as = int8_row::row_of(largest());
      }
      to_codes(as.inverse);
      return as.scale;
    } else {
      const float scale = f16_scale(largest());
      to_f16(1.0f / scale);
      return scale;
    }
  }
};

/// The queries of an item, `queries` of the warpgroup, as the products with such keys take them. Where
/// several share them, by the first.
template <PrefillConfig C>
__device__ inline void scale_queries(Consumer<C>& c, std::uint8_t* queries, int kv_head) {
  if (c.share() > 0) return shared_rows_barrier(c);
  const int row = c.warp() * 16 + c.lane() % 16, half = c.lane() / 16;
  std::uint8_t* const at = queries + row * PrefillTraits<C>::kRowBytes;
  float scale = 1.0f;
  if (c.p.q_type == DType::kBFloat16) {
    scale = QueryRow<C, true>{at, row % 8, half}();
  } else if constexpr (PrefillTraits<C>::kCodes || PrefillTraits<C>::kFourBits) {
    scale = QueryRow<C, false>{at, row % 8, half}();
  }
  float factor = scale * c.p.scale_log2;
  if constexpr (PrefillTraits<C>::kPacked) {  // staged keys have it
    if (c.p.k.static_scale != nullptr) factor *= c.p.k.static_scale[kv_head * c.p.k.static_stride];
  }
  // Not 0, as of a row of zeros: masked logits stay infinite.
  c.s.query_factors[c.rows_index() * 64 + row] = factor == 0.0f ? 0x1p-126f : factor;
  fence_async_shared();
  shared_rows_barrier(c);
}

}  // namespace halftone::cuda
