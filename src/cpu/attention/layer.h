// One call of run() in the form that the kernels read: plain values and pointers, nothing to look up.
#pragma once

#include <cstdint>

#include "cpu/attention/layout_map.h"
#include "format/channels.h"
#include "format/head_dim.h"
#include "halftone/attention.h"
#include "plan/plan.h"

namespace halftone::cpu {

/// Tokens of a chunk: one step of the online softmax. Chunks begin at absolute multiples of it, so that a
/// row's bits do not depend on where its unit's range begins.
inline constexpr int kChunkTokens = 128;
/// The blocked path takes half of it at a time: it keeps decoded values.
inline constexpr int kBlockedTokens = 64;
inline constexpr int kWeightWords = kBlockedTokens / 4;  ///< of four weights of a byte
inline constexpr int kChunkTiles = kChunkTokens / kTileTokens;
inline constexpr int kMaxRows = 256;   ///< packed rows of a unit
inline constexpr int kStripRows = 64;  ///< of the blocked path, which has that many in hand at a time
inline constexpr int kMaxDim = kHeadDims.back();
inline constexpr int kMaxGroups = kMaxDim / 32;  ///< scales per token and head
/// Requests of up to this many packed rows take the direct path, which reads codes where they lie; others
/// decode each chunk to fp32 first. Counted per request, so that a row's bits do not depend on how rows are
/// blocked.
inline constexpr int kDirectRows = 16;

/// K or V of a layer.
struct Side {
  Element element = Element::kF32;
  int dim = 0;
  int groups = 0;  ///< scales per token and head: 0 none, 1 static or per token (and head), else per group
  bool stored_params = false;  ///< scales lie in the pages
  bool has_min = false;
  bool f32_params = false;              ///< dtype of stored scales
  int group_size = 0;                   ///< 0 unless groups > 1 can occur (Granularity::kGroup)
  const float* static_scale = nullptr;  // [1] or [kv_heads]
  const float* static_min = nullptr;
  bool static_per_head = false;
  std::int64_t data_offset = 0;  ///< paged: within a tile
  std::int64_t param_offset = 0;
  const std::uint8_t* plain = nullptr;  // plain tensors
  std::int64_t token_bytes = 0;         ///< row order: distance of two tokens
  std::int64_t head_bytes = 0;          ///< plain tensors: distance of two heads

  /// False when every code and scale is an integer or a caller-checked number, so that no NaN can be read.
  bool may_hold_nan() const { return stored_params || element <= Element::kE4M3; }
};

/// Whether they are codes with one scale, and no min, for all dims of a token and head.
inline bool has_one_scale(const Side& side) {
  return !row_order(side.element) && !side.has_min && side.groups == 1;
}

struct Gather;

struct Layer {
  const Plan::Impl* plan = nullptr;
  const AttentionArgs* args = nullptr;
  int group = 1;
  int head_dim = 0;
  int v_dim = 0;
  int page_log2 = 0;
  bool paged = true;
  bool rotate_k = false;  ///< K is stored rotated: so must Q be
  bool rotate_v = false;
  Channels channels;                    ///< of K: Q takes up their scale, rows at their end the offset
  const std::int32_t* table = nullptr;  // [batch, max_pages_per_request]
  std::int64_t table_stride = 0;
  std::int64_t num_pages = 0;
  const std::uint8_t* pages = nullptr;
  std::int64_t page_stride = 0;
  const float* slopes = nullptr;  // [q_heads] or null
  Side k, v;
  Arithmetic arithmetic = Arithmetic::k16Bit;
  bool bf16_sums_q = false;  ///< k16Bit: rows of Q, as K meets them, are a rotation of values of bf16
  bool bf16_q = false;       ///< k16Bit: rows of Q, as K meets them, are values of bf16
  bool stored_k = false;     ///< blocked path: K's codes are used as they are, with one scale per token
  bool grouped_k = false;    ///< k16Bit, blocked path: likewise, with a scale per group or with a min
  /// kHalfInt8: V is rounded to this 16-bit type; kFloat32: it has it.
  DType v_type = DType::kFloat32;
  bool bf16_weights = false;  ///< kHalfInt8: that type is bf16, and P's as well
  bool bare_v = false;        ///< kFp8: V's static scale is left to the rows' end
  const LayerMaps* maps = nullptr;
  const Gather* gather = nullptr;  ///< latent caches and listed keys: tokens one by one
};

/// Rows of one unit and the keys that one item attends to.
struct Item {
  int request;
  int kv_head;
  int row_begin;
  int rows;
  int kv_begin;
  int kv_end;
  int q_len;
  int kv_len;
  std::int64_t q_first;   ///< first query token of the request in q and out
  std::int64_t kv_first;  ///< plain K and V: first key token of the request
};

/// What one row sees and where it stands.
struct RowView {
  std::int32_t begin;  ///< keys [begin, end)
  std::int32_t end;
  std::int32_t position;  ///< p of Mask
  float slope;
};

inline RowView row_view(const Layer& layer, const Item& item, int row) {
  const Mask& mask = layer.plan->problem.mask;
  const int packed = item.row_begin + row;
  const std::int64_t p = std::int64_t{packed / layer.group} + item.kv_len - item.q_len;
  std::int64_t begin = 0, end = item.kv_len;
  if (mask.window_left >= 0 && p - mask.window_left > begin) begin = p - mask.window_left;
  if (mask.causal && p + 1 < end) end = p + 1;
  if (mask.window_right >= 0 && p + 1 + mask.window_right < end) end = p + 1 + mask.window_right;
  if (end < 0) end = 0;
  if (begin > end) begin = end;
  const int head = item.kv_head * layer.group + packed % layer.group;
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end), static_cast<std::int32_t>(p),
          layer.slopes == nullptr ? 0.0f : layer.slopes[head]};
}

