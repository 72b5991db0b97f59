// The loading role: a warp copies the worker's pieces, and finds its items.
#pragma once

#include <iterator>

#include "cuda/attention/pages.h"
#include "cuda/decode/append.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/device/ptx.h"

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

/// The warp that loads.
template <DecodeConfig C>
struct RowsLoader {
  using Traits = DecodeRowsTraits<C>;
  static constexpr int kAhead = 2;
  const DecodeParams& p;
  typename Traits::Shared& s;
  int lane;

  /// Pieces before the first one with new tokens, if those come late.
  __device__ int settled_pieces(const DeviceItem& item, const PieceRange<Traits::kPieceTokens>& range) const {
    if (!p.new_tokens_late) return range.count;
    return min(max(first_new_token(item) - range.first, 0) / Traits::kPieceTokens, range.count);
  }

  /// Tiles of item `index`: a lane for each of a piece. `piece`: of all of the worker.
  __device__ void load(int index, unsigned& piece, std::uint64_t policy) const {
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    const CacheView& c = p.cache;
    const PieceRange<Traits::kPieceTokens> range(item.work);
    const int tile = lane % C.piece_tiles, first = range.first / kTileTokens + tile;
    const int place_mask = (1 << c.page_log2) / kTileTokens - 1;
    const int begin = item.work.kv_begin, end = item.work.kv_end;
    const std::uint8_t* const from = page_head(c, 0, item.work.kv_head);
    const std::uint32_t to = shared_address(s.tiles[0][tile]);
    TableWindow window(c, item.work, range.first, lane);
    int i = 0, ready = settled_pieces(item, range);  // pieces that may be read
    while (true) {
#pragma unroll 1
      for (; i < ready; ++i, ++piece) {
        if ((i & 7) == 0) window.advance();
        const std::int32_t page = __shfl_sync(~0u, window.page, (i & 7) * C.piece_tiles + tile);
        const int place = first + i * C.piece_tiles, token = place * kTileTokens;
        const bool has = lane < C.piece_tiles && token >= begin && token < end && has_page(p, page);
        const std::uint32_t live = __ballot_sync(~0u, has);
        const std::uint8_t* const source = from + page * c.page_stride + (place & place_mask) * c.tile_bytes;
        const auto at = RingPlace<Traits::kStages>::of(piece);
        const std::uint32_t full = shared_address(&s.full[at.stage]);
        barrier_wait(shared_address(&s.empty[at.stage]), at.empty_parity());
        if (lane == 0) {
          s.live[at.stage] = live;
          barrier_expect_bytes(full, __popc(live) * Traits::Tile::kBytes);
        }
        __syncwarp();
        if (has) {
          bulk_load(to + at.stage * (C.piece_tiles * Traits::Tile::kBytes), source, Traits::Tile::kBytes,
                    full, policy);
        }
        __syncwarp();
      }
      if (i == range.count) return;
      while (s.appended <= index) __nanosleep(100);
      fence_tokens();
      ready = range.count;
    }
  }

  __device__ void run() const {
    const std::uint64_t policy = evict_first_policy();
    unsigned piece = 0;
#pragma unroll 1
    for (int index = 0;; ++index) {
      // Of problems that append further items, so that new tokens are written before they are asked for.
      const int ahead = p.appends ? kAhead : 0;
      if (lane == 0) s.queue.extend(index + ahead, p.schedule, bounds_of(p), blockIdx.x);
      __syncwarp();
      if (!s.queue.has(index)) return;
      load(index, piece, policy);
    }
  }
};

/// By the compute warps, a kind of barriers each, before the block's first barrier: those that one warp
/// initialises follow one another.
template <DecodeConfig C>
__device__ inline void init_rows(typename DecodeRowsTraits<C>::Shared& s, int warp, int lane) {
  using Traits = DecodeRowsTraits<C>;
  static_assert(Traits::kValueWarp >= 8);
  const auto init = [&](auto& barriers, int arrivals) {
    if (lane < static_cast<int>(std::size(barriers))) barrier_init(shared_address(&barriers[lane]), arrivals);
  };
  if (warp == 0) init(s.full, 1);
  if (warp == 1) init(s.empty, Traits::kValueWarps + Traits::kKeyWarps);
  if (warp == 2) init(s.keys_full, Traits::kKeyWarps);
  if (warp == 3) init(s.keys_empty, 4);  // the warps of a team
  if (warp == 4) init(s.values_full, Traits::kValueWarps);
  if (warp == 5) init(s.values_empty, 4);  // likewise
  if (warp == 6) init(s.queries_full, 1 + Traits::kValueWarps);
  if (warp == 7) init(s.queries_empty, 4 * Traits::kTeams);
  fence_async_shared();
}

/// By the load warp, before the block's first barrier.
template <DecodeConfig C>
__device__ inline void start_rows(const DecodeParams& p, typename DecodeRowsTraits<C>::Shared& s, int lane) {
  if (lane == 0) s.appended = 0;
  if (!p.cache_settled) wait_for_previous_kernel();
  s.queue.start(ItemQueue::fetch(p.list, blockIdx.x, lane), bounds_of(p), lane);
}

}  // namespace halftone::cuda
