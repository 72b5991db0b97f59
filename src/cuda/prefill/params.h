// What a prefill kernel receives.
#pragma once

#include <cuda.h>

#include "cuda/attention/params.h"

namespace halftone::cuda {

/// K and V are rows of tensors where attention.schedule has cu_kv, plain or staged ones, else pages. Of
/// staged tensors in E4M3 cu_kv has the staged rows. K in E4M3 may be in pages beside staged V, and both
/// beside staged scales.
struct PrefillParams {
  AttentionParams attention;
  std::int32_t* taken;      // [2] items of the queue, and workers that have none left; 0 between launches
  std::int64_t kv_tokens;   // rows of those tensors
  const float* key_scales;  // of staged keys: [kv_heads][kv_tokens]; null: attention.k's static ones
  const std::uint8_t* value_tiles;  // of staged V in E4M3: value_tiles.h, [kv_heads][kv_tokens / 16]
  const float* value_units;         // of V that became E4M3: [batch][kv_heads] what O is multiplied by
  const std::int32_t* present;      // of tensors in E4M3: [batch] keys that they have; null: up to kv_tokens
  /// Of E4M3 products, whose sums keep few bits: O of earlier tiles that has no place in shared memory,
  /// [worker][warpgroup][value_dim / shares / 8 - near_sums()][128], a thread's own four values each.
  float4* promoted;
  CUtensorMap q;        // [token][head][dim], where q_boxes
  CUtensorMap k, v;     // [token][head][dim], or [page][head][tile][token][dim], or code_page_map()
  CUtensorMap k_pairs;  // the same in boxes of two tiles, where pages have as many
  CUtensorMap out;      // [token][head][dim], where out_boxes
  bool q_boxes;         // 64 packed rows are whole tokens of a KV head's query heads: a box per chunk
  bool out_boxes;       // likewise
  bool code_pages;      // K is read in its pages, as codes; so is V, where value_tiles is null
};

}  // namespace halftone::cuda