/// Working memory of the kernels that multiply bytes: see byte_dots-inl.h and byte_sums-inl.h.
struct alignas(64) ByteScratch {
  std::int32_t columns[kChunkTokens * kMaxDim / 4];  ///< K of a chunk, [column][kChunkTokens]
  float k_scale[kMaxGroups * kChunkTokens];          // [group][kChunkTokens]
  float k_zero[kMaxGroups * kChunkTokens];           // likewise, whole numbers
  float k_offset[kMaxGroups * kChunkTokens];
  float v_offset[kMaxGroups * kChunkTokens];
  std::int32_t v_zero[kMaxGroups * kChunkTokens];
  float seen_scale[kMaxGroups * kChunkTokens];  ///< of V, 0 where no row sees the token
  std::int32_t v_start[4 * 3 * 16];             ///< where sums begin, [digit][row][16]
  float offset_sums[kDirectRows * kMaxGroups * 16];
  std::int32_t q[kDirectRows * kMaxDim / 2];           ///< per block of rows: [column][half][2 digits][rows]
  std::int32_t q_start[kDirectRows * kMaxGroups * 2];  ///< per block of rows: [group][2 digits][rows]
  float q_sums[kDirectRows * kMaxGroups * 3];          ///< likewise: sums of both digits, then of all three
  struct LowDigit {
    std::int32_t column;  ///< offset in `columns`
    std::int32_t shift;   ///< 4 bits: 4 for the high nibbles
    std::int32_t digits;  ///< of four dims
    std::int32_t start;   ///< where their sum begins
    float sum;            ///< of the digits
    std::int32_t group;
    std::int32_t row;  ///< of the block
  };
  LowDigit low[kDirectRows * kMaxDim / 4];         ///< per block of rows: of Q where they are not 0
  float q_unit[kDirectRows];                       ///< value of a row's lowest digit
  std::uint8_t pattern[kChunkTiles * 4 * 3 * 64];  ///< digits of V's weights, [tile][row][digit][64]
  float unit[4 * 16];                              ///< [row][dword]: value of the lowest digit
  bool finite_offsets;                             ///< all of v_offset's
};

/// Working memory of the blocked path where operands have 8 bits: see int8_rows-inl.h, fp8_rows-inl.h and
/// value_block-inl.h.
struct alignas(64) CodeScratch {
  static constexpr int kMaxWidth = kMaxDim + 2 * kMaxLanes;
  std::int32_t q[kMaxRows * kMaxWidth / 4];    ///< codes, per strip [column][rows]
  std::int32_t q_start[kMaxRows];              ///< where sums begin
  std::uint8_t k[kBlockedTokens * kMaxWidth];  ///< codes, biased, [token][width]
  float q_scale[kMaxRows];                     ///< of a row
  float q_sums[kMaxRows * kMaxGroups];         ///< of Q over the dims of a group, per strip [group][rows]
  float k_scale[kBlockedTokens];               ///< of a token whose K is quantised here
  float v[kChunkTokens * kMaxDim];             ///< the block of V, tiles as decoded: codes, or code * scale
  union {
    std::int32_t v_codes[kChunkTokens / 4 * kMaxDim];  ///< or four codes each, [four tokens][dim]
    float v_pairs[kBlockedTokens / 2 * kMaxDim];       ///< a chunk in bf16: see pair_output-inl.h
  };
  std::int32_t v_turned[kBlockedTokens / 4 * kMaxDim];  ///< of a chunk, [dim][four tokens]
  float v_scale[kMaxDim];                               ///< of a channel
  float v_inverse[kMaxDim];
  std::int32_t p[kWeightWords * kStripRows];  ///< four weights each, [16 rows][four tokens][row]
  float factor[kStripRows];                   ///< of a row's weights in this chunk
};

