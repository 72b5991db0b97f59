// The end of an item: the teams' states are added up, O written or left in a partial slot, the slots of a cut
// unit merged.
#pragma once

#include "cuda/attention/output.h"
#include "cuda/attention/shared_merge.h"
#include "cuda/device/reduce.h"
#include "cuda/latent/few/merge.h"
#include "cuda/latent/few/output.h"

namespace halftone::cuda {

// Hardware barriers.
inline constexpr int kScoresBarrier = 1, kOutputBarrier = 2, kLoadBarrier = 3, kReadyBarrier = 4;

template <LatentFewConfig C>
__device__ inline void all_score_warps() {
  hardware_barrier_wait<kScoresBarrier, 32 * LatentFewTraits<C>::kScoreWarps>();
}
template <LatentFewConfig C>
__device__ inline void all_output_warps() {
  hardware_barrier_wait<kOutputBarrier, 32 * LatentFewTraits<C>::kOutputWarps>();
}

/// By all output warps.
template <LatentFewConfig C>
struct ItemEnd {
  using Traits = LatentFewTraits<C>;
  using Shared = typename Traits::Shared;
  using O = Output<C>;
  static constexpr int kTiles = O::kTiles, kRows = Traits::kRows;
  const AttentionParams& p;
  Shared& s;
  const DeviceItem& item;
  int side;  // of what two items have side by side
  const unsigned warp = O::warp(), lane = thread_index() % 32;
  const Slots<Traits::kDim> slots{p};

  __device__ int rows() const { return item.work.row_end - item.work.row_begin; }

