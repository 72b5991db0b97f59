// The prefill kernels that are built: a row each, its shape chosen for the registers and the shared memory of
// an SM.
#pragma once

#include <array>

#include "halftone/attention.h"

namespace halftone::cuda {

/// One kernel. The packed query rows of a unit are M of the products, 64 for each warpgroup; tokens are N of
/// Q K^T and k of P V.
struct PrefillConfig {
  DType dtype;     ///< of Q and V, of the operands of P V and, in 16-bit arithmetic, of K and Q K^T
  int head_dim;    ///< of Q, K, V and O
  int warpgroups;  ///< that compute
  int kv_tile;     ///< tokens of a step: what registers hold of S beside O and P
  int stages;      ///< tiles of K, and of V, in shared memory
  Arithmetic arithmetic = Arithmetic::k16Bit;
};

/// Whether Q K^T multiplies 8-bit integers: K is staged as codes with a scale per key, Q becomes codes here.
constexpr bool has_codes(const PrefillConfig& c) { return c.arithmetic == Arithmetic::kHalfInt8; }

constexpr int rows_of(const PrefillConfig& c) { return 64 * c.warpgroups; }

inline constexpr std::array kPrefillTable{
    PrefillConfig{DType::kBFloat16, 64, 3, 96, 4},  PrefillConfig{DType::kFloat16, 64, 3, 96, 4},
    PrefillConfig{DType::kBFloat16, 128, 3, 80, 3}, PrefillConfig{DType::kFloat16, 128, 3, 80, 3},
    PrefillConfig{DType::kBFloat16, 256, 2, 80, 2}, PrefillConfig{DType::kFloat16, 256, 2, 80, 2},
    PrefillConfig{DType::kBFloat16, 128, 3, 80, 4, Arithmetic::kHalfInt8},
    PrefillConfig{DType::kBFloat16, 256, 2, 80, 2, Arithmetic::kHalfInt8},
};

constexpr bool is_built(const PrefillConfig& c) {
#ifdef HALFTONE_CUDA_HEAD_DIM  // a smaller build for development
  return c.head_dim == HALFTONE_CUDA_HEAD_DIM;
#else
  return c.head_dim > 0;
#endif
}

}  // namespace halftone::cuda