/// Working memory of the blocked path by tiles of bf16 (tile_operands-inl.h, tiled-inl.h).
inline constexpr int kSpanTokens = 128;  ///< one step of its online softmax, at absolute multiples
inline constexpr int kTiledRows = 64;    ///< that go through a span together
inline constexpr int kMaxParts = 3;      ///< bf16 whose sum is a value of fp32
inline constexpr int kTiledWidth = (kMaxDim + 2 * kMaxLanes + 31) / 32 * 32;  ///< of K
struct alignas(64) TileScratch {
  std::uint16_t k[kMaxParts * kTiledWidth * kSpanTokens];  ///< of int8 K: codes, biased, in tiles of 64
  std::uint16_t v[2 * kMaxDim * kSpanTokens];
  std::uint16_t v_wild[kMaxDim * kSpanTokens];  ///< V before what is not finite was taken out
  std::int32_t q[kMaxParts * kMaxRows * kTiledWidth / 2];
  float scores[kSpanTokens * kTiledRows];            // [16 rows][token][row]; of int8 K: int32
  std::int32_t p[2 * kSpanTokens / 2 * kTiledRows];  // two tokens each
  float k_scale[kSpanTokens];                        ///< what a token's scores are multiplied with
  float v_scale[kSpanTokens];                        ///< what a token's weights are, where V are codes
  float factor[kSpanTokens];                         ///< k_scale times the scale of logits and log2(e)
  bool excluded[kSpanTokens / kTileTokens];
};

/// Working memory of one thread, all parts 64-byte aligned. Floats unless stated.
struct alignas(64) Scratch {
  // Row states and sums of p * v, in the order of an item's rows: the result of an item.
  float max[kMaxRows];
  float sum[kMaxRows];
  float out[kMaxRows * kMaxDim];  // [rows, v_dim], not divided by sum

  float row[kMaxRowDims];  ///< of Q
  RowView view[kMaxRows];
  float alpha[kMaxRows];  ///< factor of a row's accumulators in this chunk
  float q[kMaxRows * (kMaxDim + 2 * kMaxLanes)];
  float scores[kStripRows * kBlockedTokens];  ///< direct: [rows][kChunkTokens]
  float acc[kMaxRows * kMaxDim];  ///< direct: 4 partial sums per dim; blocked: per strip [v_dim][rows]
  float decoded[kBlockedTokens * (kMaxDim + 2 * kMaxLanes)];  ///< blocked: one chunk of K
  float decoded_v[kBlockedTokens * kMaxDim];
  float pattern[kChunkTiles * 16 * kMaxLanes];  ///< p of four rows, spread over the lanes of V's steps
  float scale_pattern[kChunkTiles * 16 * kMaxLanes];
  float min_pattern[kChunkTiles * 8 * kMaxLanes];
  float weights[2][4 * kChunkTokens];                    ///< p of four rows times the scales of a group
  float k_scale[kChunkTokens * kMaxGroups + kMaxLanes];  // per tile: [16][groups]
  float k_min[kChunkTokens * kMaxGroups + kMaxLanes];
  float v_scale[kChunkTokens * kMaxGroups];  // per tile: [groups][16]
  float v_min[kChunkTokens * kMaxGroups];
  union {  // an item takes one of the two paths
    ByteScratch bytes;
    CodeScratch codes;
  };
  TileScratch tiles;
  std::uint8_t k_tail[kTileTokens * kMaxDim * 4];  ///< plain tensors: the last, partial tile
  std::uint8_t v_tail[kTileTokens * kMaxDim * 4];
  bool excluded;  ///< this thread met a bad block-table entry
};

}  // namespace halftone::cpu
