// The decode kernel's main loop.
#pragma once

#include "cuda/decode_compute.h"
#include "cuda/decode_finish.h"
#include "cuda/decode_load.h"

namespace halftone::cuda {

/// Zeroes what dead tokens of a tile could leak into O: V's scales and, for 16-bit V, the rows.
template <DecodeConfig C>
__device__ inline void clear_dead(const DecodeParams& p, std::uint8_t* tile, int dead_from, int lane) {
  if (dead_from == kTileTokens) return;
  if constexpr (C.v.mode != ScaleMode::kStatic) {
    const int planes = p.v.groups * (p.v.asymmetric ? 2 : 1);
    std::uint16_t* params = reinterpret_cast<std::uint16_t*>(tile + p.cache.v_param_offset);
#pragma unroll 1
    for (int i = lane; i < planes * kTileTokens; i += 32) {
      if (i % kTileTokens >= dead_from) params[i] = 0;
    }
  }
  if constexpr (dtype_bits(C.v.dtype) == 16) {
    uint4* rows = reinterpret_cast<uint4*>(tile + p.cache.v_data_offset + dead_from * C.head_dim * 2);
#pragma unroll 1
    for (int i = lane; i < (kTileTokens - dead_from) * C.head_dim / 8; i += 32) rows[i] = uint4{};
  }
  fence_async_shared();
  __syncwarp();
}

/// One piece: logits, softmax and O of its tiles.
template <DecodeConfig C>
__device__ inline void compute_piece(const DecodeParams& p, Warp<C>& w, typename DecodeTraits<C>::Shared& s,
                                     std::uint8_t* piece, int token, int keys, int end, std::uint32_t live,
                                     bool boundary, bool special) {
  using Traits = DecodeTraits<C>;
  constexpr int kSteps = Traits::kStepTiles;
#pragma unroll 1
  for (int base = 0; base < C.piece_tiles; base += kSteps) {
    std::uint8_t* tiles = piece + base * p.cache.tile_bytes;
    const int first = token + base * kTileTokens;
    float x[kSteps][Warp<C>::N][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) w.scores(p, tiles + i * p.cache.tile_bytes, x[i]);
    if (special) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        w.modify(p, s, first + i * kTileTokens, live >> (base + i) & 1 ? end : 0, x[i]);
      }
    }
    w.rescale(x);
    int dead_from[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) dead_from[i] = kTileTokens;
    if (boundary) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int alive = min(max(keys - first - i * kTileTokens, 0), kTileTokens);
        dead_from[i] = live >> (base + i) & 1 ? alive : 0;
        clear_dead<C>(p, tiles + i * p.cache.tile_bytes, dead_from[i], w.lane);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) w.accumulate(p, tiles + i * p.cache.tile_bytes, dead_from[i], x[i]);
  }
}

/// The compute warps: all items of the worker, a piece at a time per warp.
template <DecodeConfig C>
__device__ inline void compute_worker(const DecodeParams& p, typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  constexpr int kPieceTokens = C.piece_tiles * kTileTokens;
  const int warp = threadIdx.x / 32;
  Warp<C> w;
  w.lane = threadIdx.x % 32, w.g = w.lane / 4, w.t = w.lane % 4;
  const bool modified = p.softcap > 0.0f || p.alibi_slopes != nullptr;
  int stage = 0;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (int index = 0; s.queue.has(index); ++index) {
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    load_queries<C>(p, item, s);
    named_barrier<Traits::kThreads>();
    if (threadIdx.x == 0) s.queue.current = index;
    w.begin(p, item, s);
    const int end = item.work.kv_end, keys = item.keys;
    // Pieces between these need no mask: every row sees every key.
    const int all_from = s.places[item.work.row_end - item.work.row_begin - 1].position - p.window_left;
    const int all_to = min(end, s.places[0].position + p.causal_right + 1);
#pragma unroll 1
    for (int token = item.work.kv_begin + warp * kPieceTokens; token < end;
         token += Traits::kWarps * kPieceTokens) {
      barrier_wait(&s.full[warp][stage], parity);
      const std::uint32_t live = s.live[warp][stage];
      const bool boundary =
          token + kPieceTokens > all_to || token < all_from || live != (1u << C.piece_tiles) - 1;
      compute_piece<C>(p, w, s, s.ring[warp][stage], token, keys, end, live, boundary, boundary || modified);
      __syncwarp();
      if (w.lane == 0) barrier_arrive(&s.empty[warp][stage]);
      if (++stage == C.stages) stage = 0, parity ^= 1;
    }
    w.end(p, item, s, warp);
    finish_item<C>(p, item, s);
    named_barrier<Traits::kThreads>();
  }
}

/// One worker of the schedule: a thread block.
template <DecodeConfig C>
__device__ inline void decode_worker(const DecodeParams& p, int worker, typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  s.queue.start(p.list, worker);
  if (warp < Traits::kWarps && lane < C.stages) {
    barrier_init(&s.full[warp][lane], 1);
    barrier_init(&s.empty[warp][lane], 1);
  }
  fence_async_shared();
  __syncthreads();
  // 8 compute warps get the registers that the load warpgroup does not need; 4 have plenty.
  if (warp >= Traits::kWarps) {
    if constexpr (Traits::kWarps == 8) shrink_registers<56>();
    if (warp == Traits::kWarps) load_worker<C>(p, worker, s);
  } else {
    if constexpr (Traits::kWarps == 8) grow_registers<224>();
    compute_worker<C>(p, s);
  }
}

}  // namespace halftone::cuda
