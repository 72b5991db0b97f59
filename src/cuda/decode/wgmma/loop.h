// The compute warps of a kernel of Family::kWarpgroup: two teams of four warps.
#pragma once

#include "cuda/decode/finish.h"
#include "cuda/decode/wgmma/products.h"

namespace halftone::cuda {

/// A piece in the ring of a team.
struct TeamPiece {
  int token;           // first
  int stage;           // of the ring
  std::uint32_t live;  // bit i: tile i is there
  bool boundary;       // a row does not see all of the tokens
  bool special;        // logits are masked, capped or biased
};

/// The pieces of an item that belong to a team. P of one piece waits in shared memory while the logits of the
/// next one are computed; then O takes it up, beside the softmax of the next one.
template <DecodeConfig C>
struct TeamItem {
  using Traits = DecodeTraits<C>;
  using Shared = typename Traits::Shared;
  using Logits = float[Team<C>::kSums];
  using Partial = float[C.row_tiles][2];
  using V = typename Team<C>::V;
  // V of a piece is turned into fragments beside the product of the next K, where registers hold both.
  static constexpr bool kOverlaps = Team<C>::kWholeRows && !Traits::kScarce;
  static_assert(!Traits::kShifts);  // tiles follow one another, `live` has their bits only
  const AttentionParams& p;
  Shared& s;
  const DeviceItem& item;
  Team<C>& team;
  KeyRange unmasked;

  /// The piece at `token` that has arrived in `stage`.
  __device__ TeamPiece piece_at(int token, int stage) const {
    constexpr std::uint32_t kAll = (1u << C.piece_tiles) - 1;
    const std::uint32_t live = s.live[team.team()][stage];
    const bool boundary = !unmasked.has(token, Traits::kPieceTokens) || live != kAll;
    return {token, stage, live, boundary, boundary || caps_or_biases(p)};
  }
  __device__ const std::uint8_t* tile(const TeamPiece& piece, int i) const {
    return s.ring[team.team()][piece.stage] + i * p.cache.tile_bytes;
  }
  /// Keys of tile i, or more than it holds.
  __device__ int alive(const TeamPiece& piece, int i) const {
    return piece.live >> i & 1 ? item.keys - piece.token - i * kTileTokens : 0;
  }
  __device__ void load_v(const TeamPiece& piece, V (&v)[C.piece_tiles]) const {
    using Side = Part<C.v>;
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      v[i].load(Side::template groups<Traits::kBlocks>(), tile(piece, i) + p.cache.v_data_offset,
                tile(piece, i) + p.cache.v_param_offset, team.warp(), team.lane());
    }
    if (piece.boundary) {
#pragma unroll
      for (int i = 0; i < C.piece_tiles; ++i) v[i].clear(alive(piece, i), team.t());
    }
  }
  /// Logits of the warp's tile, begun before.
  __device__ void end_scores(const TeamPiece& piece, typename Team<C>::KFragments& a, Logits& x) const {
    const int warp = team.warp();
    team.end_scores(p, s.queries[0], tile(piece, warp), needs_low_part<C>(p), a, x);
    if (piece.special) {
      team.modify(p, s.queries[0], piece.token + warp * kTileTokens,
                  piece.live >> warp & 1 ? item.work.kv_end : 0, x);
    }
  }
  /// P of the warp's tile, to shared memory, and its sums per column; whether a maximum must be raised.
  __device__ bool softmax(const TeamPiece& piece, const Logits& x, int buffer, Partial& partial) const {
    constexpr int kColumns = Team<C>::kColumns;
    const int warp = team.warp(), lane = team.lane(), matrix = lane / 8;
    const std::uint32_t place =
        shared_address(team.prob(s, buffer)) +
        2 * (warp * 16 * kColumns + matrix_place<kColumns>(matrix % 2 * 8, matrix / 2 * 8 + lane % 8));
    const float* factors = s.queries[0].factor;
    const bool exceeds = piece.special ? team.template probabilities<true>(factors, x, place, partial)
                                       : team.template probabilities<false>(factors, x, place, partial);
    fence_async_shared();
    return exceeds;
  }
  __device__ void raise(const TeamPiece& piece, const Logits& x) {
    if (piece.special) {
      team.template raise<true>(s.queries[0].factor, x, s);
    } else {
      team.template raise<false>(s.queries[0].factor, x, s);
    }
  }

