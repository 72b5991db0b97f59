// The loading role: a warp that finds the worker's items and copies their pieces.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/device/ptx.h"
#include "cuda/device/tma.h"

namespace halftone::cuda {

/// Entries of the block table for the tiles of eight pieces, one in each lane, and of the next eight on the
/// way.
struct TableWindow {
  std::int32_t page = -1, next = -1;

  /// Of lane `lane`'s tile when the first of eight pieces begins at `token`. Tiles outside the item have
  /// none.
  static __device__ std::int32_t entry(const AttentionParams& p, const planning::WorkItem& work,
                                       const std::int32_t* table, int token, int lane) {
    const int own = token + lane * kTileTokens;
    if (own + kTileTokens <= work.kv_begin || own >= work.kv_end) return -1;
    return page_entry(p.cache, table, own >> p.cache.page_log2);
  }
};

template <DecodeConfig C>
struct RowsLoader {
  using Traits = DecodeRowsTraits<C>;
  const DecodeRowsParams& params;
  typename Traits::Shared& s;
  int lane;
  std::uint64_t policy;
  unsigned piece = 0;  // of all of the worker

  /// Lanes 0 to 3 bring V of a tile each, the next eight the halves of K of each run of tiles.
  __device__ void load_item(const DeviceItem& item) {
    const AttentionParams& p = params.attention;
    const CacheView& c = p.cache;
    const planning::WorkItem& work = item.work;
    const PieceRange<Traits::kPieceTokens> range(work);
    const std::int32_t* const table = table_row(c, work.request);
    const int tile = lane % 4, kind = lane / 4;  // 0: V, 1 and 2: halves of K
    const int last_tile = (1 << c.page_log2) / kTileTokens - 1;
    constexpr int kWindow = 8 * Traits::kPieceTokens;
    TableWindow window;
    window.next = TableWindow::entry(p, work, table, range.first, lane);
#pragma unroll 1
    for (int i = 0; i < range.count; ++i, ++piece) {
      const int token = range.first + i * Traits::kPieceTokens, own = token + tile * kTileTokens;
      if (i % 8 == 0) {
        window.page = window.next;
        window.next = TableWindow::entry(p, work, table, token + kWindow, lane);
      }
      const std::int32_t page = __shfl_sync(~0u, window.page, i % 8 * 4 + tile);
      const bool wanted = own + kTileTokens > work.kv_begin && own < work.kv_end;
      const bool has = kind == 0 && wanted && has_page(p, page);
      const std::uint32_t live = __ballot_sync(~0u, has);  // of the first four lanes
      const int first = tile / params.run_tiles * params.run_tiles;
      const std::uint32_t run = live >> first & ((1u << params.run_tiles) - 1);
      const int place = (token / kTileTokens + tile) & last_tile;
      // A run lies in one page, that of any of its tiles.
      const std::int32_t run_page = __shfl_sync(~0u, page, run == 0 ? 0 : first + __ffs(run) - 1);
      const bool copies = kind == 0 ? has : kind < 3 && tile == first && run != 0;
      const int runs = __popc(__ballot_sync(~0u, copies && kind == 1));
      const PiecePlace<Traits::kStages> at(piece);
      const std::uint32_t full = shared_address(&s.full[at.stage]);
      barrier_wait(shared_address(&s.empty[at.stage]), at.empty_parity());
      if (lane == 0) {
        s.live[at.stage] = live;
        barrier_expect_bytes(full, __popc(live) * Traits::kValueTileBytes +
                                       runs * params.run_tiles * kTileTokens * Traits::kDim);
      }
      __syncwarp();
      if (!copies) continue;
      if (kind == 0) {
        bulk_load(shared_address(s.v[at.stage][tile]),
                  page_head(c, page, work.kv_head) + place * c.tile_bytes + c.v_data_offset,
                  Traits::kValueTileBytes, full, policy);
      } else {
        tensor_load(
            shared_address(s.k[at.stage]) + (kind - 1) * (Traits::kKeyBytes / 2) + tile * (kTileTokens * 64),
            params.k, full, 0, (kind - 1) * kTileTokens, place, work.kv_head, run_page);
      }
    }
  }

  /// Whether item `index` exists; items that the list lacks are found here.
  __device__ bool has(int index) {
    if (lane == 0) {
      while (s.queue.count <= index && s.queue.more) {
        s.queue.produce(params.attention.schedule, bounds_of(params.attention), blockIdx.x);
      }
    }
    __syncwarp();
    return s.queue.has(index);
  }
  __device__ void run() {
    policy = evict_first_policy();
#pragma unroll 1
    for (int index = 0; has(index); ++index) load_item(s.queue.items[index % ItemQueue::kCapacity]);
  }
};

/// By the load warp, before the block's first barrier.
template <DecodeConfig C>
__device__ inline void start_rows(const AttentionParams& p, typename DecodeRowsTraits<C>::Shared& s,
                                  int lane) {
  using Traits = DecodeRowsTraits<C>;
  if (!p.cache_settled) wait_for_previous_kernel();
  const ItemQueue::Listed listed = ItemQueue::fetch(p.list, blockIdx.x, lane);
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < Traits::kStages; ++i) {
      barrier_init(shared_address(&s.full[i]), 1);
      barrier_init(shared_address(&s.empty[i]), 8);  // the piece's compute warps, and those that convert
    }
#pragma unroll 1
    for (int i = 0; i < Traits::kValueStages; ++i) {
      barrier_init(shared_address(&s.values_full[i]), 4);
      barrier_init(shared_address(&s.values_empty[i]), 4);
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&s.queries_full[i]), Traits::kQueryWarps);
      barrier_init(shared_address(&s.queries_empty[i]), 4 * Traits::kTeams);
    }
  }
  s.queue.start(listed, bounds_of(p), lane);
  fence_async_shared();
}

}  // namespace halftone::cuda
