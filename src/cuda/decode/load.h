// The loading role of the decode kernel: two warps that refill the rings of the teams.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/decode/append.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {

/// Refills the ring of one team: one lane of a load warp. The block-table entries of the next piece are
/// fetched when the piece before it is issued, so that no copy waits for them.
template <DecodeConfig C>
struct Loader {
  using Traits = DecodeTraits<C>;
  const std::int32_t* table;
  int item = -1;  // index of the item that the next piece belongs to
  int token = 0;  // its first token
  int end = 0;    // of the item's tokens
  int kv_head;
  int first_new;             // token that is to be written first; INT_MAX: there is none
  int page[C.piece_tiles];   // of the piece's tiles
  RingPlace<C.stages> ring;  // where the piece goes

  /// Looks up the first piece of the next item that has one for the team; false if the queue holds none now.
  __device__ bool find(const DecodeParams& p, typename Traits::Shared& s, int team) {
    while (item + 1 < s.queue.count) {
      __threadfence_block();
      const DeviceItem& next = s.queue.items[++item % ItemQueue::kCapacity];
      const planning::WorkItem& work = next.work;
      token = work.kv_begin + team * Traits::kPieceTokens;
      end = work.kv_end;
      if (token >= end) continue;
      table = table_row(p.cache, work.request);
      kv_head = work.kv_head;
      first_new = p.new_tokens_late ? first_new_token(next) : INT_MAX;
      look_up(p);
      return true;
    }
    return false;
  }
  /// Whether the piece's place in the ring is free, and its new tokens are there.
  __device__ bool free(typename Traits::Shared& s, int team) const {
    return barrier_passed(shared_address(&s.empty[team][ring.stage]), ring.empty_parity()) &&
           (token + Traits::kPieceTokens <= first_new || has_appended<C>(s, item));
  }
  /// Issues the piece, tiles of a page in one copy, and looks up the next one; false if the item has none.
  __device__ bool issue(const AttentionParams& p, typename Traits::Shared& s, int team,
                        std::uint64_t policy) {
    const CacheView& c = p.cache;
    const std::uint32_t barrier = shared_address(&s.full[team][ring.stage]);
    const std::uint32_t place = shared_address(s.ring[team][ring.stage]);
    std::uint32_t live = 0;  // bit i: tile i is there
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      if (token + i * kTileTokens >= end) continue;
      if (has_page(p, page[i])) live |= 1u << i;
    }
    const int last_tile = (1 << c.page_log2) / kTileTokens - 1;
    std::uint32_t joined = 0;  // bit i: tile i stands behind tile i - 1, and is copied with it
#pragma unroll
    for (int i = 1; i < C.piece_tiles; ++i) {
      if ((live >> (i - 1) & 3) == 3 && ((token / kTileTokens + i) & last_tile) != 0) joined |= 1u << i;
    }
    const auto source = [&](int i) {
      return page_head(c, page[i], kv_head) + ((token / kTileTokens + i) & last_tile) * c.tile_bytes;
    };
    // Each copy moves up to where it stands as far into a line as in its page, tiles of one copy together.
    std::uint32_t shifts = 0;  // add_shift() of all tiles
    if constexpr (Traits::kShifts) {
      int shift = 0;
#pragma unroll
      for (int i = 0; i < C.piece_tiles; ++i) {
        if ((live & ~joined) >> i & 1) {
          const auto line = reinterpret_cast<std::uintptr_t>(source(i)) - (place + i * c.tile_bytes + shift);
          shift += static_cast<int>(line % kLineBytes);
        }
        shifts |= add_shift(i, shift);
      }
    }
    s.live[team][ring.stage] = live | shifts;
    barrier_expect_bytes(barrier, __popc(live) * c.tile_bytes);
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      if (!(live >> i & 1) || joined >> i & 1) continue;
      const int tiles = __ffs(~(joined >> (i + 1)));
      bulk_load(place + i * c.tile_bytes + shift_of(shifts, i), source(i), tiles * c.tile_bytes, barrier,
                policy);
    }
    ring.advance();
    token += C.teams * Traits::kPieceTokens;
    if (token >= end) return false;
    look_up(p);
    return true;
  }

 private:
  __device__ void look_up(const AttentionParams& p) {
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      const int at = token + i * kTileTokens;
      if (at < end) page[i] = page_entry(p.cache, table, at >> p.cache.page_log2);
    }
  }
};

