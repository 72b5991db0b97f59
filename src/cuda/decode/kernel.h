// The decode kernel's main loop.
#pragma once

#include "cuda/decode/finish.h"
#include "cuda/decode/load.h"
#include "cuda/decode/mma/products.h"
#include "cuda/decode/wgmma/loop.h"

namespace halftone::cuda {

/// Zeroes what dead tokens of a tile could leak into O: V's scales and, for 16-bit V, the rows. Warps that
/// share the tile write the same zeros.
template <DecodeConfig C>
__device__ inline void clear_dead(const AttentionParams& p, std::uint8_t* tile, int dead_from, int lane) {
  if (dead_from == kTileTokens) return;
  if constexpr (C.v.mode != ScaleMode::kStatic) {
    constexpr int kPlanes = Part<C.v>::template groups<DecodeTraits<C>::kBlocks>() * (C.v.asymmetric ? 2 : 1);
    std::uint16_t* params = reinterpret_cast<std::uint16_t*>(tile + p.cache.v_param_offset);
#pragma unroll 1
    for (int i = lane; i < kPlanes * kTileTokens; i += 32) {
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

/// Logits, softmax and O of one piece.
template <DecodeConfig C>
__device__ inline void compute_piece(const AttentionParams& p, Warp<C>& w,
                                     const typename DecodeTraits<C>::Queries& queries, const Piece& piece) {
  using Traits = DecodeTraits<C>;
  constexpr int kSteps = Traits::kStepTiles;
#pragma unroll 1
  for (int base = 0; base < C.piece_tiles; base += kSteps) {
    std::uint8_t* tiles = piece.tiles + base * p.cache.tile_bytes;
    const auto tile = [&](int i) {
      return tiles + i * p.cache.tile_bytes + (Traits::kShifts ? shift_of(piece.live, base + i) : 0);
    };
    const int first = piece.token + base * kTileTokens;
    float x[kSteps][Warp<C>::N][4];
    const bool low_part = needs_low_part<C>(p);
    if ((Warp<C>::N == 1 || C.k.mode != ScaleMode::kBlock) && !low_part) {  // a copy without the branches
#pragma unroll
      for (int i = 0; i < kSteps; ++i) w.scores(p, tile(i), false, x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) w.scores(p, tile(i), low_part, x[i]);
    }
    if (piece.special) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        w.modify(p, queries, first + i * kTileTokens, piece.live >> (base + i) & 1 ? piece.end : 0, x[i]);
      }
    }
    w.rescale(x, piece.special);
    int dead_from[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) dead_from[i] = kTileTokens;
    if (piece.boundary) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int alive = min(max(piece.keys - first - i * kTileTokens, 0), kTileTokens);
        dead_from[i] = piece.live >> (base + i) & 1 ? alive : 0;
        clear_dead<C>(p, tile(i), dead_from[i], w.lane);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) w.accumulate(p, tile(i), dead_from[i], x[i]);
  }
}

/// The pieces of an item that are a team's, as its warps take them from the ring.
template <DecodeConfig C>
struct PieceReader {
  using Traits = DecodeTraits<C>;
  typename Traits::Shared& s;
  int team, lane;
  std::uint32_t full;  // barriers of the team's ring
  RingPlace<C.stages> ring = {};

