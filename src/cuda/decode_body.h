// The decode kernel's main loop.
#pragma once

#include "cuda/decode_finish.h"
#include "cuda/decode_kernel.h"

namespace halftone::cuda {

/// Zeroes what dead tokens of a tile could leak into O: V's scales and, for 16-bit V, the rows.
template <DecodeConfig C>
__device__ inline void clear_dead(const DecodeParams& p, std::uint8_t* tile, int dead_from, int lane) {
  const int dead = kTileTokens - dead_from;
  if constexpr (C.v_mode != ScaleMode::kStatic) {
    const int planes = p.v.groups * (p.v.asymmetric ? 2 : 1);
    for (int i = lane; i < planes * dead; i += 32) {
      const int index = i / dead * kTileTokens + dead_from + i % dead;
      if (p.v.f32) {
        reinterpret_cast<float*>(tile + p.cache.v_param_offset)[index] = 0.0f;
      } else {
        reinterpret_cast<std::uint16_t*>(tile + p.cache.v_param_offset)[index] = 0;
      }
    }
  }
  if constexpr (dtype_bits(C.v) == 16) {
    uint4* rows = reinterpret_cast<uint4*>(tile + p.cache.v_data_offset + dead_from * C.head_dim * 2);
    for (int i = lane; i < dead * C.head_dim / 8; i += 32) rows[i] = uint4{};
  }
  fence_async_shared();
  __syncwarp();
}

/// One worker: all its items, a piece at a time per warp.
template <DecodeConfig C>
__device__ void decode_worker(const DecodeParams& p, int worker, typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  constexpr int kPieceTokens = C.piece_tiles * kTileTokens;
  const int warp = threadIdx.x / 32;
  const std::uint64_t policy = evict_first_policy();
  Warp<C> w;
  w.lane = threadIdx.x % 32, w.g = w.lane / 4, w.t = w.lane % 4;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kWarps * C.stages; ++i) barrier_init(&s.full[0][0] + i, 1);
    fence_async_shared();
  }
  __syncthreads();
  Loader<C> loader(p.schedule, worker, warp);
  if (w.lane == 0) {
    for (int i = 0; i < C.stages; ++i) loader.load_next(p, s, warp, i, policy);
  }
  int stage = 0;
  std::uint32_t parity = 0;
  planning::WorkCursor cursor(p.schedule, worker);
  for (planning::WorkItem item; cursor.next(item);) {
    const int keys = p.schedule.kv_lengths[item.request];
    const int queries = p.schedule.cu_q[item.request + 1] - p.schedule.cu_q[item.request];
    const int group = p.schedule.params.group;
    const int first_position = item.row_begin / group + keys - queries;
    const int last_position = (item.row_end - 1) / group + keys - queries;
    // Keys that every row sees need no mask.
    const int all_from = last_position - p.window_left, all_to = first_position + p.causal_right + 1;
    load_queries<C>(p, item, s);
    __syncthreads();
    w.begin(p, item, s);
    for (int token = item.kv_begin + warp * kPieceTokens; token < item.kv_end; token += Traits::kWarps * kPieceTokens) {
      barrier_wait(&s.full[warp][stage], parity);
      std::uint8_t* piece = s.ring[warp][stage];
      const std::uint32_t live = s.live[warp][stage];
      const bool boundary = token + kPieceTokens > min(item.kv_end, all_to) || token < all_from ||
                            live != (1u << C.piece_tiles) - 1;
      float x[C.piece_tiles][Warp<C>::N][4];
#pragma unroll
      for (int i = 0; i < C.piece_tiles; ++i) {
        w.scores(p, piece + i * p.cache.tile_bytes, x[i]);
        w.logits(p, item, token + i * kTileTokens, boundary, live >> i & 1, x[i]);
      }
      w.rescale(x);
#pragma unroll
      for (int i = 0; i < C.piece_tiles; ++i) {
        std::uint8_t* tile = piece + i * p.cache.tile_bytes;
        int dead_from = kTileTokens;
        if (boundary) {
          dead_from = live >> i & 1 ? min(max(keys - token - i * kTileTokens, 0), kTileTokens) : 0;
          if (dead_from < kTileTokens) clear_dead<C>(p, tile, dead_from, w.lane);
        }
        w.accumulate(p, tile, dead_from, x[i]);
      }
      __syncwarp();
      if (w.lane == 0) loader.load_next(p, s, warp, stage, policy);
      if (++stage == C.stages) stage = 0, parity ^= 1;
    }
    w.end(p, item, s, warp);
    finish_item<C>(p, item, s);
    if (!item.finish) arrive<C>(p, item, worker, s);
  }
}

}  // namespace halftone::cuda
