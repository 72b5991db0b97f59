// Slots of appended tokens: which bytes of which tile a token goes to.
#pragma once

#include "cuda/append/row.h"
#include "cuda/device/search.h"

namespace halftone::cuda {

inline constexpr int kWindow = kTileTokens;     // appended tokens
inline constexpr int kSlots = 3 * kWindow - 2;  // of tokens -15 to 30 of a window: tiles that overlap with it

/// The request that appended token `token` belongs to: cu[request] <= token < cu[request + 1].
__device__ inline std::int32_t request_of(const std::int32_t* cu_seqlens, std::int32_t batch,
                                          std::int64_t token) {
  std::int32_t low = 0, high = batch;  // cu[low] <= token < cu[high]
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return low;
}

/// The same by a whole warp that asks for one token. In a decode step a request has the number of its token.
__device__ inline std::int32_t warp_request_of(const std::int32_t* cu_seqlens, std::int32_t batch,
                                               std::int64_t token) {
  if (token < batch) {
    const std::int32_t first = cu_seqlens[token], end = cu_seqlens[token + 1];
    if ((first <= token) & (token < end)) return static_cast<std::int32_t>(token);
  }
  return last_begun(cu_seqlens, batch, token);
}

/// The slot in a page, or -1 if there is no such page, which sets the status.
__device__ __forceinline__ std::int64_t slot_in(const AppendParams& p, std::int64_t page,
                                                std::int64_t offset) {
  if (page >= 0 && page < p.num_pages) return page << p.page_log2 | offset;
  set_status(p, kStatusBadPage);
  return -1;
}

/// The slot of a request's position by the block table, likewise.
__device__ __forceinline__ std::int64_t table_slot(const AppendParams& p, std::int32_t request,
                                                   std::int64_t position) {
  const std::int64_t entry = position >> p.page_log2;
  const bool exists = entry >= 0 && entry < p.table_width;
  return slot_in(p, exists ? p.block_table[request * p.table_stride + entry] : -1,
                 position & ((1 << p.page_log2) - 1));
}

/// Slot of an appended token, or -1 for one that is skipped: padding, or a place that does not exist (which
/// sets the status). `search`: how to find a token's request.
template <class Search>
__device__ __forceinline__ std::int64_t slot_of(const AppendParams& p, std::int64_t token,
                                                const Search& search) {
  if (token < 0 || token >= p.tokens) return -1;
  const std::int64_t slot = p.slot_mapping == nullptr ? 0 : __ldg(p.slot_mapping + token);
  if (slot < 0) return -1;
  if (p.cu_seqlens == nullptr) return slot_in(p, slot >> p.page_log2, slot & ((1 << p.page_log2) - 1));
  const std::int32_t begin = p.cu_seqlens[0], end = p.cu_seqlens[p.batch];
  const std::int32_t request = search(p.cu_seqlens, p.batch, token);  // while these two are under way
  if (token < begin || token >= end) return -1;
  return table_slot(p, request, std::int64_t{p.lengths[request]} + token - p.cu_seqlens[request + p.counted]);
}
template <auto kSearch>
__device__ __forceinline__ std::int64_t slot_of(const AppendParams& p, std::int64_t token) {
  return slot_of(p, token, kSearch);
}

/// Where a slot is: its tile, of KV head 0.
__device__ __forceinline__ std::uint8_t* tile_of(const AppendParams& p, std::int64_t slot) {
  const int tile = static_cast<int>(slot & ((1 << p.page_log2) - 1)) / kTileTokens;
  return p.pages + (slot >> p.page_log2) * p.page_stride + tile * p.tile_bytes;
}

/// What a window has to write.
struct Window {
  unsigned loose;       // its tokens outside whole tiles, a bit each
  int tile;             // token at which its whole tile begins, or -1
  std::uint8_t* bytes;  // that tile, of KV head 0
};

/// By a whole warp. slots[kWindow - 1 + i] is of token i of the window.
__device__ inline Window window_of(const AppendParams& p, const std::int64_t* slots) {
  const int lane = threadIdx.x % 32;
  std::uint64_t written = 0, begins = 0, runs = 0;  // bit i: of slots[i]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = i * 32 + lane;
    const std::int64_t slot = at < kSlots ? slots[at] : -1;
    const bool some = slot >= 0;
    const bool run = some && at + 1 < kSlots && slots[at + 1] == slot + 1;
    written |= std::uint64_t{__ballot_sync(~0u, some)} << 32 * i;
    begins |= std::uint64_t{__ballot_sync(~0u, some && slot % kTileTokens == 0)} << 32 * i;
    runs |= std::uint64_t{__ballot_sync(~0u, run)} << 32 * i;
  }
  runs &= runs >> 1;
  runs &= runs >> 2;
  runs &= runs >> 4;
  const std::uint64_t tiles = begins & runs & runs >> 7;  // 15 runs in a row
  std::uint64_t covered = tiles | tiles << 1;
  covered |= covered << 2;
  covered |= covered << 4;
  covered |= covered << 8;
  constexpr std::uint32_t kMask = (1u << kWindow) - 1;
  const std::uint32_t own = static_cast<std::uint32_t>(tiles >> (kWindow - 1)) & kMask;
  const int tile = __ffs(static_cast<int>(own)) - 1;
  return {static_cast<std::uint32_t>((written & ~covered) >> (kWindow - 1)) & kMask, tile,
          tile < 0 ? nullptr : tile_of(p, slots[kWindow - 1 + tile])};
}

}  // namespace halftone::cuda
