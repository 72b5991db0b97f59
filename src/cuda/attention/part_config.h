// What kernels that are built per format know of K or V. Plain C++: tables of kernels have it.
#pragma once

#include <cstdint>

#include "halftone/format.h"

namespace halftone::cuda {

enum class ScaleMode : std::uint8_t {
  kStatic,  // 16-bit formats, and one scale per tensor or head: nothing is stored in a tile
  kToken,   // one stored scale per token
  kBlock,   // several stored scales per token, each for a group of 32, 64 or 128 dims
};

/// A group as wide as the head has the bytes of a scale per token and head.
constexpr ScaleMode scale_mode(const KvFormat& f, int head_dim) {
  if (!f.dynamic_scale()) return ScaleMode::kStatic;
  return f.granularity == Granularity::kGroup && f.group_size != head_dim ? ScaleMode::kBlock
                                                                          : ScaleMode::kToken;
}

/// What a kernel knows of K or V.
struct PartConfig {
  DType dtype;
  ScaleMode mode;
  bool asymmetric = false;
  int group_blocks = 1;  // blocks of 32 dims that share a scale, with ScaleMode::kBlock
  friend constexpr bool operator==(const PartConfig&, const PartConfig&) = default;
};

constexpr bool is_integer(DType t) { return t == DType::kInt8 || t == DType::kInt4; }

constexpr bool serves(const PartConfig& part, const KvFormat& f, int head_dim) {
  if (part.dtype != f.dtype || part.mode != scale_mode(f, head_dim) || part.asymmetric != f.asymmetric)
    return false;
  if (f.dynamic_scale() && f.scale_dtype != DType::kFloat16) return false;  // P times a scale is f16
  return part.mode != ScaleMode::kBlock || part.group_blocks * 32 == f.group_size;
}

/// What the named formats use.
namespace parts {
inline constexpr PartConfig kBf16{DType::kBFloat16, ScaleMode::kStatic},
    kFp16{DType::kFloat16, ScaleMode::kStatic}, kFp8{DType::kFloat8E4M3, ScaleMode::kStatic},
    kFp8Token{DType::kFloat8E4M3, ScaleMode::kToken}, kInt8{DType::kInt8, ScaleMode::kStatic},
    kInt8Token{DType::kInt8, ScaleMode::kToken}, kInt8G32{DType::kInt8, ScaleMode::kBlock, false, 1},
    kInt8G64{DType::kInt8, ScaleMode::kBlock, false, 2}, kInt8G128{DType::kInt8, ScaleMode::kBlock, false, 4},
    kInt4Token{DType::kInt4, ScaleMode::kToken, true}, kInt4G32{DType::kInt4, ScaleMode::kBlock, true, 1},
    kInt4G64{DType::kInt4, ScaleMode::kBlock, true, 2}, kInt4G128{DType::kInt4, ScaleMode::kBlock, true, 4};
}  // namespace parts

}  // namespace halftone::cuda
