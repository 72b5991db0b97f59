// Staging: rows of K and V of a cache, in the types that the prefill kernels multiply, into the workspace.
#pragma once

#include "cuda/dequantize/params.h"
#include "format/host_device.h"

namespace halftone::cuda {

enum class StagedAs : std::uint8_t {
  kValues,  ///< V in f16, or in bf16 where f16 might not hold it; one with static scales divided by
            ///< value_unit()
  kKeys,    ///< K in f16, its channels' scale back but not their offset, each divided by a power of two, its
            ///< scale, where f16 would not hold it
  kCodes,   ///< K in 8-bit integers with a scale per key, in the basis in which the cache stores it: those of
            ///< the cache where it has such, else those of int8_row.h
  kE4m3Codes,   ///< K in E4M3 with e4m3_scale() per key, likewise, in the order of code_chunk()
  kScales,      ///< the scale per key that the cache stores beside codes which are read where they are
  kE4m3Values,  ///< V's codes of E4M3 as the cache stores them, in tiles of 16 tokens (value_tiles.h)
};

struct StageParams {
  DequantizeParams rows;  // out: [rows, kv_heads, dim], of codes a byte each
  float* scales;          // of K: [kv_heads, rows]
  StagedAs as;
  bool has_codes;  // of K as integers: the cache's own codes and scales are taken
  bool second;     // right after another kernel that stages
};

/// A page has codes of 8 bits of K in this order: of each 64 dims, chunks of 8 of the first 32 and of the
/// last 32 take turns (format/page.h). Where chunk `chunk` of a row lies.
HT_HOST_DEVICE constexpr int code_chunk(int chunk) {
  const int within = chunk % 8;
  return chunk - within + within % 4 * 2 + within / 4;
}

/// cudaError_t as int.
int launch_stage(const StageParams& params, void* stream);

/// K of tensors as StagedAs::kCodes has it.
struct StageRowsParams {
  const void* rows;                        // [tokens, heads, dim], rows at multiples of 16 bytes
  std::int64_t token_stride, head_stride;  // elements
  std::int64_t tokens;
  const std::int32_t* used;  // how many of them are requests'
  std::int32_t heads, dim;   // 128, 192, 256 or 512 dims
  DType type;                // kFloat16 or kBFloat16
  std::uint8_t* out;         // [tokens, heads, dim]
  float* scales;             // [heads, tokens]
};

/// cudaError_t as int.
int launch_stage_rows(const StageRowsParams& params, void* stream);

}  // namespace halftone::cuda
