// The appending role of the decode kernel: the warps that bring queries, or would if the compute warps did
// not, write the new tokens of an item before the load warps read them.
#pragma once

#include <bit>
#include <climits>

#include "cuda/append/few_rows.h"
#include "cuda/append/step.h"
#include "cuda/decode/params.h"
#include "cuda/decode/traits.h"

namespace halftone::cuda {

/// K or V of the new tokens at positions [first, end) of the item's request and KV head, by a warp.
template <PartConfig P, int kDim>
__device__ inline void append_side(const AppendParams& p, const AppendPart& part, const DeviceItem& item,
                                   int first, int end) {
  constexpr bool kShared = P.mode == ScaleMode::kToken && appends_shared_scales(P.dtype, kDim);
  constexpr AppendScale kScale = P.mode == ScaleMode::kStatic ? AppendScale::kGiven
                                 : kShared                    ? AppendScale::kEither
                                                              : AppendScale::kRow;
  constexpr int kRow = std::bit_ceil(unsigned{kDim} / kChunk);
  constexpr int kSegment = kRow < 32 ? kRow : 32;  // lanes of a row
  constexpr int kGroup = P.mode == ScaleMode::kBlock ? P.group_blocks * 32 / kChunk : kRow;
  using Traits = AppendTraits<P.dtype, P.asymmetric, kScale, RowKind::kWhole, kDim, kGroup>;
  const RowLane lane(kDim, std::countr_zero(unsigned{kSegment}), thread_index() % 32);
#pragma unroll 1
  for (int base = first; base < end; base += 32 / kSegment) {
    const int position = base + lane.segment_first / kSegment;
    const std::int64_t token = std::int64_t{item.first_query} + position - first_new_token(item);
    append_row<Traits>(p, part, lane, token, item.work.kv_head, [&]() -> std::int64_t {
      if (position >= end || token < 0 || token >= p.tokens) return -1;
      if (p.slot_mapping != nullptr && __ldg(p.slot_mapping + token) < 0) return -1;
      return table_slot(p, item.work.request, position);
    });
  }
}

/// append_tokens() of the tiles that the item reads.
template <class Append>
__device__ inline void append_tiles(const AppendParams& p, const DeviceItem& item, const Append& append) {
  const int end = (item.work.kv_end + kTileTokens - 1) / kTileTokens * kTileTokens;
  append_tokens(p, item, item.work.kv_begin, end, append);
}

/// The new tokens of item `index`, K by the first finish warp and V by the second.
template <DecodeConfig C>
__device__ inline void append_item(const AppendParams& p, typename DecodeTraits<C>::Shared& s, int index,
                                   int warp) {
  const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
  append_tiles(p, item, [&](int first, int end) {
    if (C.k == C.v || warp == 0) {
      append_side<C.k, C.head_dim>(p, p.parts[warp], item, first, end);
    } else {
      append_side<C.v, C.head_dim>(p, p.parts[1], item, first, end);
    }
  });
  s.appended[warp] = index + 1;
}

/// By kThreads threads of a block, before the first item, once all that came before this kernel is visible.
/// `appended`: of the calling warp.
template <int kThreads>
__device__ inline void begin_appends(const DecodeParams& p, volatile int& appended, int thread) {
  if (!p.appends) {
    fence_tokens();  // the load warps' copies may read what the kernel before has appended
    appended = INT_MAX;
  }
  settle_lengths<kThreads>(p, p.schedule, thread);
}

/// A warp that has nothing else to do.
template <DecodeConfig C>
__device__ inline void append_worker(const DecodeParams& p, typename DecodeTraits<C>::Shared& s, int warp) {
  if (!p.appends) return;
#pragma unroll 1
  for (int index = 0;; ++index) {
    while (s.queue.count <= index && s.queue.more) __nanosleep(200);
    if (!s.queue.has(index)) return;
    append_item<C>(p.append, s, index, warp);
  }
}

/// Whether the queue must keep an item that is not appended yet.
template <DecodeConfig C>
__device__ inline bool lags_behind(const typename DecodeTraits<C>::Shared& s) {
  return s.queue.count >= min(s.appended[0], s.appended[1]) + ItemQueue::kCapacity - 1;
}

/// Whether new tokens of item `index` are written.
template <DecodeConfig C>
__device__ inline bool is_appended(const typename DecodeTraits<C>::Shared& s, int index) {
  return s.appended[0] > index && s.appended[1] > index;
}

/// Whether new tokens of item `index` may be read.
template <DecodeConfig C>
__device__ inline bool has_appended(const typename DecodeTraits<C>::Shared& s, int index) {
  if (!is_appended<C>(s, index)) return false;
  fence_tokens();
  return true;
}

}  // namespace halftone::cuda
