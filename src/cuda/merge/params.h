// What the merge kernel receives.
#pragma once

#include <cstdint>

#include "halftone/types.h"

namespace halftone::cuda {

/// Parts of one merge: they are named in the kernel's parameters, of which there may be 32,764 bytes.
inline constexpr int kMaxMergeParts = 512;

/// A tensor of shape [rows, heads, dim], strides in elements, the last one 1.
struct MergeValues {
  void* data;
  std::int64_t row_stride, head_stride;
  DType type;
};

/// f32 [rows, heads], strides in elements; data null if absent.
struct MergeLse {
  float* data;
  std::int64_t row_stride, head_stride;
};

struct MergePart {
  MergeValues out;
  MergeLse lse;
};

struct MergeShape {
  std::int64_t rows, heads, dim;
  bool aligned;  // dim is a multiple of 8 and every row of every tensor begins at a multiple of 16 bytes
};

template <int kParts>
struct MergeParams {
  MergeShape shape;
  MergeValues out;
  MergeLse lse;
  std::int32_t count;
  MergePart parts[kParts];
};
using LargestMerge = MergeParams<kMaxMergeParts>;
static_assert(sizeof(LargestMerge) <= 32764);

/// cudaError_t as int. `stream` is a cudaStream_t.
int launch_merge(const LargestMerge& params, void* stream);

}  // namespace halftone::cuda
