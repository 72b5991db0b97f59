// The loading role: four warps that bring the records of the next blocks of 32 tokens.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/few/traits.h"
#include "plan/listed.h"

namespace halftone::cuda {

/// A load warp: eight tokens of each block. A lane is one token of four blocks, a round: where it is is asked
/// for as soon as the records of the round before's first block are.
template <LatentFewConfig C>
struct RecordLoader {
  using Traits = LatentFewTraits<C>;
  static constexpr std::int32_t kSecond = -2;
  static constexpr int kRound = 4, kOwn = Traits::kTokens / Traits::kLoadWarps;  // blocks, tokens of each
  static_assert(kRound * kOwn == 32);
  const LatentFewParams& p;
  typename Traits::Shared& s;
  int item = 0, round = 0, blocks = 0;  // the round's first block of the item's
  std::uint32_t before = 0;             // blocks of earlier items

  __device__ RecordLoader(const LatentFewParams& params, typename Traits::Shared& s) : p(params), s(s) {}

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
      if (warp() == 0) prefetch_queries(current());
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
  /// The worker's first round, before the queue is there.
  struct Ahead {
    int blocks;          // of the item; 0 if there is none
    std::int32_t found;  // of look_up()
  };
  __device__ Ahead look_ahead(int worker) const {
    const int count = p.list.counts[worker];
    DeviceItem first;
    const DeviceItem& at = p.list.items[std::int64_t{worker} * kListedItems];
    first.work.kv_begin = at.work.kv_begin, first.work.kv_end = at.work.kv_end;
    first.work.request = at.work.request, first.first_query = at.first_query;
    if (count == 0) first.work.kv_begin = first.work.kv_end = 0;
    return {blocks_of(first.work), look_up(first, 0)};
  }

  /// Where a token is.
  struct Record {
    const std::uint8_t* at = nullptr;  // null: it does not count
    std::int32_t to_scales = 0;        // bytes, where they lie apart
  };
  /// Where the lane's token is. `found`: of look_up(), `token`: in the request.
  __device__ Record locate(std::int32_t found, int token) const {
    if (p.listed.list.indices != nullptr) {
      if (found >= 0) return record_of(p.cache, found >> p.cache.page_log2, found);
      if (found == -1 || p.listed.extra_list.indices == nullptr) return {};
      const CacheView& second = p.listed.extra_cache;
      return record_of(second, (kSecond - found) >> second.page_log2, kSecond - found);
    }
    return found == -1 ? Record{} : record_of(p.cache, found, token);
  }
  /// A record of a page, if the cache has the page.
  __device__ Record record_of(const CacheView& cache, std::int32_t page, int slot) const {
    if (!has_page(p, cache, page)) return {};
    const int tokens = 1 << cache.page_log2, within = slot & (tokens - 1);
    Record record{cache.pages + page * cache.page_stride + within * Traits::kRecordBytes};
    if constexpr (Traits::kApart) {
      record.to_scales = (tokens - within) * Traits::kRecordBytes + within * Traits::kScaleBytes;
    }
    return record;
  }

  /// The warp's records of a block, where the lanes from `first` on have them. `kPlain`: all count and lie
  /// within 64 GiB. A token that does not count becomes zeros.
  template <bool kPlain>
  __device__ void copy_records(const Record& record, std::uint32_t live, int first, int stage) const {
    const std::uint8_t* const pages = p.cache.pages;
    const auto own = static_cast<std::uint64_t>(record.at - pages);
    const auto own_chunk = static_cast<std::uint32_t>(own / 16);
    const auto from = [&](const std::uint8_t* base, unsigned t) {
      if constexpr (kPlain) return base + std::uint64_t{__shfl_sync(~0u, own_chunk, first + t)} * 16;
      return base + __shfl_sync(~0u, own, first + t);
    };
    const auto bytes = [&](unsigned t, int all = 16) { return kPlain || (live >> t & 1) ? all : 0; };
    const unsigned token = kOwn * warp();
    constexpr int kTogether = Traits::kRowChunks < 28 ? 32 / Traits::kRowChunks : 1;  // tokens of a copy
    const std::uint32_t codes = shared_address(s.codes[stage]) + token * Traits::kRowPitch;
    if constexpr (kTogether > 1) {
      const unsigned chunk = lane() % Traits::kRowChunks, ahead = lane() / Traits::kRowChunks;
#pragma unroll
      for (unsigned i = 0; i < kOwn / kTogether; ++i) {
        const unsigned t = kTogether * i + ahead;
        copy_async(codes + code_place<C>(t, chunk), from(pages + chunk * 16, t), bytes(t));
      }
    } else {
#pragma unroll
      for (unsigned t = 0; t < kOwn; ++t) {
        const std::uint8_t* const row = from(pages + lane() * 16, t);
#pragma unroll
        for (int i = 0; i < (Traits::kRowChunks + 31) / 32; ++i) {
          if (Traits::kRowChunks % 32 != 0 && lane() >= Traits::kRowChunks) continue;
          copy_async(((codes + lane() * 16) ^ swizzled_place(t, 0, 0)) + t * Traits::kRowPitch + 512 * i,
                     row + 512 * i, bytes(t));
        }
      }
    }
    const unsigned chunk = lane() % 8;
#pragma unroll
    for (unsigned i = 0; i < kOwn / 4; ++i) {
      const unsigned t = 4 * i + lane() / 8;
      copy_async(shared_address(s.rope[stage]) + rope_place<C>(token + t, chunk),
                 from(pages + Traits::kRopeAt + chunk * 16, t), bytes(t));
    }
    if constexpr (Traits::kScaleBytes != 0) copy_scales(from, bytes, record, token, first, stage);
  }
  template <class From, class Bytes>
  __device__ void copy_scales(const From& from, const Bytes& bytes, const Record& record, unsigned token,
                              int first, int stage) const {
    constexpr int kScaleBytes = Traits::kScaleBytes;
    constexpr unsigned kChunks = Traits::kApart ? 1 : kScaleBytes / 16;
    const unsigned t = lane() / kChunks % kOwn, chunk = lane() % kChunks;
    const std::uint32_t to = shared_address(s.scales[stage]) + (token + t) * kScaleBytes + chunk * 16;
    const std::uint8_t* at = from(p.cache.pages + (Traits::kApart ? 0 : Traits::kRowBytes) + chunk * 16, t);
    if constexpr (Traits::kApart) {
      at += __shfl_sync(~0u, record.to_scales, first + t);
      if (lane() < kOwn) copy_async_8(to, at, bytes(t, 8));
    } else {
      if (lane() < kOwn * kChunks) copy_async(to, at, bytes(t));
    }
  }

