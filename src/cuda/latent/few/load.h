// The loading role: four warps that bring the records of the next blocks of 32 tokens.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/few/traits.h"

namespace halftone::cuda {

/// A load warp: every fourth block of the worker's items, a lane one token of it. What tells where the next
/// block's tokens are is asked for before this one's are copied.
template <LatentFewConfig C>
struct RecordLoader {
  using Traits = LatentFewTraits<C>;
  const AttentionParams& params;
  typename Traits::Shared& s;
  int item = -1, block, blocks = 0;
  std::uint32_t count;  // blocks before: of all warps
  const AttentionParams& p = params;

  __device__ RecordLoader(const AttentionParams& params, typename Traits::Shared& s)
      : params(params), s(s), block(warp() - Traits::kLoadWarps), count(block) {}

  // Computed anew wherever they are asked for: registers are scarce.
  static __device__ int warp() { return thread_index() / 32 - Traits::kWarps; }
  static __device__ int lane() { return thread_index() % 32; }
  __device__ const DeviceItem& current() const { return s.queue.items[item % ItemQueue::kCapacity]; }

  /// Whether there is another item.
  __device__ bool next_item() {
    ++item;
    s.reading[warp()] = item;
    if (!s.queue.has(item)) return false;
    const DeviceItem& next = current();
    blocks = blocks_of(next.work);
    if (warp() == 0) prefetch_queries(next);
    return true;
  }
  /// The next block of this warp; false if there is none.
  __device__ bool find() {
    block += Traits::kLoadWarps;
    count += Traits::kLoadWarps;
#pragma unroll 1
    while (block >= blocks) {
      block -= blocks;
      if (!next_item()) return false;
    }
    return true;
  }
  /// The lane's token of the block: its slot in the list or its page of the block table; -1 if there is none.
  __device__ std::int32_t look_up() const {
    const DeviceItem& at = current();
    const int token = at.work.kv_begin + block * Traits::kTokens + lane();
    if (token >= at.work.kv_end) return -1;
    if (params.listed.list.indices != nullptr) {
      const std::int64_t query = at.first_query;
      if (query >= p.q_tokens) return -1;  // the schedule may count more queries than there are lists
      return __ldg(params.listed.list.indices + query * params.listed.list.stride + token);
    }
    const std::int32_t page =
        page_entry(p.cache, table_row(p.cache, at.work.request), token >> p.cache.page_log2);
    return page < 0 ? INT32_MIN : page;
  }
  /// Where the lane's token is; null if it does not count. `found`: of look_up(), `token`: in the request.
  __device__ const std::uint8_t* locate(std::int32_t found, int token) const {
    const CacheView& c = p.cache;
    const int within = (1 << c.page_log2) - 1;
    const bool listed = params.listed.list.indices != nullptr;
    const std::int32_t page = listed ? found >> c.page_log2 : found;
    const int at = (listed ? found : token) & within;
    const bool none = listed ? found < 0 : found == -1;
    if (none || !has_page(p, page)) return nullptr;
    return c.pages + page * c.page_stride + at * Traits::kRecordBytes;
  }

  __device__ void copy(const std::uint8_t* record, int stage) const {
    const unsigned lane = thread_index() % 32;
    const std::uint32_t live = __ballot_sync(~0u, record != nullptr);
    const std::uint32_t codes = shared_address(s.codes[stage]), full = shared_address(&s.full[stage]);
    const std::uint64_t own = reinterpret_cast<std::uint64_t>(record != nullptr ? record : p.cache.pages);
    if (lane == 0) s.live[stage] = live;
#pragma unroll(Traits::kScaled ? 4 : 1)
    for (int token = 0; token < Traits::kTokens; ++token) {  // a token that does not count becomes zeros
      const auto* from = reinterpret_cast<const std::uint8_t*>(__shfl_sync(~0u, own, token)) + lane * 16;
#pragma unroll
      for (int i = 0; i < Traits::kRowChunks / 32; ++i) {
        copy_async(codes + code_place(token, 32 * i + lane, Traits::kRowBytes), from + 512 * i,
                   live >> token & 1 ? 16 : 0);
      }
    }
    const std::uint32_t rope = shared_address(s.rope[stage]), scales = shared_address(s.scales[stage]);
    constexpr int kTail =
        (Traits::kRecordBytes - Traits::kRowBytes) / 16;  // chunks: the scales, the rotary dims
#pragma unroll(Traits::kScaled ? 3 : 1)
    for (int i = 0; i < kTail; ++i) {
      const unsigned flat = i * 32 + lane, token = flat / kTail, chunk = flat - token * kTail;
      const auto* from =
          reinterpret_cast<const std::uint8_t*>(__shfl_sync(~0u, own, token)) + Traits::kRowBytes;
      const std::uint32_t to = Traits::kScaled && chunk == 0
                                   ? scales + token * 16
                                   : rope + rope_place(token, chunk - (Traits::kScaled ? 1 : 0));
      copy_async(to, from + chunk * 16, live >> token & 1 ? 16 : 0);
    }
    copy_async_arrive(full);
    if (lane == 0) barrier_arrive(full);  // for `live`
  }

  __device__ void run() {
    bool more = find();
    std::int32_t found = more ? look_up() : 0;
#pragma unroll 1
    while (more) {
      const int stage = count % Traits::kStages;
      const std::uint32_t parity = count / Traits::kStages & 1 ^ 1;
      const int token = current().work.kv_begin + block * Traits::kTokens + lane();
      const std::uint8_t* record = locate(found, token);
      more = find();
      if (more) found = look_up();
      barrier_wait(shared_address(&s.empty[stage]), parity);
      copy(record, stage);
    }
  }

 private:
  /// Brings an item's rows of Q to L2 before they are asked for.
  __device__ void prefetch_queries(const DeviceItem& next) const {
    constexpr int kLines = Traits::kQueryDim * 2 / 128;
    const int rows = next.work.row_end - next.work.row_begin;
#pragma unroll 1
    for (int i = lane(); i < rows * kLines; i += 32) {
      const RowPlace place = place_of(p, next, i / kLines);
      prefetch_to_l2(static_cast<const std::uint16_t*>(p.q) + place.token * p.q_token_stride +
                     place.head * p.q_head_stride + i % kLines * 64);
    }
  }
};

}  // namespace halftone::cuda
