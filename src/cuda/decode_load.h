// The loading role of the decode kernel: one warp that refills the rings of the teams.
#pragma once

#include "cuda/decode_shared.h"
#include "cuda/device/ptx.h"
#include "format/status.h"

namespace halftone::cuda {

/// Refills the ring of one team: one lane of a load warp. The next piece is prepared when the one before it has
/// been issued, and the block-table entries of the piece after it are fetched then: once its place in the
/// ring is free, a piece waits for nothing.
template <DecodeConfig C>
struct Loader {
  using Traits = DecodeTraits<C>;
  const std::int32_t* table;
  int item = -1;  // index of the item that the next piece belongs to
  int token = 0;  // its first token
  int end = 0;    // of the item's tokens
  int head_offset;
  int page[C.piece_tiles];            // of the piece after the next
  std::int64_t offset[C.piece_tiles];  // of the next piece's tiles
  std::uint32_t live;                  // bit i: tile i is there
  std::uint32_t ring, barriers;        // shared addresses of the team's ring and `full` barriers
  int stage = 0;                       // where the next piece goes
  int round = 0;                       // times that the ring has been filled

  __device__ Loader(typename Traits::Shared& s, int team)
      : ring(shared_address(s.ring[team])), barriers(shared_address(s.full[team])) {
    keep(ring), keep(barriers);
  }

  /// Prepares the first piece of the next item that has one for the team; false if the queue holds none now.
  __device__ bool find(const DecodeParams& p, typename Traits::Shared& s, int team) {
    while (item + 1 < s.queue.count) {
      __threadfence_block();
      const planning::WorkItem& work = s.queue.items[++item % ItemQueue::kCapacity].work;
      token = work.kv_begin + team * Traits::kPieceTokens;
      end = work.kv_end;
      if (token >= end) continue;
      table = p.cache.block_table + work.request * p.cache.table_stride;
      head_offset = work.kv_head * p.cache.head_bytes;
      look_up(p);
      prepare(p);
      return true;
    }
    return false;
  }
  /// Whether the piece's place in the ring is free.
  __device__ bool free() const {
    return round == 0 || barrier_passed(barriers + Traits::kEmptyOffset + stage * 8, round + 1 & 1);
  }
  /// Issues the prepared piece and prepares the next one; false if the item has none.
  __device__ bool issue(const DecodeParams& p, typename Traits::Shared& s, int team, std::uint64_t policy) {
    const CacheView& c = p.cache;
    const std::uint32_t barrier = barriers + stage * 8, at = ring + stage * Traits::kRingBytes;
    s.live[team][stage] = live;
    barrier_expect_bytes(barrier, __popc(live) * c.tile_bytes);
    const bool one_copy =
        C.piece_tiles == 2 && live == 3 && offset[C.piece_tiles - 1] == offset[0] + c.tile_bytes;
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      if (!(live >> i & 1) || (i == 1 && one_copy)) continue;
      bulk_load(at + i * c.tile_bytes, c.pages + offset[i],
                i == 0 && one_copy ? 2 * c.tile_bytes : c.tile_bytes, barrier, policy);
    }
    if (++stage == C.stages) stage = 0, ++round;
    token += C.teams * Traits::kPieceTokens;
    if (token >= end) return false;
    prepare(p);
    return true;
  }

 private:
  /// Turns the entries that have been looked up into the next piece, and looks up those after it.
  __device__ void prepare(const DecodeParams& p) {
    const CacheView& c = p.cache;
    live = 0;
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      const int at = token + i * kTileTokens;
      if (at < end) {
        if (!c.clamped || static_cast<unsigned>(page[i]) < static_cast<unsigned>(c.num_pages)) {
          live |= 1u << i;
        } else if (p.status != nullptr) {
          atomicOr(p.status, kStatusBadPage);
        }
      }
      const int tile = (at & ((1 << c.page_log2) - 1)) / kTileTokens;
      offset[i] = page[i] * c.page_stride + (head_offset + tile * c.tile_bytes);
    }
    look_up(p, C.teams * Traits::kPieceTokens);
  }
  __device__ void look_up(const DecodeParams& p, int ahead = 0) {
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      const int at = token + ahead + i * kTileTokens;
      if (at < end) page[i] = table[at >> p.cache.page_log2];
    }
  }
};

/// By the first load warp.
template <DecodeConfig C>
__device__ inline void init_barriers(typename DecodeTraits<C>::Shared& s, int lane) {
  if (lane < C.teams) {
#pragma unroll
    for (int i = 0; i < C.stages; ++i) {
      barrier_init(shared_address(&s.full[lane][i]), 1);
      barrier_init(shared_address(&s.empty[lane][i]), C.row_groups);
    }
  }
  if (lane < 2) barrier_init(shared_address(&s.queries_full[lane]), kFinishWarps);
  if (lane == 2) barrier_init(shared_address(&s.states_empty), kFinishWarps);
}

/// A load warp: the first one sets up the barriers and the worker's first items, and extends the item queue.
/// Lane t of warp w refills the ring of team t * kLoadWarps + w.
template <DecodeConfig C>
__device__ inline void load_worker(const DecodeParams& p, int worker, typename DecodeTraits<C>::Shared& s,
                                   int warp) {
  using Traits = DecodeTraits<C>;
  const int lane = thread_index() % 32;
  if (warp == 0) {
    if (!p.cache_settled) wait_for_previous_kernel();
    const ItemQueue::Listed listed = ItemQueue::fetch(p.list, worker, lane);
    init_barriers<C>(s, lane);
    s.queue.start(listed, lane);
    fence_async_shared();
    hardware_barrier_arrive<kComputeReady, Traits::kComputeThreads + 32>();
    if constexpr (Traits::kOthersReady > 32) hardware_barrier_arrive<kOthersReady, Traits::kOthersReady>();
  } else {
    hardware_barrier_wait<kOthersReady, Traits::kOthersReady>();
  }
  const std::uint64_t policy = evict_first_policy();
  const int team = lane * kLoadWarps + warp;
  const bool loads = team < C.teams;
  Loader<C> loader(s, loads ? team : 0);
  bool ready = false;  // a piece is prepared
#pragma unroll 1
  while (true) {
    if (__any_sync(~0u, loads && !ready)) {
      const bool more = s.queue.more;  // before what is there is looked at
      if (loads && !ready) ready = loader.find(p, s, team);
      if (!more && !__any_sync(~0u, ready)) break;
    }
    if (ready && loader.free()) {
      ready = loader.issue(p, s, team, policy);
    } else if (warp == 0 && lane == 0 && s.queue.more) {
      s.queue.produce(p.schedule, worker);
    }
    __syncwarp();
  }
}

}  // namespace halftone::cuda
