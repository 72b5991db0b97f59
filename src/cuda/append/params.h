// What the kernels of append receive: every pointer with its shape.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.h"
#include "format/channels.h"
#include "format/head_dim.h"
#include "format/part.h"
#include "halftone/cache.h"

namespace halftone::cuda {

inline constexpr int kMaxBlocks = kHeadDims.back() / 32;  // of 32 dims

/// A span of an append: K, V, or a piece of a latent cache's record.
struct AppendPart {
  page::Part part;
  std::int32_t segment_log2;  // a row fills 1 << segment_log2 lanes, idle ones included
  std::int32_t group_log2;    // 1 << group_log2 lanes share a scale
  // Packed formats: the first string of a block of 32 dims, in bytes from the tile, and from there to the
  // next string. Not of a last block of 16.
  std::int32_t block_first[kMaxBlocks], block_step[kMaxBlocks];
  // Stored params: the first scale, in bytes from the tile, and from there to the next token's, the next
  // group's and the min.
  std::int32_t scale_first, scale_token, scale_group, min_away;
  const void* input;  // [tokens, kv_heads, dim], strides below, in elements
  std::int64_t token_stride, head_stride;
  DType input_type;
  bool aligned;                // rows of `input` begin at multiples of 16 bytes
  const float* static_scale;   // [1] or [kv_heads], or null
  const float* static_min;     // likewise
  std::int32_t static_stride;  // 0 per tensor, 1 per head
  Channels channels;           // of K
  float largest;               // magnitude of a value that is accepted
};

struct AppendParams {
  AppendPart parts[2];  // K and V; of a latent cache the latent and the rotary dims
  std::int64_t tile_bytes, head_bytes;
  std::uint8_t* pages;  // [num_pages, page_stride bytes]
  std::int64_t page_stride;
  std::int64_t num_pages;
  std::int32_t page_log2;
  std::int32_t kv_heads;
  std::int64_t tokens;
  const std::int64_t* slot_mapping;  // [tokens], or null: the four below
  const std::int32_t* cu_seqlens;    // [batch + 1]
  const std::int32_t* lengths;       // [batch]
  const std::int32_t* block_table;   // [batch, table_stride], table_width entries in use
  std::int64_t table_stride, table_width;
  std::int32_t batch;
  RopePairing pairing;
  std::int32_t rope_half;  // rotary_dim / 2
  std::int64_t rope_rows;
  bool rope_aligned;  // rows of cos and sin begin at multiples of 16 bytes
  const float* cos;   // [rope_rows, rope_half]
  const float* sin;
  const std::int32_t* positions;  // [tokens]
  std::int32_t* status;           // [1] or null: bits of format/status.h
};

/// cudaError_t as int. `stream` is a cudaStream_t.
int launch_append(const AppendParams& params, void* stream);
/// The same for a latent cache.
int launch_append_records(const AppendParams& params, void* stream);
/// lengths[i] += cu_seqlens[i + 1] - cu_seqlens[i] for every request.
int launch_advance(std::int32_t* lengths, const std::int32_t* cu_seqlens, std::int32_t batch, void* stream);

}  // namespace halftone::cuda
