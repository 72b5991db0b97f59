// Values of several lanes of a warp as one, which all of them have.
#pragma once

namespace halftone::cuda {

/// The largest of the lanes whose numbers differ in bits from kFrom up to, but not including, kEnd.
template <int kFrom, int kEnd>
__device__ inline float largest_of_lanes(float x) {
#pragma unroll
  for (int i = kFrom; i < kEnd; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

/// Likewise their sum, neighbours first.
template <int kFrom, int kEnd>
__device__ inline float sum_of_lanes(float x) {
#pragma unroll
  for (int i = kFrom; i < kEnd; i *= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

}  // namespace halftone::cuda
