// The warps that bring tokens and queries, by tensor copies: no warp spends instructions on a token.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/attention/rows.h"
#include "cuda/device/cluster.h"
#include "cuda/device/tma.h"
#include "cuda/latent/dense/traits.h"

namespace halftone::cuda::dense {

/// Brings `bytes` to L2; these and the address are multiples of 16.
__device__ inline void prefetch_bytes_to_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/// Brings the steps of all items. Of a pair each block brings 32 tokens of a step, to both.
template <LatentDenseConfig C>
struct TokenLoader {
  static constexpr bool kPair = C.blocks == 2;
  static constexpr int kOwnTiles = kTiles / C.blocks;
  const LatentDenseParams& params;
  Shared& s;
  int rank, lane;
  const AttentionParams& p = params.attention;

  /// A lane's tile of 16 tokens of a step: its page, unless the lane has none or the item none of its tokens.
  struct Tile {
    std::int32_t page;
    bool wanted;
  };

  __device__ Tile look_up(const planning::WorkItem& work, const std::int32_t* table, int token) const {
    const int own = token + lane * kTileTokens, end = wide::end_of(work);
    const bool wanted =
        lane < kTiles && own < end && own + kTileTokens > work.kv_begin && work.kv_begin < end;
    return {wanted ? page_entry(p.cache, table, own >> p.cache.page_log2) : -1, wanted};
  }
  __device__ bool exists(const Tile& tile) const {
    return static_cast<std::uint32_t>(tile.page) < static_cast<std::uint32_t>(p.cache.num_pages);
  }
  /// Brings the block's own tokens to L2.
  __device__ void prefetch(const Tile& tile, int token) const {
    if (lane / kOwnTiles != rank || !exists(tile)) return;
    const int place = (token + lane * kTileTokens) & ((1 << p.cache.page_log2) - 1);
    prefetch_bytes_to_l2(p.cache.pages + tile.page * p.cache.page_stride + place * kTokenBytes,
                         kTileTokens * kTokenBytes);
  }
  /// The step at `token`, half by half as they are free. Tokens of pages that are not there are read outside
  /// the tensor, which gives zeros.
  __device__ void load(std::int32_t page, std::uint32_t live, int token, const StepPlace& at) const {
    const int stage = at.stage(), log2 = params.box_tokens == kTileTokens ? 0 : 1;  // tiles of a box
    const int boxes_log2 = (kPair ? 1 : 2) - log2, column = lane >> boxes_log2;
    const int tile = kOwnTiles * rank + ((lane & ((1 << boxes_log2) - 1)) << log2);
    // Of the tiles of a box, which share a page, one may have no token of the item.
    const std::int32_t own = max(__shfl_sync(~0u, page, tile), __shfl_sync(~0u, page, tile + log2));
    const int place = (token + tile * kTileTokens) & ((1 << p.cache.page_log2) - 1);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      // The rope part's place is free when both halves are.
      barrier_wait(shared_address(&s.kv_empty[stage][i ^ 1]), at.parity() ^ 1);
      const int columns = kHalfColumns + i, place_in_order = kHalfColumns * i + column;
      std::uint64_t* const full = s.kv_full[stage];
      if (lane == 0) {
        if (i == 0) s.live[stage] = live;
#pragma unroll
        for (int piece = 0; piece < kPieces / 2; ++piece) {
          const bool last = i == 1 && piece == kPieces / 2 - 1;
          barrier_expect_bytes(shared_address(full + kPieces / 2 * i + piece),
                               (kPieceColumns + last) * kColumnBytes);
        }
      }
      __syncwarp();
      if (column < columns) {
        const int to = column_at(place_in_order);
        const std::uint32_t shared = shared_address(s.kv[stage][to]) + tile * (kTileTokens * 128);
        const std::uint32_t barrier = shared_address(full + piece_of(place_in_order));
        if constexpr (kPair) {
          tensor_load_to(3, shared, params.kv, barrier, to * 64, place, own);
        } else {
          tensor_load(shared, params.kv, barrier, to * 64, place, own);
        }
      }
    }
  }

  __device__ void run() const {
    StepPlace at;
    const int worker = static_cast<int>(blockIdx.x) / C.blocks;
#pragma unroll 1
    for (int index = 0;; ++index) {
      if (lane == 0) {  // who waits for an item extends the queue
        while (s.queue.more && s.queue.count <= index) {
          s.queue.produce(p.schedule, bounds_of(p), worker);
        }
      }
      __syncwarp();
      if (!s.queue.has(index)) return;
      const planning::WorkItem& work = s.queue.items[index % unsigned{Queue::kCapacity}].work;
      const std::int32_t* const table = table_row(p.cache, work.request);
      int token = first_token(work);
      Tile next = look_up(work, table, token), behind = look_up(work, table, token + kBlockTokens);
      at.first = at.step;
#pragma unroll 1
      for (int left = steps_of(work); left > 0; --left, ++at.step, token += kBlockTokens) {
        const Tile tile = next;
        next = behind;
        behind = look_up(work, table, token + 2 * kBlockTokens);
        const bool has = tile.wanted && has_page(p, tile.page);
        const std::uint32_t live = __ballot_sync(~0u, has);
        prefetch(next, token + kBlockTokens);
        load(has ? tile.page : -1, live, token, at);
      }
    }
  }
};

/// Brings the rows of all items.
template <LatentDenseConfig C>
struct QueryLoader {
  const LatentDenseParams& params;
  Shared& s;
  int rank, lane;
  const AttentionParams& p = params.attention;

  /// By tensor copies, rows of other requests among them, whose results are not written.
  __device__ void copy_boxes(const DeviceItem& item) const {
    const int group = p.schedule.params.group, row = item.work.row_begin + kRows * rank;
    const std::uint32_t full = shared_address(&s.q_full);
    if (lane == 0) barrier_expect_bytes(full, kAllColumns * kColumnBytes);
    __syncwarp();
    if (lane < kAllColumns) {
      tensor_load(shared_address(s.q[lane]), params.q, full, lane * 64, row % group,
                  item.first_query + row / group);
    }
  }
  /// Row by row; those that the item lacks become zeros.
  __device__ void copy_rows(const DeviceItem& item) const {
    constexpr int kPieces = kAllColumns * 8;  // of a row, 16 bytes each
    const int rows = own_rows(item.work, rank);
#pragma unroll 1
    for (int i = lane; i < kRows * kPieces; i += 32) {
      const int row = i / kPieces, piece = i % kPieces;
      const bool has = row < rows;
      const RowPlace place = place_of(p, item, has ? kRows * rank + row : 0);
      const auto* const from = static_cast<const std::uint16_t*>(p.q) +
                               (has ? place.token * p.q_token_stride + place.head * p.q_head_stride : 0) +
                               8 * piece;
      std::uint8_t* const to = s.q[piece / 8] + place_in_column(row, piece % 8);
      if (p.q_aligned) {
        copy_async(shared_address(to), from, has ? 16 : 0);
      } else {
        *reinterpret_cast<uint4*>(to) = has ? load_eight(from, false) : uint4{};
      }
    }
    copy_async_wait();
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.q_full));
  }

  __device__ void run() const {
#pragma unroll 1
    for (int index = 0; s.queue.has(index); ++index) {
      const DeviceItem& item = s.queue.items[index % unsigned{Queue::kCapacity}];
      barrier_wait(shared_address(&s.q_empty), index % 2 ^ 1);
      if (params.q_boxes && own_rows(item.work, rank) > 0) {
        copy_boxes(item);
      } else {
        copy_rows(item);
      }
    }
  }
};

}  // namespace halftone::cuda::dense