  /// The piece that begins at `token`, once it is there.
  __device__ Piece wait(const DeviceItem& item, const KeyRange& unmasked, int token, bool modified) {
    constexpr std::uint32_t kAll = (1u << C.piece_tiles) - 1;
    barrier_wait(full + ring.stage * 8, ring.parity);
    const std::uint32_t live = s.live[team][ring.stage];
    const bool boundary = !unmasked.has(token, Traits::kPieceTokens) || (live & kAll) != kAll;
    return {s.ring[team][ring.stage], token, item.keys, item.work.kv_end, live, boundary,
            boundary || modified};
  }
  /// Gives its place back.
  __device__ void release() {
    __syncwarp();
    if (lane == 0) barrier_arrive(full + Traits::kEmptyOffset + ring.stage * 8);
    ring.advance();
  }
};

/// A compute warp: all items of the worker, a piece at a time per team.
template <DecodeConfig C>
__device__ inline void compute_worker(const AttentionParams& p, typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  const int thread = thread_index(), warp = thread / 32;
  Warp<C> w;
  w.lane = thread % 32, w.g = w.lane / 4, w.t = w.lane % 4;
  w.team = warp / C.row_groups, w.first_row = warp % C.row_groups * Traits::kWarpRows;
  const bool modified = caps_or_biases(p);
  PieceReader<C> reader{s, w.team, w.lane, shared_address(s.full[w.team])};
  hardware_barrier_wait<kComputeReady, Traits::kComputeThreads + 32>();
  if constexpr (Traits::kComputeFinishes) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
#pragma unroll 1
  for (int index = 0; s.queue.has(index); ++index) {
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    typename Traits::Queries& queries = s.queries[index % 2];
    if constexpr (Traits::kComputeFinishes) {
      QueryLoader<C>::load(p, item, queries, warp);
      hardware_barrier_wait<kCompute, Traits::kComputeThreads>();
    } else {
      barrier_wait(shared_address(&s.queries_full[index % 2]), index / 2 & 1);
    }
    w.point_at(queries);
    w.begin(p, item, queries);
    const int end = item.work.kv_end;
    const KeyRange unmasked = seen_by_all(p, item, queries.places, end);
#pragma unroll 1
    for (int token = item.work.kv_begin + w.team * Traits::kPieceTokens; token < end;
         token += C.teams * Traits::kPieceTokens) {
      compute_piece<C>(p, w, queries, reader.wait(item, unmasked, token, modified));
      reader.release();
    }
    const bool last = Traits::kComputeFinishes || !s.queue.has(index + 1);
    if (index > 0 && !Traits::kComputeFinishes) barrier_wait(shared_address(&s.states_empty), index - 1 & 1);
    w.end(p, item, s);
    if (!last) {
      hardware_barrier_arrive<kStates, Traits::kStatesThreads>();
      continue;
    }
    hardware_barrier_wait<kCompute, Traits::kComputeThreads>();  // nothing to do beside the end of the item
    finish_item<Traits, Traits::kPartsOfCompute>(p, item, TeamStates<C>{s}, warp, Traits::kWarps, w.lane);
    if (!Traits::kComputeFinishes) return;
    hardware_barrier_wait<kCompute, Traits::kComputeThreads>();
    if (thread == 0) s.queue.current = index + 1;
  }
}

/// One worker of the schedule: a thread block.
template <DecodeConfig C>
__device__ inline void decode_worker(const DecodeParams& p, int worker, typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  const int warp = thread_index() / 32;
  // The compute warps get the registers that the other warpgroup does not need.
  if (warp >= Traits::kWarps) {
    if constexpr (Traits::kWarps > 4) shrink_registers<Traits::kOtherRegisters>();
    if (warp < Traits::kLoadWarp + kLoadWarps) {
      load_worker<C>(p, worker, s, warp - Traits::kLoadWarp);
    } else if constexpr (!Traits::kComputeFinishes) {
      finish_worker<C>(p, s, warp - Traits::kLoadWarp - kLoadWarps);
    } else {
      const int thread = thread_index() - 32 * (Traits::kLoadWarp + kLoadWarps);
      prefetch_inputs(p, worker, thread);
      hardware_barrier_wait<kFinishReady, 32 * (kFinishWarps + 1)>();
      wait_for_previous_kernel();
      begin_appends<32 * kFinishWarps>(p, s.appended[thread / 32], thread);
      append_worker<C>(p, s, thread / 32);
      if (thread < 32) check_inputs(p, worker, thread);
    }
  } else {
    init_rings<C>(s, warp, thread_index() % 32);
    if constexpr (Traits::kWarps > 4) grow_registers<Traits::kComputeRegisters>();
    if constexpr (Traits::kWarpgroups) {
      compute_warpgroups<C>(p, s);
    } else {
      compute_worker<C>(p, s);
    }
  }
}

}  // namespace halftone::cuda