/// By the compute warps, some of the rings' barriers each: those that one warp initialises follow one
/// another, some 55 clocks each. The load warps wait for them, and compute warps for each other's.
template <DecodeConfig C>
__device__ inline void init_rings(typename DecodeTraits<C>::Shared& s, int warp, int lane) {
  using Traits = DecodeTraits<C>;
  static_assert(C.teams * C.stages <= 32 * Traits::kWarps);
  const int i = lane * Traits::kWarps + warp, team = i / C.stages, stage = i % C.stages;
  if (team < C.teams) {
    barrier_init(shared_address(&s.full[team][stage]), 1);
    barrier_init(shared_address(&s.empty[team][stage]), team_warps(C));
  }
  fence_async_shared();
  hardware_barrier_arrive<kLoadReady, 32 * kLoadWarps + Traits::kComputeThreads>();
}
/// By the first load warp: the others.
template <DecodeConfig C>
__device__ inline void init_barriers(typename DecodeTraits<C>::Shared& s, int lane) {
  if (lane < 2) barrier_init(shared_address(&s.queries_full[lane]), 32 * kFinishWarps);
  if (lane == 2) barrier_init(shared_address(&s.states_empty), 32 * kFinishWarps);
  if (lane < kFinishWarps) s.appended[lane] = 0;
}

/// A load warp: the first one sets up barriers and the worker's first items, and extends the item queue.
/// Lane t of warp w refills the ring of team t * kLoadWarps + w, if there is one.
template <DecodeConfig C>
__device__ inline void load_worker(const DecodeParams& p, int worker, typename DecodeTraits<C>::Shared& s,
                                   int warp) {
  using Traits = DecodeTraits<C>;
  const int lane = thread_index() % 32;
  if (warp == 0) {
    if (!p.cache_settled) wait_for_previous_kernel();
    const ItemQueue::Listed listed = ItemQueue::fetch(p.list, worker, lane);
    init_barriers<C>(s, lane);
    s.queue.start(listed, bounds_of(p), lane);
    fence_async_shared();
    hardware_barrier_arrive<kComputeReady, Traits::kComputeThreads + 32>();
    hardware_barrier_arrive<kFinishReady, 32 * (kFinishWarps + 1)>();
  }
  hardware_barrier_wait<kLoadReady, 32 * kLoadWarps + Traits::kComputeThreads>();
  if constexpr (C.teams < kLoadWarps) {
    if (warp >= C.teams) return;
  }
  const std::uint64_t policy = evict_first_policy();
  const int team = lane * kLoadWarps + warp;
  const bool loads = team < C.teams;
  Loader<C> loader;
  bool ready = false;  // there is a piece to issue
#pragma unroll 1
  while (true) {
    if (__any_sync(~0u, loads && !ready)) {
      const bool more = __any_sync(~0u, s.queue.more);  // before what is there is looked at
      if (loads && !ready) ready = loader.find(p, s, team);
      if (!more && !__any_sync(~0u, ready)) break;
    }
    if (ready && loader.free(s, team)) {
      ready = loader.issue(p, s, team, policy);
    } else if (warp == 0 && lane == 0 && s.queue.more && !(p.appends && lags_behind<C>(s))) {
      s.queue.produce(p.schedule, bounds_of(p), worker);
    }
    __syncwarp();
  }
}

}  // namespace halftone::cuda
