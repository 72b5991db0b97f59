// The Hadamard rotation of rows that lie over lanes as device/lanes.h says.
#pragma once

#include "cuda/device/lanes.h"
#include "format/codec.h"
#include "format/hadamard.h"

namespace halftone::cuda {

/// The stages of hadamard::rotate() within blocks of up to a warp's chunks, in the same order.
__device__ __forceinline__ void rotate_stages(int block, float (&x)[kChunk], int lane) {
#pragma unroll
  for (int h = 1; h < kChunk; h *= 2) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = codec::ht_add(a, b);
      x[i + h] = codec::ht_sub(a, b);
    }
  }
#pragma unroll 1
  for (int h = 1; h * kChunk < block; h *= 2) {
    const float sign = lane & h ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {  // a + b and a - b: a product with +-1 is exact
      x[i] = codec::ht_fma(x[i], sign, __shfl_xor_sync(~0u, x[i], h));
    }
  }
}

/// hadamard::rotate().
__device__ __forceinline__ void rotate_row(int dim, float (&x)[kChunk], int lane = threadIdx.x) {
  const int block = hadamard::block_size(dim);
  rotate_stages(block, x, lane);
  const float factor = hadamard::factor(block);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = codec::ht_mul(x[i], factor);
}

/// Of a wide row, whose halves are one block.
__device__ __forceinline__ void rotate_halves(float (&low)[kChunk], float (&high)[kChunk],
                                              int lane = threadIdx.x) {
  rotate_stages(kHalfDims, low, lane);
  rotate_stages(kHalfDims, high, lane);
  constexpr float kFactor = hadamard::factor(2 * kHalfDims);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float a = low[i], b = high[i];
    low[i] = codec::ht_mul(codec::ht_add(a, b), kFactor);
    high[i] = codec::ht_mul(codec::ht_sub(a, b), kFactor);
  }
}

}  // namespace halftone::cuda
