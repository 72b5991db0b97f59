// What a row's probabilities are relative to, and where they stand in the range of their type.
#pragma once

#include "cuda/prefill/config.h"

namespace halftone::cuda {

/// The state of a lane's rows g and g + 8: base-2 logits minus `offset` are the exponents of P. The offset is
/// the maximum of the first tile less kFirstLog2. Maxima of plain tiles are not looked for: only one whose P
/// add up to more than the type of P takes well raises the offset.
template <PrefillConfig C>
struct RunningSoftmax {
  // P of f16 begins near the middle of its range, whose lower end is near. E4M3 of weights below 2^-15 of the
  // largest is 0. In both, sums of more than they hold are lowered. bf16 has the range of floats, and begins
  // so low that few rows ever reach the limit, which is that of O: sums of P V with V up to 2^100.
  static constexpr bool kE4m3 = C.dtype == DType::kFloat8E4M3;
  static constexpr bool kLowers = C.dtype != DType::kBFloat16;
  static constexpr float kFirstLog2 = kE4m3 ? 5.0f : C.dtype == DType::kFloat16 ? 7.0f : -16.0f;
  static constexpr float kLargestSum =  // of a lane and tile
      kE4m3                        ? 448.0f
      : C.dtype == DType::kFloat16 ? 32768.0f
                                   : 4096.0f;
  static constexpr int kLoweredLog2 = kE4m3 ? 6 : 7;  // where a larger one is put: [2^6, 2^7) or twice that
  static constexpr float kMostRaised = 127.0f;        // log2: nothing of O is left
  static constexpr float kEmpty = -3.402823466e38f;   // finite, so that masked logits give P = 0
  float offset[2] = {kEmpty, kEmpty};
  float sum[2] = {0.0f, 0.0f};  // of the lane's columns

  __device__ bool empty(int r) const { return offset[r] == kEmpty; }
};

}  // namespace halftone::cuda
