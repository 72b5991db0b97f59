// The end of an item: the teams' states are added up, O written or left in a partial slot, the slots of a cut
// unit merged.
#pragma once

#include "cuda/attention/output.h"
#include "cuda/latent/few/merge.h"
#include "cuda/latent/few/output.h"

namespace halftone::cuda {

inline constexpr int kLatentBarrier = 1;  // of all compute warps; then one of each team

template <LatentFewConfig C>
__device__ inline void all_compute_warps() {
  hardware_barrier_wait<LatentFewTraits<C>::kComputeThreads>(kLatentBarrier);
}
template <LatentFewConfig C>
__device__ inline void all_team_warps() {
  hardware_barrier_wait<LatentFewTraits<C>::kTeamThreads>(kLatentBarrier + 1 + ComputeThread().team);
}

/// By all compute warps.
template <LatentFewConfig C>
struct ItemEnd {
  using Traits = LatentFewTraits<C>;
  using Shared = typename Traits::Shared;
  using O = Output<C>;
  static constexpr int kTiles = O::kTiles, kRows = Traits::kRows, kTeamRows = Traits::kTeamRows;
  // Of the m-tiles of a at.warp those that it ends: with rows split all, else each at.team one half of them.
  static constexpr int kKept = C.split_rows ? O::kDimTiles : O::kDimTiles / 2;
  const AttentionParams& p;
  Shared& s;
  const DeviceItem& item;
  const ComputeThread at{};

  __device__ unsigned first_row() const { return Traits::first_row(at.team); }
  __device__ int rows() const { return item.work.row_end - item.work.row_begin; }

  /// Leaves the state of the rows of which this at.warp had the softmax.
  template <class Softmax>
  __device__ void leave_state(const Softmax& softmax) const {
#pragma unroll
    for (int i = 0; i < Traits::kWarpRows; ++i) {
      float sum = softmax.sum[i];
#pragma unroll
      for (int shift = 16; shift > 0; shift /= 2) sum += __shfl_xor_sync(~0u, sum, shift);
      const bool empty = softmax.max[i] == kMinus && sum == 0.0f;
      if (at.lane == 0) {
        s.state[at.team][at.warp * Traits::kWarpRows + i] = {empty ? kMinus : softmax.max[i] + log2f(sum),
                                                             empty ? 0.0f : 1.0f / sum};
      }
    }
  }

  /// Adds up the teams' states and normalises O: of a row, what both teams have of it is then the mean of V
  /// by P, with the LSE (base 2).
  __device__ void normalise(O& o, float2 (&lse)[kTiles]) const {
    float2 by[kTiles], unit[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const auto of_row = [&](unsigned row, float& factor, float& power, float& end) {
        const float2 own = s.state[at.team][row];
        factor = own.y;
        end = own.x;
        if constexpr (!C.split_rows) {
          const float first = s.state[0][row].x, second = s.state[1][row].x;
          const float top = fmaxf(first, second), a = weight_log2(first, top), b = weight_log2(second, top);
          const float sum = a + b;
          end = top == kMinus ? kMinus : top + log2f(sum);
          factor = top == kMinus ? 0.0f : own.y * ((at.team == 0 ? a : b) / sum);
        }
        power = __uint_as_float(0x7f000000u -
                                __float_as_uint(s.unit[at.team][row][Traits::kScaled ? at.warp / 2 : 0]));
      };
      const unsigned row = 8 * n + at.lane % 4 * 2;
      of_row(row, by[n].x, unit[n].x, lse[n].x);
      of_row(row + 1, by[n].y, unit[n].y, lse[n].y);
    }
    o.scale(by);
    o.scale(unit);
    o.pair();
    if constexpr (!C.split_rows) swap_halves(o);
  }

