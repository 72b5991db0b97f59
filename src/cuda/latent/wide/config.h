// The kernels of latent attention for many heads that are built: a row each.
#pragma once

#include <array>

#include "halftone/types.h"

namespace halftone::cuda {

/// One kernel over tokens of 656 bytes: 512 e4m3 in groups of 128 with f32 scales, 64 bf16.
struct LatentWideConfig {
  DType q_dtype;
  int blocks;  ///< thread blocks of a cluster, for 64 packed rows each: they share the tokens they dequantise
};

constexpr int rows_of(const LatentWideConfig& c) { return 64 * c.blocks; }

inline constexpr std::array kLatentWideTable{
    LatentWideConfig{DType::kBFloat16, 1},
    LatentWideConfig{DType::kBFloat16, 2},
    LatentWideConfig{DType::kFloat16, 1},
    LatentWideConfig{DType::kFloat16, 2},
};

}  // namespace halftone::cuda
