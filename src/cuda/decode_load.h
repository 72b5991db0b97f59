// The loading role of the decode kernel: one warp that refills the rings of the teams.
#pragma once

#include "cuda/decode_shared.h"
#include "cuda/device/ptx.h"
#include "format/status.h"

namespace halftone::cuda {

/// Refills the ring of one team: one lane of the load warp. The block-table entries of the next piece are
/// fetched when the piece before it is issued, so that no copy waits for them.
template <DecodeConfig C>
struct Loader {
  using Traits = DecodeTraits<C>;
  int item = -1;  // index of the item that the next piece belongs to
  int token = 0;  // its first token
  int end = 0;    // of the item's tokens
  int head = 0;
  int page[C.piece_tiles];
  const std::int32_t* table = nullptr;
  int stage = 0;  // where the next piece goes
  int round = 0;  // times that the ring has been filled

  /// Finds the next piece; false if the queue holds none now.
  __device__ bool find(const DecodeParams& p, typename Traits::Shared& s, int team) {
    while (token >= end) {
      if (item + 1 >= s.queue.count) return false;
      __threadfence_block();
      const planning::WorkItem& work = s.queue.items[++item % ItemQueue::kCapacity].work;
      table = p.cache.block_table + work.request * p.cache.table_stride;
      head = work.kv_head;
      token = work.kv_begin + team * Traits::kPieceTokens;
      end = work.kv_end;
      look_up(p);
    }
    return true;
  }
  /// Whether the piece's place in the ring is free.
  __device__ bool free(typename Traits::Shared& s, int team) const {
    return round == 0 || barrier_passed(&s.empty[team][stage], round + 1 & 1);
  }
  __device__ void issue(const DecodeParams& p, typename Traits::Shared& s, int team, std::uint64_t policy) {
    const CacheView& c = p.cache;
    std::uint64_t* barrier = &s.full[team][stage];
    std::uint8_t* ring = s.ring[team][stage];
    std::uint32_t live = 0;
    std::int64_t offset[C.piece_tiles];
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
      offset[i] = page[i] * c.page_stride + (head * c.head_bytes + tile * c.tile_bytes);
    }
    s.live[team][stage] = live;
    barrier_expect_bytes(barrier, __popc(live) * c.tile_bytes);
    std::uint32_t joined = 0;  // bit i: tile i stands behind tile i - 1, and is copied with it
#pragma unroll
    for (int i = 1; i < C.piece_tiles; ++i) {
      if ((live >> (i - 1) & 3) == 3 && offset[i] == offset[i - 1] + c.tile_bytes) joined |= 1u << i;
    }
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      if (!(live >> i & 1) || joined >> i & 1) continue;
      const int tiles = __ffs(~(joined >> (i + 1)));
      bulk_load(ring + i * c.tile_bytes, c.pages + offset[i], tiles * c.tile_bytes, barrier, policy);
    }
    if (++stage == C.stages) stage = 0, ++round;
    token += C.teams * Traits::kPieceTokens;
    look_up(p);
  }

 private:
  __device__ void look_up(const DecodeParams& p) {
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      const int at = token + i * kTileTokens;
      page[i] = at < end ? table[at >> p.cache.page_log2] : -1;
    }
  }
};

/// The load warp: lane t refills the ring of team t; lane 0 also extends the item queue.
template <DecodeConfig C>
__device__ inline void load_worker(const DecodeParams& p, int worker, typename DecodeTraits<C>::Shared& s) {
  const int lane = thread_index() % 32;
  const std::uint64_t policy = evict_first_policy();
  Loader<C> loader;
  bool more = true;
#pragma unroll 1
  while (__any_sync(~0u, more)) {
    bool issued = false;
    more = s.queue.more;
    if (lane < C.teams && loader.find(p, s, lane)) {
      more = true;
      if (loader.free(s, lane)) {
        loader.issue(p, s, lane, policy);
        issued = true;
      }
    }
    if (lane == 0 && s.queue.more) s.queue.produce(p.schedule, worker);
    if (!__any_sync(~0u, issued)) __nanosleep(20);
  }
}

}  // namespace halftone::cuda
