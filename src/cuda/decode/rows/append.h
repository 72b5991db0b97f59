// What comes before an item's attention: the query warp brings queries and writes new tokens.
#pragma once

#include "cuda/decode/append.h"
#include "cuda/decode/rows/queries.h"

namespace halftone::cuda {

/// The new tokens of the next item, which is queued: K, then V.
template <DecodeConfig C>
__device__ inline void append_next_item(const AppendParams& p, typename DecodeRowsTraits<C>::Shared& s) {
  const DeviceItem& item = s.queue.items[s.appended % ItemQueue::kCapacity];  // read again: registers are few
  append_tiles(p, item, [&](int first, int end) {
#pragma unroll 1
    for (int part = 0; part < 2; ++part) append_side<C.k, C.head_dim>(p, p.parts[part], item, first, end);
  });
  const int next = s.appended + 1;
  __syncwarp();
  s.appended = next;
}

/// Whether append_next_item() comes before the queries of item `index`: its own tokens, and those of further
/// items as long as there is no place for the queries.
template <DecodeConfig C>
__device__ inline bool appends_next(typename DecodeRowsTraits<C>::Shared& s, int index) {
  const int next = s.appended;
  const bool waits =
      next < s.queue.count && !barrier_passed(shared_address(&s.queries_empty[index % 2]), index / 2 & 1 ^ 1);
  __threadfence_block();
  return next <= index || __all_sync(~0u, waits);
}

/// The query warp: the new tokens of all items, and the first rows of all but the first one, which the
/// compute warps bring while they wait for keys. The other rows are brought by the warps that convert V,
/// between items. An item's tokens come before its queries: the queue then keeps items until their tokens are
/// written, and the load warp waits for tokens of no item whose queries wait for what it loads.
template <DecodeConfig C>
__device__ inline void prepare_items(const DecodeParams& p, typename DecodeRowsTraits<C>::Shared& s,
                                     int lane) {
  using Traits = DecodeRowsTraits<C>;
  wait_for_previous_kernel();
  begin_appends<32>(p, s.appended, lane);
#pragma unroll 1
  for (int index = 0; s.queue.has(index); ++index) {
    while (p.appends && appends_next<C>(s, index)) append_next_item<C>(p.append, s);
    asm volatile("" : "+r"(lane));  // what follows from it takes no registers meanwhile
    if (index > 0) bring_share(p, s, RowsQueries<C>{p, 0, 1, lane}, index, 0, Traits::kQueryRows);
  }
  check_inputs(p, blockIdx.x, lane);
}

}  // namespace halftone::cuda
