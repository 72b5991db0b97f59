// The loading role: four warps that bring the records of the next blocks of 32 tokens.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/few/traits.h"
#include "plan/listed.h"

namespace halftone::cuda {

/// A load warp: eight tokens of each block. A lane is one token of four blocks, a round: where it is is asked
/// for before the records of the round before are copied.
template <LatentFewConfig C>
struct RecordLoader {
  using Traits = LatentFewTraits<C>;
  static constexpr std::int32_t kSecond = -2;
  static constexpr int kRound = 4, kOwn = Traits::kTokens / Traits::kLoadWarps;  // blocks, tokens of each
  static_assert(kRound * kOwn == 32);
  const AttentionParams& p;
  typename Traits::Shared& s;
  int item = -1, round = 0, blocks = 0;  // the round's first block of the item's
  std::uint32_t before = 0;              // blocks of earlier items

  __device__ RecordLoader(const AttentionParams& params, typename Traits::Shared& s) : p(params), s(s) {}

  // Computed anew wherever they are asked for: registers are scarce.
  static __device__ unsigned warp() {
    return static_cast<unsigned>(thread_index() - Traits::kFirstLoad) / 32;
  }
  static __device__ unsigned lane() { return static_cast<unsigned>(thread_index()) % 32; }
  __device__ const DeviceItem& current() const { return s.queue.items[item % ItemQueue::kCapacity]; }
  /// The lane's token of a round, in the request or the list.
  static __device__ int token_of(const planning::WorkItem& work, int round) {
    return work.kv_begin + (round + static_cast<int>(lane() / kOwn)) * Traits::kTokens +
           static_cast<int>(kOwn * warp() + lane() % kOwn);
  }

  /// The next round; false if there is none.
  __device__ bool find() {
    round += kRound;
#pragma unroll 1
    while (round >= blocks) {
      before += blocks, round = 0;
      s.reading[warp()] = ++item;
      if (!s.queue.has(item)) return false;
      blocks = blocks_of(current().work);
      if (warp() == 0 && item > 0) prefetch_queries(current());
    }
    return true;
  }

  /// The lane's token of a round: its slot in the list or its page of the block table; -1 if there is none.
  /// With a second list its slot there is kSecond - slot.
  __device__ std::int32_t look_up(const DeviceItem& at, int round) const {
    const int token = token_of(at.work, round);
    if (token >= at.work.kv_end) return -1;
    const ListedParams& lists = p.listed;
    if (lists.list.indices == nullptr) {
      const std::int32_t page =
          page_entry(p.cache, table_row(p.cache, at.work.request), token >> p.cache.page_log2);
      return page < 0 ? INT32_MIN : page;
    }
    const std::int64_t query = at.first_query;
    if (query >= p.q_tokens) return -1;  // the schedule may count more queries than there are lists
    if (lists.extra_list.indices == nullptr)
      return __ldg(lists.list.indices + query * lists.list.stride + token);
    const std::int32_t count = lists.counts[query], begin = planning::second_list_begin(count);
    if (token < count) return max(__ldg(lists.list.indices + query * lists.list.stride + token), -1);
    if (token < begin) return -1;
    const std::int32_t slot =
        __ldg(lists.extra_list.indices + query * lists.extra_list.stride + token - begin);
    return slot < 0 ? -1 : kSecond - min(slot, INT32_MAX - 1);  // no cache has so many slots
  }
  /// The same of the worker's first round, before the queue is there.
  __device__ std::int32_t look_ahead(int worker) const {
    const int count = p.list.counts[worker];
    DeviceItem first;
    const DeviceItem& at = p.list.items[std::int64_t{worker} * kListedItems];
    first.work.kv_begin = at.work.kv_begin, first.work.kv_end = at.work.kv_end;
    first.work.request = at.work.request, first.first_query = at.first_query;
    if (count == 0) first.work.kv_end = INT32_MIN;
    return look_up(first, 0);
  }

