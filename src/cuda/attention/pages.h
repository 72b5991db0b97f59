// Page look-up: a request's pages by the block table, within what the caller gave.
#pragma once

#include "cuda/attention/params.h"
#include "format/status.h"

namespace halftone::cuda {

/// Entry `index` of a request whose row of the block table is `row`; -1, which is no page, beyond the table.
__device__ inline std::int32_t page_entry(const CacheView& c, const std::int32_t* row, std::int32_t index) {
  return index < c.table_width ? row[index] : -1;
}
__device__ inline const std::int32_t* table_row(const CacheView& c, std::int32_t request) {
  return c.block_table + request * c.table_stride;
}

/// What the slots that a list may name are below.
__device__ inline std::uint32_t slot_end(const CacheView& c) {
  const std::int64_t slots = std::int64_t{c.num_pages} << c.page_log2;
  return static_cast<std::uint32_t>(slots < INT32_MAX ? slots : INT32_MAX);
}

/// Whether the cache has the page; if not, its tokens are left out and the status says so.
__device__ inline bool has_page(const AttentionParams& p, const CacheView& cache, std::int32_t page) {
  if (static_cast<std::uint32_t>(page) < static_cast<std::uint32_t>(cache.num_pages)) return true;
  if (p.status != nullptr) atomicOr(p.status, kStatusBadPage);
  return false;
}
__device__ inline bool has_page(const AttentionParams& p, std::int32_t page) {
  return has_page(p, p.cache, page);
}

/// The bytes of a (page, KV head) block. Only of a page that the cache has.
__device__ inline const std::uint8_t* page_head(const CacheView& c, std::int32_t page, std::int32_t kv_head) {
  return c.pages + page * c.page_stride + std::int64_t{kv_head} * c.head_bytes;
}

}  // namespace halftone::cuda