  /// The warp's part of a block of whole records, by bulk copies: one of all eight where they lie side by
  /// side, else one of each by its lane.
  __device__ void copy_whole(const Record& record, int block, int stage) const {
    constexpr int kBytes = Traits::kRecordBytes;
    const bool own = static_cast<int>(lane()) / kOwn == block, exists = own && record.at != nullptr;
    const std::uint32_t live = __ballot_sync(~0u, exists) >> block * kOwn;
    const auto at = reinterpret_cast<std::uint64_t>(record.at);
    const bool follows = at == __shfl_sync(~0u, at, block * kOwn) + lane() % kOwn * kBytes;
    const bool together = __ballot_sync(~0u, exists && follows) >> block * kOwn == (1u << kOwn) - 1;
    const std::uint32_t full = shared_address(&s.full[stage]);
    std::uint8_t* const to = s.codes[stage] + kOwn * warp() * kBytes;
    if (live != (1u << kOwn) - 1) {
#pragma unroll 1
      for (int t = 0; t < kOwn; ++t) {
        if (live >> t & 1) continue;
        for (unsigned i = lane(); i < kBytes / 16; i += 32) reinterpret_cast<uint4*>(to + t * kBytes)[i] = {};
      }
      fence_async_shared();  // bulk copies will follow there
      __syncwarp();
    }
    if (lane() == 0) {
      s.live[stage][warp()] = static_cast<std::uint8_t>(live);
      barrier_expect_bytes(full, __popc(live) * kBytes);
    }
    __syncwarp();
    if (together ? static_cast<int>(lane()) == block * kOwn : exists) {
      bulk_load(shared_address(to) + lane() % kOwn * kBytes, record.at, together ? kOwn * kBytes : kBytes,
                full);
    }
  }

  /// The same by lanes, 16 bytes each.
  __device__ void copy_by_lanes(const Record& record, int block, int stage) const {
    const bool exists = record.at != nullptr;
    const bool near = exists && static_cast<std::uint64_t>(record.at - p.cache.pages) >> 36 == 0;
    const int first = block * kOwn;
    const std::uint32_t live = __ballot_sync(~0u, exists) >> first & 0xff;
    const bool plain = (__ballot_sync(~0u, near) >> first & 0xff) == 0xff;
    const std::uint32_t full = shared_address(&s.full[stage]);
    if (plain) {
      copy_records<true>(record, live, first, stage);
    } else {
      copy_records<false>(exists ? record : Record{p.cache.pages}, live, first, stage);
    }
    copy_async_arrive(full);
    if (lane() == 0) {
      s.live[stage][warp()] = static_cast<std::uint8_t>(live);
      barrier_arrive(full);
    }
  }

  /// `ahead`: of look_ahead().
  __device__ void run(const Ahead& ahead) {
    blocks = ahead.blocks;
    std::int32_t found = ahead.found;
    bool more;
    do {
      const std::uint32_t first = before + round;
      const int count = min(blocks - round, kRound);
      const Record record = locate(found, token_of(current().work, round));
      const int late = late_block();
      int block = 0;
#pragma unroll 1
      do {
        if (block < count) {  // the first item may have no block
          if (C.appends && block >= late % kLateRadix) wait_for_items(p, late / kLateRadix, s.appended);
          const int stage = (first + block) % Traits::kStages;
          barrier_wait(shared_address(&s.empty[stage]), (first + block) / Traits::kStages & 1 ^ 1);
          if constexpr (Traits::kWhole) {
            copy_whole(record, block, stage);
          } else {
            copy_by_lanes(record, block, stage);
          }
        }
        if (block > 0) continue;
        more = find();  // not sooner: the first records are waited for
        if (more) found = look_up(current(), round);
      } while (++block < count);
    } while (more);
  }

 private:
  static constexpr int kLateRadix = 2 * kRound;
  /// The first block of the round that must wait for new tokens, or kRound, and kLateRadix times the item,
  /// since find() goes on to the next one before the round's last blocks: in one register.
  __device__ int late_block() const {
    int block = kRound;
    if (C.appends && p.new_tokens_late) {
      const int older = first_new_token(current()) - current().work.kv_begin;
      block = min(max(older / Traits::kTokens - round, 0), kRound);
    }
    return item * kLateRadix + block;
  }
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
