// The roles that bring K and V in codes: a warp copies whole tiles from their pages, others turn them into
// f16 in shared memory, or turn V over (turn.h).
#pragma once

#include <climits>

#include "cuda/prefill/load.h"

namespace halftone::cuda {

/// Shared::packed_keys behind the last tile.
inline constexpr int kPackedEnd = INT_MIN;

/// The warp that copies tiles of all items as pages have them, a lane each, from the last one on: K and V
/// with their scales, or V's codes to where they are turned over. Of the former it has the next item taken
/// when few are left.
template <PrefillConfig C>
__device__ inline void load_packed(const PrefillParams& p, typename PrefillTraits<C>::Shared& s, int lane) {
  using Traits = PrefillTraits<C>;
  constexpr bool kPacked = Traits::kPacked;
  constexpr int kBytes = kPacked ? Traits::Tile::kBytes : kTileTokens * C.value_dim;
  constexpr int kAhead = Traits::kTakenAhead * C.kv_tile;
  const CacheView& cache = p.attention.cache;
  const int place_mask = (1 << cache.page_log2) / kTileTokens - 1, offset = kPacked ? 0 : cache.v_data_offset;
  std::uint64_t* const empty = kPacked ? s.packed_empty : s.v_empty;
  std::uint8_t* const tiles = kPacked ? s.packed[0][0] : s.v[0];
  ItemReader<C> items{s};
  RingPlace<Traits::kPackedStages> ring;
#pragma unroll 1
  while (const auto* const next = items.next()) {
    const DeviceItem* const item = &next->item;
    TileLoader<C> loader{p, *item, lane};
    int token = item->work.kv_begin + (tiles_of<C.kv_tile>(item->work) - 1) * C.kv_tile;
    const auto take_next = [&] {
      if (kPacked && lane == 0) barrier_arrive(shared_address(&s.take_next));
    };
    if (token < item->work.kv_begin + kAhead) take_next();
    loader.begin(token);
#pragma unroll 1
    for (; token >= item->work.kv_begin; token -= C.kv_tile, ring.advance()) {
      const std::uint32_t live = loader.check(token), full = shared_address(&s.packed_full[ring.stage]);
      const std::uint8_t* const from = page_head(cache, loader.page, item->work.kv_head) +
                                       ((token / kTileTokens + lane) & place_mask) * cache.tile_bytes +
                                       offset;
      barrier_wait(shared_address(&empty[ring.stage]), ring.empty_parity());
      if (lane == 0) {
        s.packed_live[ring.stage] = live;
        s.packed_keys[ring.stage] = item->present - token;
        barrier_expect_bytes(full, __popc(live) * kBytes);
      }
      __syncwarp();
      if (live >> lane & 1) {
        std::uint8_t* const to = tiles + (ring.stage * (C.kv_tile / kTileTokens) + lane) * kBytes;
        bulk_load(shared_address(to), from, kBytes, full);
      }
      __syncwarp();
      loader.advance(token - C.kv_tile);
      if (token == item->work.kv_begin + kAhead) take_next();
    }
    __syncwarp();  // all lanes have read the item
    if (lane == 0) items.release();
    items.advance();
  }
  barrier_wait(shared_address(&empty[ring.stage]), ring.empty_parity());
  if (lane == 0) {
    s.packed_keys[ring.stage] = kPackedEnd;
    barrier_arrive(shared_address(&s.packed_full[ring.stage]));
  }
}

/// The warps that convert: of each tile of kv_tile tokens a tile of 16 at a time, in turn, those of K first.
template <PrefillConfig C>
struct PackedConverter {
  using Traits = PrefillTraits<C>;
  using Tile = typename Traits::Tile;
  static constexpr int kTiles = Traits::kPackedTiles, kTileRows = kTileTokens * 128;  // bytes of rows
  typename Traits::Shared& s;
  const int warp;

  __device__ static int lane() { return thread_index() % 32; }  // read anew: registers are few
  /// What the warp has written is there, and it has read the packed tile.
  __device__ void release(std::uint64_t& full, std::uint64_t& empty) const {
    fence_async_shared();
    __syncwarp();
    if (lane() == 0) {
      barrier_arrive(shared_address(&full));
      barrier_arrive(shared_address(&empty));
    }
  }
  __device__ void convert_keys(int from, const RingPlace<C.stages>& to, int tile) const {
    barrier_wait(shared_address(&s.k_empty[to.stage]), to.empty_parity());
    float* const scales = s.key_scales[to.stage] + kTileTokens * tile;
    const bool scaled = TileConverter<C.part, C.kv_tile>{lane()}.template convert_keys<1>(
        s.packed[from][tile], s.k[to.stage] + tile * kTileRows, scales);
    if constexpr (Tile::kFourBits) {
      if (!scaled) scales[lane() % kTileTokens] = 1.0f;  // other keys of the tile may have some
      if (lane() == 0) s.keys_scaled[to.stage][tile] = scaled;
    }
    if (tile == 0 && lane() == 0) {
      s.live[to.stage] = s.packed_live[from] | (Tile::kScaledLogits ? kScaledTile : 0);
    }
    release(s.k_full[to.stage], s.packed_empty[from]);
  }
  /// `keys`: of the request from the first tile's on.
  __device__ void convert_values(int from, const RingPlace<C.stages>& to, int tile, int keys) const {
    barrier_wait(shared_address(&s.v_empty[to.stage]), to.empty_parity());
    const int alive = s.packed_live[from] >> tile & 1 ? keys - tile * kTileTokens : 0;
    std::uint8_t* const values = s.v[to.stage] + tile * kTileRows;
    const TileConverter<C.part, C.kv_tile> convert{lane()};
    if (alive >= kTileTokens) {
      convert.template convert_values<true>(s.packed[from][tile], values, alive);
    } else {
      convert.template convert_values<false>(s.packed[from][tile], values, alive);
    }
    release(s.v_full[to.stage], s.packed_empty[from]);
  }
  __device__ void run() const {
    RingPlace<C.packed_stages> from;
    RingPlace<C.stages> to;
#pragma unroll 1
    for (int task = warp;; task += Traits::kConvertWarps) {
      if (task >= Traits::kTasks) task -= Traits::kTasks, from.advance(), to.advance();
      barrier_wait(shared_address(&s.packed_full[from.stage]), from.parity);
      const int keys = s.packed_keys[from.stage];
      if (keys == kPackedEnd) return;
      if (task < kTiles) {
        convert_keys(from.stage, to, task);
      } else {
        convert_values(from.stage, to, task - kTiles, keys);
      }
    }
  }
};

}  // namespace halftone::cuda
