// What an attention kernel receives: every pointer with its shape.
#pragma once

#include <cstdint>

#include "cuda/attention/items.h"
#include "format/channels.h"
#include "format/part.h"
#include "halftone/attention.h"
#include "plan/work.h"

namespace halftone::cuda {

/// Scales (and mins) of K or V.
struct ParamView {
  const float* static_scale;   // [1] or [kv_heads]; null when scales are stored in the tiles
  const float* static_min;     // likewise; null when symmetric
  std::int32_t static_stride;  // 0 per tensor, 1 per head
};

/// Where the cache is.
struct CacheView {
  const std::uint8_t* pages;        // [num_pages, page_stride bytes]
  const std::int32_t* block_table;  // [batch, table_stride]
  std::int64_t page_stride;         // bytes
  std::int64_t table_stride;
  std::int32_t table_width;  // pages of a request that the table has room for
  std::int32_t num_pages;
  std::int32_t page_log2;   // tokens per page; 0: K and V are plain tensors
  std::int32_t head_bytes;  // of one (page, head) block
  std::int32_t tile_bytes;
  std::int32_t row_bytes;      // latent: from a token's record to the next; else 0
  std::int32_t v_data_offset;  // within a tile
  std::int32_t k_param_offset;
  std::int32_t v_param_offset;
};

/// A list of keys per query (plan/listed.h): item.request is a query, [kv_begin, kv_end) are places of its
/// lists.
struct ListView {
  const std::int32_t*
      indices;  // [queries, stride]: slots of its cache, page << page_log2 | offset; < 0: none
  std::int64_t stride;
};

/// Places [0, counts[query]) are list's over AttentionParams::cache; those from planning::second_list_begin()
/// of that on, if there are any, extra_list's over extra_cache; those between count for nothing.
struct ListedParams {
  ListView list;        // indices null: no lists
  ListView extra_list;  // indices null: no second list
  // [queries] of the schedule, which has limited them: places of the first list. Null without lists.
  const std::int32_t* counts;
  CacheView extra_cache;
};

struct AttentionParams {
  planning::Schedule schedule;
  ItemList list;  // the first items of each worker
  CacheView cache;
  ListedParams listed;
  ParamView k;
  ParamView v;
  Channels channels;          // of K; the offset only where logits count as they are, for LSE and sinks
  const void* q;              // [total_q, q_heads, head_dim], strides below, in elements
  void* out;                  // [total_q, q_heads, v_dim]
  float* lse;                 // [total_q, q_heads], natural log; null if not wanted
  const float* alibi_slopes;  // [q_heads] or null
  const float* sinks;         // [q_heads] or null, natural-log units
  float* partial_out;         // [slots, row_block, v_dim], unnormalised; of decode/rows in its own order
  float* partial_state_log2;  // [slots, row_block, 2]: maximum (base 2), sum
  std::int32_t* arrivals;     // [slots, kArrivalCounters], zero between launches
  std::int32_t* status;       // [1] or null
  std::int64_t q_tokens;      // rows of Q
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t out_token_stride, out_head_stride;
  std::int64_t lse_token_stride, lse_head_stride;
  float scale_log2;           // scale * log2(e)
  float softcap;              // 0: none; in logit units
  std::int32_t causal_right;  // keys j <= p + causal_right; INT_MAX / 2: no limit
  std::int32_t window_left;   // keys j >= p - window_left; INT_MAX / 2: no limit
  DType q_type, out_type;
  bool q_aligned;  // rows of Q begin at multiples of 16 bytes
  bool rotate_k;
  bool rotate_v;
  bool checks_inputs;   // of the run's passes one does
  bool cache_settled;   // cache and schedule may be read before the previous kernel of the stream has ended
  page::Part parts[2];  // K, V: for the universal kernel, whose formats are run-time values
};

}  // namespace halftone::cuda
