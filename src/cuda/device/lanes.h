// How a row of K or V lies over the lanes of append, dequantise, staging and the universal kernel.
#pragma once

namespace halftone::cuda {

inline constexpr int kChunk = 8;  // consecutive dims that a lane holds
// Chunks of a warp. Rows of more have two halves: lane l holds chunk l of each, and they are called wide.
inline constexpr int kHalfChunks = 32;
inline constexpr int kHalfDims = kHalfChunks * kChunk;

constexpr bool is_wide(int dim) { return dim > kHalfDims; }

/// Lanes that a row fills, idle ones included.
constexpr int lanes_of(int dim) { return dim <= 64 ? 8 : dim <= 128 ? 16 : 32; }

}  // namespace halftone::cuda
