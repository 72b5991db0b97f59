// Rows of f32, f16 or bf16 elements to and from fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "format/codec.h"
#include "halftone/types.h"

namespace halftone::cpu {

/// Reads `count` adjacent elements of `dtype` (kFloat32, kFloat16 or kBFloat16) into `out`.
inline void load_row(DType dtype, const void* row, int count, float* out) {
  const auto* half = static_cast<const std::uint16_t*>(row);
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, static_cast<std::size_t>(count) * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    for (int i = 0; i < count; ++i) out[i] = codec::f32_from_f16(half[i]);
  } else {
    for (int i = 0; i < count; ++i) out[i] = codec::f32_from_bf16(half[i]);
  }
}

/// Rounds `count` values to `dtype`, as codec.h does, and writes them next to each other. In vectors.
void store_row(DType dtype, const float* values, int count, void* row);

/// Address of row (i, j) of a rank-3 view whose last dim is contiguous.
inline void* row_at(const TensorView& t, std::int64_t i, std::int64_t j) {
  const std::int64_t element = i * t.strides[0] + j * t.strides[1];
  return static_cast<std::uint8_t*>(t.data) + element * (dtype_bits(t.dtype) / 8);
}

/// Dims [first, first + count) of a rank-3 view whose last dim is contiguous.
inline TensorView dims_of(const TensorView& t, int first, int count) {
  TensorView part = t;
  if (t.data != nullptr) part.data = static_cast<std::uint8_t*>(t.data) + first * (dtype_bits(t.dtype) / 8);
  part.shape[2] = count;
  return part;
}

}  // namespace halftone::cpu
