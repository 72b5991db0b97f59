// The loading roles: a warp copies K of the worker's pieces, and finds its items, another one copies V.
#pragma once

#include <iterator>

#include "cuda/attention/pages.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/device/ptx.h"
#include "cuda/device/tma.h"

namespace halftone::cuda {

/// Entries of the block table for the tiles of eight pieces, one in each lane, and of the next eight on the
/// way. Tiles outside the item have none.
struct TableWindow {
  const CacheView& cache;
  const std::int32_t* table;
  int begin, end;  // of the item's keys
  int token;       // of the lane's tile in the next eight pieces
  std::int32_t page = -1, next = -1;

  __device__ TableWindow(const CacheView& c, const planning::WorkItem& work, int first, int lane)
      : cache(c),
        table(table_row(c, work.request)),
        begin(work.kv_begin),
        end(work.kv_end),
        token(first + lane * kTileTokens) {
    advance();
  }
  __device__ void advance() {
    page = next, next = -1;
    if (token >= begin && token < end) next = page_entry(cache, table, token >> cache.page_log2);
    token += 32 * kTileTokens;
  }
};

template <DecodeConfig C>
struct RowsLoader {
  using Traits = DecodeRowsTraits<C>;
  const DecodeRowsParams& params;
  typename Traits::Shared& s;
  int lane;

  /// K of an item: lane 2 i + h brings half h of the i-th run of tiles of a piece. `piece`: of all of the
  /// worker.
  __device__ void load_keys(const DeviceItem& item, unsigned& piece) const {
    const CacheView& c = params.attention.cache;
    const PieceRange<Traits::kPieceTokens> range(item.work);
    const int half = lane % 2, tile = lane / 2 * params.run_tiles, head = item.work.kv_head;
    const int place_mask = (1 << c.page_log2) / kTileTokens - 1, tiles = params.run_tiles;
    const int bytes = tiles * (kTileTokens * 64), first = range.first / kTileTokens + tile;
    const bool copies = tile < C.piece_tiles;
    const std::uint32_t to =
        shared_address(s.k[0]) + half * (Traits::kKeyBytes / 2) + tile * (kTileTokens * 64);
    TableWindow window(c, item.work, range.first, lane);
#pragma unroll 1
    for (int i = 0; i < range.count; ++i, ++piece) {
      if (i % 8 == 0) window.advance();
      std::int32_t page = -1;  // of the run, all of whose tiles within the item have it
#pragma unroll
      for (int j = 0; j < C.piece_tiles; ++j) {
        const std::int32_t own =
            __shfl_sync(~0u, window.page, i % 8 * C.piece_tiles + (tile + j) % C.piece_tiles);
        if (j < tiles && own != -1) page = own;
      }
      const bool has = copies && static_cast<std::uint32_t>(page) < static_cast<std::uint32_t>(c.num_pages);
      const int count = __popc(__ballot_sync(~0u, has));
      const PiecePlace<Traits::kStages> at(piece);
      const std::uint32_t full = shared_address(&s.full[at.stage]);
      barrier_wait(shared_address(&s.empty[at.stage]), at.empty_parity());
      if (lane == 0) barrier_expect_bytes(full, count * bytes);
      __syncwarp();
      if (has) {
        tensor_load(to + at.stage * Traits::kKeyBytes, params.k, full, 0, half * kTileTokens,
                    first + i * C.piece_tiles & place_mask, head, page);
      }
      __syncwarp();
    }
  }

