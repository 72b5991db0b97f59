// Where the tokens of a step are: the walk over the steps of all items, ahead of who computes, and from an
// entry of a list or of the block table to a slot of the cache.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/attention/rows.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

/// What says where a token is: its slot of the cache, or the entry of the block table.
using TokenId = std::int32_t;

/// Byte `offset` of the token in a slot.
__device__ inline const std::uint8_t* token_at(const CacheView& c, std::uint32_t slot, int offset) {
  const std::int64_t padding = c.page_stride - (std::int64_t{kTokenBytes} << c.page_log2);
  const std::uint8_t* const at = c.pages + offset + std::uint64_t{slot} * kTokenBytes;
  return at + (slot >> c.page_log2) * padding;
}

template <LatentWideConfig C>
struct StepCursor {
  static constexpr int kHalves = kTokenHalves<C>;
  const AttentionParams& params;
  Shared& s;
  unsigned thread;
  int rank;
  int token = 0;
  int end = -1;  // < 0: there is no step, and no token

  /// Before all else.
  __device__ void begin() const { s.walks[thread / 32].index = -1; }
  __device__ bool listed() const { return params.listed.list.indices != nullptr; }
  /// Of the lane's token of a half.
  __device__ int place(int half) const {
    return token + token_place(C.blocks == 2 ? rank : half, static_cast<int>(thread % 32));
  }

  __device__ bool at_step() const { return end >= 0; }
  /// Goes on to the next step, if there is one.
  __device__ void next() {
    token += kBlockTokens;
    if (token < end) return;
    const int index = s.walks[thread / 32].index + 1;
    if (thread == 0) {  // who waits for an item extends the queue
      while (s.queue.more && s.queue.count <= index) {
        s.queue.produce(params.schedule, bounds_of(params), blockIdx.x / C.blocks);
      }
    }
    __syncwarp();  // all have read the index
    end = -1;
    if (!s.queue.has(index)) return;
    const DeviceItem& x = s.queue.items[index % ItemQueue::kCapacity];
    token = x.work.kv_begin;
    end = end_of(x.work);
    s.walks[thread / 32] = {listed() ? params.listed.list.indices + x.first_query * params.listed.list.stride
                                     : table_row(params.cache, x.work.request),
                            index};
  }
  /// Without a token, or a step, anything: a branch around the loads would wait for them.
  __device__ void load_ids(TokenId (&ids)[kHalves]) const {
    const WalkLimits l = s.limits;
    const std::int32_t* const row = s.walks[thread / 32].entries;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int at = place(half), entry = at >> l.entry_log2;
      ids[half] = __ldg(at < end && entry < l.entries
                            ? row + entry
                            : reinterpret_cast<const std::int32_t*>(params.schedule.header));
    }
  }
  /// The slot of a token of the same step; -1: it is skipped. By all lanes.
  __device__ int resolve(TokenId id, int half) const {
    const WalkLimits l = s.limits;
    const int at = place(half);
    const bool has = at < end, found = static_cast<std::uint32_t>(id) < l.ids && at >> l.entry_log2 < l.entries;
    if (__any_sync(~0u, has && !found)) {
      if (has && !found && (id >= 0 || !listed())) has_page(params, -1);  // for the status
    }
    return has && found ? (id << l.entry_log2) + (at & l.place_mask) : -1;
  }
};

}  // namespace halftone::cuda::wide