  __device__ void run(RingPlace<C.stages>& ring) {
    constexpr int kDistance = C.teams * Traits::kPieceTokens;
    int buffer = 0;
#pragma unroll 1
    for (int token = item.work.kv_begin + team.team() * Traits::kPieceTokens;; token += kDistance) {
      team.thread = thread_index();  // what is derived from it need not be kept in registers
      const bool has_next = token < item.work.kv_end;
      Logits x;
      typename Team<C>::KFragments k;
      TeamPiece next{};
      if (has_next) {
        barrier_wait(shared_address(&s.full[team.team()][ring.stage]), ring.parity);
        next = piece_at(token, ring.stage);
      }
      // Without a next piece of whatever the ring holds: a condition would keep the compiler from
      // overlapping.
      if (kOverlaps || has_next) {
        team.begin_scores(s.queries[0], s.ring[team.team()][ring.stage] + team.warp() * p.cache.tile_bytes, k,
                          x);
      }
      if constexpr (!kOverlaps) {
        if (has_next) end_scores(next, k, x);
      }
      const bool has_previous = token - kDistance >= item.work.kv_begin;  // its P is there
      typename Team<C>::VFragments fragments;
      if (has_previous) {
        const TeamPiece piece = piece_at(token - kDistance, ring.previous());
        V v[C.piece_tiles];
        load_v(piece, v);
        __syncwarp();
        if (team.lane() == 0) barrier_arrive(shared_address(&s.empty[team.team()][piece.stage]));
        team.make_fragments(v, fragments);
      }
      if constexpr (kOverlaps) {
        if (has_next) {
          end_scores(next, k, x);
        } else {
          wgmma_wait();
        }
      }
      if (has_previous) team.accumulate(fragments, team.prob(s, buffer));
      if (!has_next) break;
      ring.advance();
      buffer ^= 1;
      Partial partial;
      // There are no maxima yet: P need not be tried.
      const bool first = !Traits::kScarce && token - kDistance < item.work.kv_begin;
      const bool exceeds = first || softmax(next, x, buffer, partial);
      team.wait();
      if (first || team_any(team.team(), exceeds)) {
        raise(next, x);
        softmax(next, x, buffer, partial);
        team_barrier(team.team());
      }
#pragma unroll
      for (int n = 0; n < C.row_tiles; ++n) team.sum[n][0] += partial[n][0], team.sum[n][1] += partial[n][1];
    }
    team.wait();
  }
};

/// The compute warps: all items of the worker.
template <DecodeConfig C>
__device__ inline void compute_warpgroups(const AttentionParams& p, typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  hardware_barrier_wait<kComputeReady, Traits::kComputeThreads + 32>();
  wait_for_previous_kernel();
  let_next_kernel_start();
  Team<C> team;
  team.thread = thread_index();
  const int warp = team.thread / 32;
  RingPlace<C.stages> ring;
#pragma unroll 1
  for (int index = 0; s.queue.has(index); ++index) {
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    typename Traits::Queries& queries = s.queries[0];
    QueryLoader<C>::load(p, item, queries, warp);
    fence_async_shared();
    hardware_barrier_wait<kCompute, Traits::kComputeThreads>();
    team.begin();
    TeamItem<C>{p, s, item, team, seen_by_all(p, item, queries.places, item.work.kv_end)}.run(ring);
    team.end(s);
    hardware_barrier_wait<kCompute, Traits::kComputeThreads>();
    finish_item<Traits, Traits::kPartsOfCompute>(p, item, TeamStates<C>{s}, warp, Traits::kWarps,
                                                 team.lane());
    hardware_barrier_wait<kCompute, Traits::kComputeThreads>();
    if (team.thread == 0) s.queue.current = index + 1;
  }
}

}  // namespace halftone::cuda