  /// O of all dims by part of the blocks becomes O of a part of the dims by all blocks: m-tiles 0 to kKept
  /// - 1.
  __device__ void swap_halves(O& o) const {
    auto& mine = s.handover.out[at.team * Traits::kTeamWarps + at.warp];
    const auto& others = s.handover.out[(1 - at.team) * Traits::kTeamWarps + at.warp];
#pragma unroll
    for (int m = 0; m < kKept; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float(&upper)[4] = o.x[m + kKept][n];
        float(&lower)[4] = o.x[m][n];
        mine[m * kTiles + n][at.lane] = at.team == 0 ? float4{upper[0], upper[1], upper[2], upper[3]}
                                                     : float4{lower[0], lower[1], lower[2], lower[3]};
#pragma unroll
        for (int i = 0; i < 4; ++i) lower[i] = at.team == 0 ? lower[i] : upper[i];
      }
    }
    all_compute_warps<C>();
#pragma unroll
    for (int m = 0; m < kKept; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float4 y = others[m * kTiles + n][at.lane];
        o.x[m][n][0] += y.x, o.x[m][n][1] += y.y, o.x[m][n][2] += y.z, o.x[m][n][3] += y.w;
      }
    }
  }

  /// First of the adjacent dims of m-tile `m` that the at.lane has.
  __device__ unsigned dim(int m) const {
    const unsigned first = C.split_rows ? 0 : at.team * kKept;
    return (O::kDimTiles * at.warp + first + m) * 16 + O::first_of_pair(at.lane);
  }

  /// One of the at.lane's rows of an n-tile: calls f(row of the item, LSE, index within x).
  template <class F>
  __device__ void for_rows(const float2 (&lse)[kTiles], const F& f) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = static_cast<int>(first_row() + 8 * n + at.lane % 4 * 2 + i);
        if (row < rows()) f(row, i == 0 ? lse[n].x : lse[n].y, n, i);
      }
    }
  }
  /// Whether the at.lane is the one that stores what a row has once.
  __device__ bool once() const { return at.warp == 0 && at.lane / 4 == 0 && (C.split_rows || at.team == 0); }

  __device__ void write(const O& o, const float2 (&lse)[kTiles]) const {
    for_rows(lse, [&](int row, float own, int n, int i) {
      const RowPlace place = s.places[row];
      const RowEnd end = row_end(p, place.head, own, own == kMinus ? 0.0f : 1.0f, true);
      const std::int64_t row_at = place.token * p.out_token_stride + place.head * p.out_head_stride;
#pragma unroll
      for (int m = 0; m < kKept; ++m) {
        const float a = o.x[m][n][i] * end.scale, b = o.x[m][n][2 + i] * end.scale;
        if (p.out_type == DType::kFloat32) {
          *reinterpret_cast<float2*>(static_cast<float*>(p.out) + row_at + dim(m)) = {a, b};
        } else {
          *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(p.out) + row_at + dim(m)) =
              p.out_type == DType::kBFloat16 ? pack_bf16x2(a, b) : pack_f16x2(a, b);
        }
      }
      if (once() && p.lse != nullptr) {
        p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = end.lse;
      }
    });
  }

  __device__ float* slot_row(int slot, int row) const {
    return p.partial_out + (std::int64_t{slot} * p.schedule.params.row_block + row) * Traits::kDim;
  }
  __device__ float2* slot_state(int slot, int row) const {
    return reinterpret_cast<float2*>(p.partial_state_log2) +
           (std::int64_t{slot} * p.schedule.params.row_block + row);
  }
  /// What the slot has comes before this item's part: state = merge(slot, state).
  __device__ void fold(O& o, float2 (&lse)[kTiles], int slot) const {
    all_compute_warps<C>();  // the slot's state has been stored
    for_rows(lse, [&](int row, float own, int n, int i) {
      const Fold by(slot_state(slot, row)->x, own);
      const float* values = slot_row(slot, row);
#pragma unroll
      for (int m = 0; m < kKept; ++m) {
        const float2 v = *reinterpret_cast<const float2*>(values + dim(m));
        o.x[m][n][i] = by.mix(v.x, o.x[m][n][i]);
        o.x[m][n][2 + i] = by.mix(v.y, o.x[m][n][2 + i]);
      }
      (i == 0 ? lse[n].x : lse[n].y) = by.lse;
    });
    all_compute_warps<C>();  // and read
  }
  __device__ void store(const O& o, const float2 (&lse)[kTiles], int slot) const {
    for_rows(lse, [&](int row, float own, int n, int i) {
      float* values = slot_row(slot, row);
#pragma unroll
      for (int m = 0; m < kKept; ++m) {
        *reinterpret_cast<float2*>(values + dim(m)) = {o.x[m][n][i], o.x[m][n][2 + i]};
      }
      if (once()) *slot_state(slot, row) = {own, own == kMinus ? 0.0f : 1.0f};
    });
  }

  /// Merges the pieces of the owners in `owners` (bits), a warp one at a time, and writes them.
  __device__ void merge(std::uint32_t owners, int count_of_owners) const {
    constexpr int kPieces = Traits::kDim / RowPiece::kDims;
    const int stride = p.schedule.params.row_block, slot = item.first_slot;
    const int own = static_cast<int>(at.team * Traits::kTeamWarps + at.warp), pieces = rows() * kPieces;
    int owner = __ffs(owners) - 1, turn = own;
#pragma unroll 1
    while (true) {
      const int piece = owner + turn * count_of_owners;
      if (piece >= pieces) {
        owners &= owners - 1;
        if (owners == 0) return;
        owner = __ffs(owners) - 1, turn = (own + owner) % Traits::kWarps;
        continue;
      }
      turn += Traits::kWarps;
      const int row = piece / kPieces, first = piece % kPieces * RowPiece::kDims;
      const Parts parts{slot_state(slot, row), slot_row(slot, row) + first, stride, stride * Traits::kDim,
                        item.parts};
      RowPiece r;
      if (p.schedule.params.absolute) {
        r.fold(parts, at.lane);
      } else {
        r.weigh(parts, at.lane);
      }
      write_row<RowPiece::kDims, true>(p, place_of(p, item, row), r, at.lane, true, first);
    }
  }

  /// The end of a part of a cut unit. `last`: the worker has no other item.
  __device__ void merge_parts(bool last) const {
    std::int32_t* const counters = p.arrivals + std::int64_t{item.first_slot} * kArrivalCounters;
    const bool absolute = p.schedule.params.absolute;
    const int owners = absolute ? 1 : min(item.parts, SharedMerge::kOwners);
    all_compute_warps<C>();  // the slot is stored
    if (thread_index() == 0) {
      if (absolute) {
        const bool complete = count_arrival(counters) == item.arrivals - 1;
        if (complete) *counters = 0;
        s.slices = complete;
      } else {
        s.slices = SharedMerge::arrive(counters, item.work.partial - item.first_slot, item.parts, last);
      }
    }
    all_compute_warps<C>();
    if (s.slices != 0) merge(s.slices, owners);
    if (absolute) return;
    __syncwarp();
    if (thread_index() == 0) SharedMerge::leave(counters, item.parts);
  }

  template <class Softmax>
  __device__ void operator()(O& o, const Softmax& softmax, bool last) const {
    leave_state(softmax);
    all_compute_warps<C>();
    float2 lse[kTiles];
    normalise(o, lse);
    const planning::WorkItem& work = item.work;
    if (work.fold) fold(o, lse, work.partial);
    if (work.finish) {
      write(o, lse);
    } else {
      store(o, lse, work.partial);
      if (item.first_slot >= 0) merge_parts(last);
    }
  }
};

}  // namespace halftone::cuda