  /// Where the lane's token is; null if it does not count. `found`: of look_up(), `token`: in the request.
  __device__ const std::uint8_t* locate(std::int32_t found, int token) const {
    if (p.listed.list.indices != nullptr) {
      if (found >= 0) return record_of(p.cache, found >> p.cache.page_log2, found);
      if (found == -1 || p.listed.extra_list.indices == nullptr) return nullptr;
      const CacheView& second = p.listed.extra_cache;
      return record_of(second, (kSecond - found) >> second.page_log2, kSecond - found);
    }
    return found == -1 ? nullptr : record_of(p.cache, found, token);
  }
  /// A record of a page; null if the cache does not have the page.
  __device__ const std::uint8_t* record_of(const CacheView& cache, std::int32_t page, int slot) const {
    if (!has_page(p, cache, page)) return nullptr;
    const int within = (1 << cache.page_log2) - 1;
    return cache.pages + page * cache.page_stride + (slot & within) * Traits::kRecordBytes;
  }

  /// The warp's records of a block, whose addresses the lanes from `first` on have. `kPlain`: all count and
  /// lie within 64 GiB. A token that does not count becomes zeros.
  template <bool kPlain>
  __device__ void copy_records(const std::uint8_t* record, std::uint32_t live, int first, int stage) const {
    const std::uint8_t* const pages = p.cache.pages;
    const auto own = static_cast<std::uint64_t>(record - pages);
    const auto own_chunk = static_cast<std::uint32_t>(own / 16);
    const auto from = [&](const std::uint8_t* base, unsigned t) {
      if constexpr (kPlain) return base + std::uint64_t{__shfl_sync(~0u, own_chunk, first + t)} * 16;
      return base + __shfl_sync(~0u, own, first + t);
    };
    const auto bytes = [&](unsigned t) { return kPlain || (live >> t & 1) ? 16 : 0; };
    const unsigned token = kOwn * warp();
    const std::uint32_t codes = shared_address(s.codes[stage]) + token * Traits::kRowBytes + lane() * 16;
#pragma unroll
    for (unsigned t = 0; t < kOwn; ++t) {
      const std::uint8_t* const row = from(pages + lane() * 16, t);
#pragma unroll
      for (int i = 0; i < Traits::kRowChunks / 32; ++i) {
        copy_async((codes ^ code_place(t, 0, 0)) + t * Traits::kRowBytes + 512 * i, row + 512 * i, bytes(t));
      }
    }
    const unsigned chunk = lane() % 8;
#pragma unroll
    for (unsigned i = 0; i < kOwn / 4; ++i) {
      const unsigned t = 4 * i + lane() / 8;
      copy_async(shared_address(s.rope[stage]) + rope_place(token + t, chunk),
                 from(pages + Traits::kRowBytes + Traits::kScaleBytes + chunk * 16, t), bytes(t));
    }
    if constexpr (Traits::kScaled) {
      const unsigned t = lane() % kOwn;
      const std::uint8_t* const scales = from(pages + Traits::kRowBytes, t);
      if (lane() < kOwn) copy_async(shared_address(&s.scales[stage][token + t]), scales, bytes(t));
    }
  }

  /// The warp's part of a block of the round.
  __device__ void copy(const std::uint8_t* record, int block, int stage) const {
    const bool near = record != nullptr && static_cast<std::uint64_t>(record - p.cache.pages) >> 36 == 0;
    const int first = block * kOwn;
    const std::uint32_t live = __ballot_sync(~0u, record != nullptr) >> first & 0xff;
    const bool plain = (__ballot_sync(~0u, near) >> first & 0xff) == 0xff;
    const std::uint32_t full = shared_address(&s.full[stage]);
    if (plain) {
      copy_records<true>(record, live, first, stage);
    } else {
      copy_records<false>(record != nullptr ? record : p.cache.pages, live, first, stage);
    }
    copy_async_arrive(full);
    if (lane() == 0) {
      s.live[stage][warp()] = static_cast<std::uint8_t>(live);
      barrier_arrive(full);
    }
  }

  /// `found`: of look_ahead().
  __device__ void run(std::int32_t found) {
    bool more = find();
    if (more && item > 0) found = look_up(current(), round);
#pragma unroll 1
    while (more) {
      const std::uint32_t first = before + round;
      const int count = min(blocks - round, kRound);
      const std::uint8_t* record = locate(found, token_of(current().work, round));
      more = find();
      if (more) found = look_up(current(), round);
#pragma unroll 1
      for (int block = 0; block < count; ++block) {
        const int stage = (first + block) % Traits::kStages;
        barrier_wait(shared_address(&s.empty[stage]), (first + block) / Traits::kStages & 1 ^ 1);
        copy(record, block, stage);
      }
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
