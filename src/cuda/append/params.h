// What the kernels of append receive: every pointer with its shape.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.h"
#include "format/channels.h"
#include "format/head_dim.h"
#include "format/host_device.h"
#include "format/part.h"
#include "halftone/cache.h"

namespace halftone::cuda {

inline constexpr int kMaxBlocks = kHeadDims.back() / 32;  // of 32 dims

/// A span of an append: K, V, or a piece of a latent cache's record.
struct AppendPart {
  page::Part part;
  std::int32_t segment_log2;  // a row fills 1 << segment_log2 lanes, idle ones included
  std::int32_t group_log2;    // 1 << group_log2 chunks of 8 dims share a scale
  // Packed formats: the first string of a block of dims, in bytes from the tile, and from there to the
  // next string.
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
  const std::int64_t* slot_mapping;  // [tokens] or null; negative: skipped
  const std::int32_t* cu_seqlens;    // [batch + 1], or null: tokens go where slot_mapping says, not by these:
  const std::int32_t* lengths;       // [batch], before the new tokens or
  std::int32_t counted;              // 1: with them
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
  bool next_knows;                // the next kernel may begin before the previous one has ended
  bool settled;                   // all but K and V may be read before that
};

/// The new tokens of a step, as a kernel of attention receives them: the last keys of a request, one for each
/// of its queries.
struct StepParams {
  // With AttentionParams::cache_settled: the promise is about older tokens. New ones are read only when the
  // previous kernel of the stream has ended and, where `appends`, this one has written them.
  bool new_tokens_late;
  bool appends;           // writes the new tokens
  std::int32_t* lengths;  // [batch], which become the schedule's; null: no
  AppendParams append;    // with `appends`: token t is query t's
};

/// True if a chunk is one 16-byte load that can be issued ahead of its use.
HT_HOST_DEVICE inline bool loads_early(const AppendPart& part) {
  return part.aligned && part.input_type != DType::kFloat32;
}

/// The same of a token of a latent cache.
HT_HOST_DEVICE inline bool loads_early(const AppendParams& p) {
  return loads_early(p.parts[0]) && loads_early(p.parts[1]);
}

HT_HOST_DEVICE inline bool ropes(const AppendParams& p, const AppendPart& part) {
  return part.part.which == KvPart::kK && p.pairing != RopePairing::kNone;
}

/// True where a chunk has whole angles of RoPE, and lanes that have none find a row of the tables to read, as
/// rope_whole_row() does.
HT_HOST_DEVICE inline bool has_whole_angles(const AppendParams& p) {
  const int angles = p.pairing == RopePairing::kInterleaved ? kChunk / 2 : kChunk;
  return p.pairing == RopePairing::kNone || (p.rope_half % angles == 0 && p.rope_rows > 0);
}

/// True for a load for each chunk, f16 scales, and whole angles.
HT_HOST_DEVICE inline bool has_whole_chunks(const AppendParams& p, const AppendPart& part) {
  return loads_early(part) && (!ropes(p, part) || has_whole_angles(p)) &&
         (!part.part.format.dynamic_scale() || part.part.format.scale_dtype == DType::kFloat16);
}

/// And for blocks of 32 dims.
HT_HOST_DEVICE inline bool is_whole(const AppendParams& p, const AppendPart& part) {
  return part.part.dim % 32 == 0 && has_whole_chunks(p, part);
}

/// True for the common case: nothing but the codec, which for 16 bits is none.
HT_HOST_DEVICE inline bool is_plain(const AppendParams& p, const AppendPart& part) {
  const DType type = part.part.format.dtype;
  return is_whole(p, part) && !ropes(p, part) && !part.channels.any() && !part.part.rotated &&
         (dtype_bits(type) != 16 || type == part.input_type);
}

/// cudaError_t as int. `stream` is a cudaStream_t.
int launch_append(const AppendParams& params, void* stream);
/// The same for a latent cache.
int launch_append_records(const AppendParams& params, void* stream);
/// lengths[i] = grown[i] for every request that gets tokens, if the schedule has room for them.
int launch_settle(std::int32_t* lengths, const std::int32_t* grown, const std::int32_t* cu_seqlens,
                  std::int32_t batch, void* stream);
/// lengths[i] += cu_seqlens[i + 1] - cu_seqlens[i] for every request. `next_knows`: as in AppendParams.
int launch_advance(std::int32_t* lengths, const std::int32_t* cu_seqlens, std::int32_t batch, bool next_knows,
                   void* stream);

}  // namespace halftone::cuda
