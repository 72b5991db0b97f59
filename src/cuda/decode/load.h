// The loading role of the decode kernel: two warps that refill the rings of the teams.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/decode/append.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {

/// Refills the rings of a load warp's teams, a lane for each tile of a piece. The block-table entries of the
/// next piece are fetched when the piece before it is issued, so that no copy waits for them, but for a piece
/// that must wait for new tokens itself.
template <DecodeConfig C>
struct Loader {
  using Traits = DecodeTraits<C>;
  static constexpr int kTiles = C.piece_tiles, kTeams = (C.teams + kLoadWarps - 1) / kLoadWarps;
  static constexpr std::uint32_t kAll = (1u << kTiles) - 1;
  static_assert(kTeams * kTiles <= 32 && (kTiles & (kTiles - 1)) == 0);
  const int tile, team;
  const bool loads;    // the lane has a team
  bool ready = false;  // there is a piece to issue
  const std::int32_t* table;
  int item = -1;  // index of the item that the next piece belongs to
  int token = 0;  // its first token
  int end = 0;    // of the item's tokens
  int kv_head;
  int first_new;             // token that is to be written first; INT_MAX: there is none
  int page;                  // of the lane's tile
  RingPlace<C.stages> ring;  // where the piece goes

  __device__ Loader(int warp, int lane)
      : tile(lane % kTiles),
        team(lane / kTiles * kLoadWarps + warp),
        loads(lane < kTeams * kTiles && team < C.teams) {}

  /// Looks up the first piece of the next item that has one for the team, if that is one of the first
  /// `count`, which is the same for all lanes.
  __device__ void find(const DecodeParams& p, const typename Traits::Shared& s, int count) {
    while (item + 1 < count) {
      __threadfence_block();
      const DeviceItem& next = s.queue.items[++item % ItemQueue::kCapacity];
      const planning::WorkItem& work = next.work;
      token = work.kv_begin + team * Traits::kPieceTokens;
      end = work.kv_end;
      ready = token < end;
      if (!ready) continue;
      table = table_row(p.cache, work.request);
      kv_head = work.kv_head;
      first_new = p.new_tokens_late ? first_new_token(next) : INT_MAX;
      look_up(p, s);
      return;
    }
  }
  /// The first lane of each team whose place in the ring is free for its piece, and its new tokens are there.
  __device__ std::uint32_t issuable(typename Traits::Shared& s) const {
    const bool free = ready &&
                      barrier_passed(shared_address(&s.empty[team][ring.stage]), ring.empty_parity()) &&
                      (token + Traits::kPieceTokens <= first_new || has_appended<C>(s, item));
    std::uint32_t all = __ballot_sync(~0u, free);
#pragma unroll
    for (int i = 1; i < kTiles; i *= 2) all &= all >> i;
    return all & first_lanes();
  }
  /// Issues the pieces of the teams `go`, tiles of a page in one copy, and looks up their next ones.
  __device__ void issue(const AttentionParams& p, typename Traits::Shared& s, std::uint32_t go, int lane,
                        std::uint64_t policy) {
    const CacheView& c = p.cache;
    const int first = lane - tile, at = token / kTileTokens + tile;
    const int last_tile = (1 << c.page_log2) / kTileTokens - 1;
    const bool own = go >> first & 1;
    const bool exists = own && at * kTileTokens < end && has_page(p, page);
    std::uint32_t live = exists;  // bit i: tile i is there
    std::uint32_t joined = 0;     // bit i: tile i stands behind tile i - 1, and is copied with it
    if constexpr (kTiles > 1) {
      live = __ballot_sync(~0u, exists) >> first & kAll;
      const bool follows = exists && tile > 0 && (live >> (tile - 1) & 1) && (at & last_tile) != 0;
      joined = __ballot_sync(~0u, follows) >> first & kAll;
    }
    const bool begins_copy = exists && !(joined >> tile & 1);
    const std::uint8_t* const source = tile_at(c, at);
    const std::uint32_t barrier = shared_address(&s.full[team][ring.stage]);
    std::uint32_t place = shared_address(s.ring[team][ring.stage]) + tile * c.tile_bytes, word = live;
    if constexpr (Traits::kShifts) {
      const int shift = shift_of_tile(begins_copy, reinterpret_cast<std::uintptr_t>(source) - place);
      place += shift;
      word |= add_shift(tile, shift);
#pragma unroll
      for (int i = 1; i < kTiles; i *= 2) word |= __shfl_xor_sync(~0u, word, i);
    }
    if (own && tile == 0) {
      s.live[team][ring.stage] = word;
      barrier_expect_bytes(barrier, __popc(live) * c.tile_bytes);
    }
    if constexpr (kTiles > 1) __syncwarp();
    if (begins_copy) {
      const int tiles = __ffs(~(joined >> (tile + 1)));
      bulk_load(place, source, tiles * c.tile_bytes, barrier, policy);
    }
    if (!own) return;
    ring.advance();
    token += C.teams * Traits::kPieceTokens;
    ready = token < end;
    if (ready) look_up(p, s);
  }

 private:
  static constexpr std::uint32_t first_lanes() {  // of the teams
    std::uint32_t lanes = 0;
    for (int i = 0; i < kTeams; ++i) lanes |= 1u << i * kTiles;
    return lanes;
  }
  __device__ void look_up(const AttentionParams& p, const typename Traits::Shared& s) {
    const int at = token + tile * kTileTokens;
    if (at >= end) return;
    page = page_entry(p.cache, table, at >> p.cache.page_log2);
    if (token + Traits::kPieceTokens > first_new && !is_appended<C>(s, item)) prefetch(p, at / kTileTokens);
  }
  /// Tile `at` of the request, in the page at hand.
  __device__ const std::uint8_t* tile_at(const CacheView& c, int at) const {
    return page_head(c, page, kv_head) + (at & ((1 << c.page_log2) / kTileTokens - 1)) * c.tile_bytes;
  }
  /// Brings it closer.
  __device__ void prefetch(const AttentionParams& p, int at) const {
    if (has_page(p, page)) prefetch_bytes_to_l2(tile_at(p.cache, at), p.cache.tile_bytes);
  }
  /// Each copy moves up to where it stands as far into a line as in its page, `distance` away, tiles of one
  /// copy together.
  __device__ int shift_of_tile(bool begins_copy, std::uintptr_t distance) const {
    int shift = 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int before = i == 0 ? 0 : __shfl_up_sync(~0u, shift, 1);
      const int more = begins_copy ? static_cast<int>((distance - before) % kLineBytes) : 0;
      if (tile == i) shift = before + more;
    }
    return shift;
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
/// Warp w refills the rings of teams w, w + kLoadWarps, ...
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
  Loader<C> loader(warp, lane);
#pragma unroll 1
  while (true) {
    if (__any_sync(~0u, loader.loads && !loader.ready)) {
      const bool more = __any_sync(~0u, s.queue.more);  // before what is there is looked at
      const int count = __shfl_sync(~0u, s.queue.count, 0);
      if (loader.loads && !loader.ready) loader.find(p, s, count);
      if (!more && !__any_sync(~0u, loader.ready)) break;
    }
    const std::uint32_t go = loader.issuable(s);
    if (go != 0) {
      loader.issue(p, s, go, lane, policy);
    } else if (warp == 0 && lane == 0 && s.queue.more && !(p.appends && lags_behind<C>(s))) {
      s.queue.produce(p.schedule, bounds_of(p), worker);
    }
    __syncwarp();
  }
}

}  // namespace halftone::cuda