  /// V of an item, with the params of K and V: a lane for each tile of a piece.
  __device__ void load_values(const DeviceItem& item, unsigned& piece, std::uint64_t policy) const {
    const AttentionParams& p = params.attention;
    const CacheView& c = p.cache;
    const PieceRange<Traits::kPieceTokens> range(item.work);
    const int tile = lane % C.piece_tiles, first = range.first / kTileTokens + tile;
    const int place_mask = (1 << c.page_log2) / kTileTokens - 1;
    const int begin = item.work.kv_begin, end = item.work.kv_end;
    const std::uint8_t* const from = page_head(c, 0, item.work.kv_head) + c.v_data_offset;
    const std::uint32_t to = shared_address(s.v[0][tile]);
    TableWindow window(c, item.work, range.first, lane);
#pragma unroll 1
    for (int i = 0; i < range.count; ++i, ++piece) {
      if (i % 8 == 0) window.advance();
      const std::int32_t page = __shfl_sync(~0u, window.page, i % 8 * C.piece_tiles + tile);
      const int place = first + i * C.piece_tiles, token = place * kTileTokens;
      const bool has = lane < C.piece_tiles && token >= begin && token < end && has_page(p, page);
      const std::uint32_t live = __ballot_sync(~0u, has);
      const std::uint8_t* const source = from + page * c.page_stride + (place & place_mask) * c.tile_bytes;
      const PiecePlace<Traits::kStages> at(piece);
      const std::uint32_t full = shared_address(&s.full[at.stage]);
      barrier_wait(shared_address(&s.empty[at.stage]), at.empty_parity());
      if (lane == 0) {
        s.live[at.stage] = live;
        barrier_expect_bytes(full, __popc(live) * Traits::kValueTileBytes);
      }
      __syncwarp();
      if (has) {
        bulk_load(to + at.stage * (C.piece_tiles * Traits::kValueTileBytes), source, Traits::kValueTileBytes,
                  full, policy);
      }
      __syncwarp();
    }
  }

  /// Finds item `index`, if the list lacks it.
  __device__ void produce(int index) const {
    if (lane == 0) {
      while (s.queue.count <= index && s.queue.more) {
        s.queue.produce(params.attention.schedule, bounds_of(params.attention), blockIdx.x);
      }
    }
    __syncwarp();
  }
  __device__ void run_keys() const {
    unsigned piece = 0;
#pragma unroll 1
    for (int index = 0; produce(index), s.queue.has(index); ++index) {
      load_keys(s.queue.items[index % ItemQueue::kCapacity], piece);
    }
  }
  __device__ void run_values() const {
    const std::uint64_t policy = evict_first_policy();
    unsigned piece = 0;
#pragma unroll 1
    for (int index = 0; s.queue.has(index); ++index) {
      load_values(s.queue.items[index % ItemQueue::kCapacity], piece, policy);
    }
  }
};

/// By the compute warps, a kind of barriers each, before the block's first barrier: those that one warp
/// initialises follow one another.
template <DecodeConfig C>
__device__ inline void init_rows(typename DecodeRowsTraits<C>::Shared& s, int warp, int lane) {
  using Traits = DecodeRowsTraits<C>;
  static_assert(Traits::kConvertWarp >= 6);
  const auto init = [&](auto& barriers, int arrivals) {
    if (lane < static_cast<int>(std::size(barriers))) barrier_init(shared_address(&barriers[lane]), arrivals);
  };
  if (warp == 0) init(s.full, 2);   // the load warps
  if (warp == 1) init(s.empty, 8);  // the compute warps of the piece, and those that convert
  if (warp == 2) init(s.values_full, 4);
  if (warp == 3) init(s.values_empty, 4);
  if (warp == 4) init(s.queries_full, Traits::kQueryWarps);
  if (warp == 5) init(s.queries_empty, 4 * Traits::kTeams);
  fence_async_shared();
}

/// By the first load warp, before the block's first barrier.
template <DecodeConfig C>
__device__ inline void start_rows(const DecodeRowsParams& params, typename DecodeRowsTraits<C>::Shared& s,
                                  int lane) {
  const AttentionParams& p = params.attention;
  if (!p.cache_settled) wait_for_previous_kernel();
  s.queue.start(ItemQueue::fetch(p.list, blockIdx.x, lane), bounds_of(p), lane);
  if (lane == 0) prefetch_map(params.k);
}

}  // namespace halftone::cuda
