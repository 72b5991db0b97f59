// What a kernel of latent attention (MLA) receives.
#pragma once

#include "cuda/attention/params.h"

namespace halftone::cuda {

/// The keys of each query as a list of slots, page * page_size + offset, in any order. A listed query is a
/// request of its own: kv_lengths says how many keys it lists, and what the schedule calls keys are places in
/// its list. Negative slots are skipped; so are those beyond the cache, which the status word tells.
struct ListedParams {
  const std::int32_t* indices;  // [total_q, index_stride]; null: keys by the block table
  std::int64_t index_stride;    // elements, from a query's list to the next one's
};

/// Records of a latent cache begin every CacheView::tile_bytes / 16 bytes (page::PageLayout::row_bytes).
struct LatentParams {
  AttentionParams attention;
  ListedParams listed;
};

}  // namespace halftone::cuda
