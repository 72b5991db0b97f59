// Queries for the products with staged keys: they become f16, or codes, with a scale per row, in their place
// in shared memory.
#pragma once

#include "cuda/device/range.h"
#include "cuda/device/values.h"
#include "cuda/prefill/compute.h"
#include "format/int8_row.h"

namespace halftone::cuda {

/// Half a row, which a lane has of one of 16 rows: the other half is the lane's 16 lanes away.
template <int kPieces>  // of 8 values
struct QueryHalf {
  std::uint32_t words[kPieces][4];  // 16-bit values

  __device__ float value(bool bf16, int i) const { return half_of(words[i / 8][i / 2 % 4], i % 2, bf16); }
  /// Bits of the largest magnitude of the row, a NaN's if there is one.
  __device__ std::uint32_t largest(bool bf16) const {
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kPieces * 8; ++i) most = max(most, magnitude_bits(value(bf16, i)));
    return max(most, __shfl_xor_sync(~0u, most, 16));
  }
  /// Piece `i` in f16.
  __device__ uint4 in_f16(bool bf16, int i, float inverse) const {
    std::uint32_t x[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      x[w] = pack_f16x2(value(bf16, 8 * i + 2 * w) * inverse, value(bf16, 8 * i + 2 * w + 1) * inverse);
    }
    return {x[0], x[1], x[2], x[3]};
  }
  /// Values 4 i to 4 i + 3 as codes.
  __device__ std::uint32_t codes(bool bf16, int i, float inverse) const {
    constexpr float kRound = 12582912.0f;  // adds to 1.5 * 2^23: rounds, and leaves the code in the low byte
    std::uint32_t code[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      code[e] = __float_as_uint(__fadd_rn(__fmul_rn(value(bf16, 4 * i + e), inverse), kRound));
    }
    return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
  }
};

/// A warp's 16 rows, chunks of 64 16-bit values swizzled over 128 bytes. Codes make chunks of 128 of them.
template <PrefillConfig C>
__device__ inline void scale_queries(Consumer<C>& c, std::uint8_t* queries) {
  using Traits = PrefillTraits<C>;
  constexpr int kPieces = C.head_dim / 16;
  const int row = c.warp() * 16 + c.lane() % 16, half = c.lane() / 16, swizzle = row % 8;
  const bool bf16 = c.p.q_type == DType::kBFloat16;
  std::uint8_t* const q = queries + row * 128;
  const auto piece = [&](int i) {
    return reinterpret_cast<uint4*>(q + i / 8 * (64 * 128) + (i % 8 ^ swizzle) * 16);
  };
  QueryHalf<kPieces> x;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint4 w = *piece(half * kPieces + i);
    x.words[i][0] = w.x, x.words[i][1] = w.y, x.words[i][2] = w.z, x.words[i][3] = w.w;
  }
  float scale = 1.0f;
  if constexpr (Traits::kCodes) {
    const int8_row::Row as = int8_row::row_of(x.largest(bf16));
    const float inverse = as.inverse;
    scale = as.scale;
    __syncwarp();  // all have read: codes lie where the other half's values lay
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i) {
      *piece(half * (kPieces / 2) + i) = {x.codes(bf16, 4 * i, inverse), x.codes(bf16, 4 * i + 1, inverse),
                                          x.codes(bf16, 4 * i + 2, inverse),
                                          x.codes(bf16, 4 * i + 3, inverse)};
    }
  } else if (bf16) {
    scale = f16_scale(x.largest(true));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) *piece(half * kPieces + i) = x.in_f16(true, i, 1.0f / scale);
  }
  const float factor = scale * c.p.scale_log2;
  // Not 0, as of a row of zeros: masked logits stay infinite.
  c.s.query_factors[c.group() * 64 + row] = factor == 0.0f ? 0x1p-126f : factor;
  fence_async_shared();
  team_barrier(c.group());
}

}  // namespace halftone::cuda