  /// Adds up the states of the scores' warps and normalises O: a row is then the mean of V by P, with the LSE
  /// (base 2).
  __device__ void normalise(O& o, float2 (&lse)[kTiles]) const {
    o.settle();
    float2 by[kTiles];
    float rest[kTiles], own[kTiles];  // of a row: what O is multiplied with after `by`, log2; the LSE
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      constexpr int kOwn = Traits::kScoreWarps / 4;  // of their states
      const unsigned row = 8 * n + lane / 4, first_state = lane % 4 * kOwn;
      const float2 a = s.state[side][first_state][row], b = s.state[side][first_state + kOwn - 1][row];
      const float max = largest_of_lanes<1, 4>(fmaxf(a.x, b.x));
      float sum = a.y * weight_log2(a.x, max);
      if constexpr (kOwn == 2) sum += b.y * weight_log2(b.x, max);
      sum = sum_of_lanes<1, 4>(sum);
      const bool empty = max == kMinus && sum == 0.0f;
      // In two steps: their product may be beyond f32.
      const float exponent = empty ? 0.0f : fmaxf(static_cast<float>(o.unit[n]) - max, -250.0f);
      const float first = rintf(exponent * 0.5f);
      by[n] = O::of_columns(empty ? 0.0f : exp2_approx(first) / sum, lane);
      rest[n] = exponent - first, own[n] = empty ? kMinus : max + log2f(sum);
    }
    o.scale(by);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      by[n] = O::of_columns(exp2_approx(rest[n]), lane);
      lse[n] = O::of_columns(own[n], lane);
    }
    o.scale(by);
  }

  /// Each of the lane's rows, whether the item has it or not: calls f(row, LSE, n-tile, index within x).
  template <class F>
  __device__ void for_rows(const float2 (&lse)[kTiles], const F& f) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        f(static_cast<int>(8 * n + lane % 4 * 2 + i), i == 0 ? lse[n].x : lse[n].y, n, i);
      }
    }
  }
  /// Whether the lane is the one that stores what a row has once.
  __device__ bool once() const { return warp == 0 && lane / 4 == 0; }

  /// Two adjacent dims of O, from element `at` on.
  __device__ void write_pair(std::int64_t at, float a, float b) const {
    if (p.out_type == DType::kFloat32) {
      *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = {a, b};
    } else {
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(p.out) + at) =
          pack_16bit(p.out_type, a, b);
    }
  }

  /// A lane works out for one row what all of its dims need: code that runs once is slow.
  __device__ void write(const O& o, const float2 (&lse)[kTiles]) const {
    float own = kMinus;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float even = __shfl_sync(~0u, lse[n].x, lane % 8 / 2),
                  odd = __shfl_sync(~0u, lse[n].y, lane % 8 / 2);
      if (lane / 8 == n) own = lane % 2 == 0 ? even : odd;
    }
    const bool floats = p.out_type == DType::kFloat32;
    float scale = 0.0f;
    std::uint64_t at = 0;
    if (static_cast<int>(lane) < rows()) {
      const RowPlace place = s.places[side][lane];
      const RowEnd end = row_end(p, place.head, own, own == kMinus ? 0.0f : 1.0f, true);
      scale = end.scale;
      at = reinterpret_cast<std::uint64_t>(p.out) + out_element(p, place) * (floats ? 4 : 2);
      if (warp == 0) write_lse(p, place, end.lse);
    }
    __syncwarp();
    for_rows(lse, [&](int row, float, int n, int i) {
      const float by = __shfl_sync(~0u, scale, row);
      const std::uint64_t to = __shfl_sync(~0u, at, row) + O::dim(0) * (floats ? 4 : 2);
      if (row >= rows()) return;
#pragma unroll
      for (int m = 0; m < O::kDimTiles; ++m) {
        const unsigned beyond = O::dim(m) - O::dim(0);
        const float a = o.x[m][n][i] * by, b = o.x[m][n][2 + i] * by;
        if (floats) {
          *reinterpret_cast<float2*>(to + beyond * 4) = {a, b};
        } else {
          *reinterpret_cast<std::uint32_t*>(to + beyond * 2) = pack_16bit(p.out_type, a, b);
        }
      }
    });
  }

  /// What the slot has comes before this item's part: state = merge(slot, state).
  __device__ void fold(O& o, float2 (&lse)[kTiles], int slot) const {
    all_output_warps<C>();  // the slot's state has been stored
    for_rows(lse, [&](int row, float own, int n, int i) {
      if (row >= rows()) return;
      const Fold by(slots.state(slot, row)->x, own);
      const float* values = slots.values(slot, row);
#pragma unroll
      for (int m = 0; m < O::kDimTiles; ++m) {
        const float2 v = *reinterpret_cast<const float2*>(values + O::dim(m));
        o.x[m][n][i] = by.mix(v.x, o.x[m][n][i]);
        o.x[m][n][2 + i] = by.mix(v.y, o.x[m][n][2 + i]);
      }
      (i == 0 ? lse[n].x : lse[n].y) = by.lse;
    });
    all_output_warps<C>();  // and read
  }
  __device__ void store(const O& o, const float2 (&lse)[kTiles], int slot) const {
    for_rows(lse, [&](int row, float own, int n, int i) {
      if (row >= rows()) return;
      float* values = slots.values(slot, row);
#pragma unroll
      for (int m = 0; m < O::kDimTiles; ++m) {
        *reinterpret_cast<float2*>(values + O::dim(m)) = {o.x[m][n][i], o.x[m][n][2 + i]};
      }
      if (once()) *slots.state(slot, row) = {own, own == kMinus ? 0.0f : 1.0f};
    });
  }

  __device__ void write_piece(const RowPlace& place, const RowPiece& r, unsigned first) const {
    const RowEnd end = row_end(p, place.head, r.max, r.sum, true);
    if (lane >= RowPiece::kLanes) return;
    const std::int64_t at = out_element(p, place) + first + RowPiece::dim(0, static_cast<int>(lane));
    write_pair(at, r.x[0].x * end.scale, r.x[0].y * end.scale);
    write_pair(at + 2, r.x[0].z * end.scale, r.x[0].w * end.scale);
    if (lane == 0 && first == 0) write_lse(p, place, end.lse);
  }

  /// Merges the pieces of the owners in `owners` (bits), a warp one at a time, and writes them.
  __device__ void merge(std::uint32_t owners, int count_of_owners) const {
    constexpr int kPieces = Traits::kDim / RowPiece::kDims;
    const int pieces = rows() * kPieces;
    int piece = 0, end = 0;
#pragma unroll 1
    while (true) {
      if (piece >= end) {
        if (owners == 0) return;
        const int owner = __ffs(owners) - 1;
        owners &= owners - 1;
        piece = SharedMerge::first_piece(pieces, owner, count_of_owners) + static_cast<int>(warp);
        end = SharedMerge::first_piece(pieces, owner + 1, count_of_owners);
        continue;
      }
      const int row = piece / kPieces, first = piece % kPieces * RowPiece::kDims;
      Parts parts = slots.parts(item.first_slot, 1, item.parts, row);
      parts.values += first;
      RowPiece r;
      if (p.schedule.params.absolute) {
        r.fold(parts, lane);
      } else {
        r.weigh(parts, lane);
      }
      write_piece(s.places[side][row], r, first);
      piece += Traits::kOutputWarps;
    }
  }

  /// The end of a part of a cut unit. `last`: the worker has no other item.
  __device__ void merge_parts(bool last) const {
    std::int32_t* const counters = p.arrivals + std::int64_t{item.first_slot} * kArrivalCounters;
    const bool absolute = p.schedule.params.absolute;
    const int owners = absolute ? 1 : SharedMerge::owners(item.parts);
    all_output_warps<C>();  // the slot is stored
    if (thread_index() == Traits::kFirstOutput) {
      if (absolute) {
        s.slices = arrives_last(counters, item.arrivals);
      } else {
        s.slices = SharedMerge::arrive(counters, item.work.partial - item.first_slot, item.parts,
                                       [last] { return last; });
      }
    }
    all_output_warps<C>();
    // Nobody needs the counters any more: by a thread whose warp has no piece if there are few.
    if (!absolute && thread_index() == Traits::kFirstLoad - 1) SharedMerge::leave(counters, item.parts);
    __syncwarp();
    if (s.slices != 0) merge(s.slices, owners);
  }

  __device__ void operator()(O& o, bool last) const {
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
