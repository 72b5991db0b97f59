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
inline constexpr int kScoresBarrier = 1, kOutputBarrier = 2, kLoadBarrier = 3, kReadyBarrier = 4,
                     kOutputReadyBarrier = 5;

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

  // What is known of a row is in kRowLanes adjacent lanes: few instructions, since code that runs once is
  // slow.
  static constexpr int kRowLanes = 32 / kRows;
  __device__ int own_row() const { return static_cast<int>(lane) / kRowLanes; }
  __device__ bool has_own_row() const { return own_row() < rows(); }
  /// Of a value per row, those of the rows that the lane has in n-tile `n` of x.
  __device__ float2 of_columns(float value, int n) const {
    const unsigned from = (8 * n + lane % 4 * 2) * kRowLanes;
    return {__shfl_sync(~0u, value, from), __shfl_sync(~0u, value, from + kRowLanes)};
  }
  /// Multiplies the rows of O with a value of each.
  __device__ void scale(O& o, float value) const {
    float2 by[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) by[n] = of_columns(value, n);
    o.scale(by);
  }

  /// Adds up the states of the scores' warps and normalises O: a row is then the mean of V by P. Returns the
  /// LSE (base 2) of the lane's own row.
  __device__ float normalise(O& o) const {
    o.settle();
    static_assert(Traits::kScoreWarps % kRowLanes == 0);
    constexpr int kStates = Traits::kScoreWarps / kRowLanes;
    float2 part[kStates];
    float max = kMinus, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      part[i] = s.state[side][lane % kRowLanes * kStates + i][own_row()];
      max = fmaxf(max, part[i].x);
    }
    max = largest_of_lanes<1, kRowLanes>(max);
#pragma unroll
    for (int i = 0; i < kStates; ++i) sum = fmaf(part[i].y, weight_log2(part[i].x, max), sum);
    sum = sum_of_lanes<1, kRowLanes>(sum);
    const bool empty = max == kMinus && sum == 0.0f;
    int unit = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int other = __shfl_sync(~0u, o.unit[n], own_row() % 8 * 4);
      if (own_row() / 8 == n) unit = other;
    }
    const float exponent = empty ? 0.0f : fmaxf(static_cast<float>(unit) - max, -250.0f);
    // In two steps where their product may be beyond f32.
    const bool far = __any_sync(~0u, fabsf(exponent) > 60.0f);
    const float first = far ? rintf(exponent * 0.5f) : exponent;
    scale(o, empty ? 0.0f : exp2_approx(first) / sum);
    if (far) scale(o, exp2_approx(exponent - first));
    return empty ? kMinus : max + log2f(sum);
  }

  /// Each of the lane's rows that the item has: calls f(rows beyond the lane's first one, n-tile, index
  /// within x).
  template <class F>
  __device__ void for_rows(const F& f) const {
    const int first = static_cast<int>(lane % 4 * 2), end = rows() - first;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i < end) f(8 * n + i, n, i);
      }
    }
  }

  /// Two adjacent dims of O, from element `at` on.
  __device__ void write_pair(std::int64_t at, float a, float b) const {
    if (p.out_type == DType::kFloat32) {
      *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = {a, b};
    } else {
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(p.out) + at) =
          pack_16bit(p.out_type, a, b);
    }
  }

  __device__ void write(const O& o, float lse) const {
    const bool floats = p.out_type == DType::kFloat32;
    float scale = 0.0f;
    std::uint64_t at = 0;
    if (has_own_row()) {
      const RowPlace place = s.places[side][own_row()];
      const RowEnd end = row_end(p, place.head, lse, lse == kMinus ? 0.0f : 1.0f, true);
      scale = end.scale;
      at = reinterpret_cast<std::uint64_t>(p.out) + out_element(p, place) * (floats ? 4 : 2);
      if (warp == 0) write_lse(p, place, end.lse);
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = static_cast<int>(8 * n + lane % 4 * 2 + i);
        const float by = __shfl_sync(~0u, scale, row * kRowLanes);
        const std::uint64_t to = __shfl_sync(~0u, at, row * kRowLanes) + O::dim(0) * (floats ? 4 : 2);
        if (row >= rows()) continue;
#pragma unroll
        for (int m = 0; m < O::kDimTiles; ++m) {
          const float a = o.x[m][n][i] * by, b = o.x[m][n][2 + i] * by;
          if (floats) {
            *reinterpret_cast<float2*>(to + O::beyond(m) * 4) = {a, b};
          } else {
            *reinterpret_cast<std::uint32_t*>(to + O::beyond(m) * 2) = pack_16bit(p.out_type, a, b);
          }
        }
      }
    }
  }

  /// The lane's first dims of its first row in a slot.
  __device__ float* slot_values(int slot) const {
    return slots.values(slot, static_cast<int>(lane % 4 * 2)) + O::dim(0);
  }
  /// What the slot has comes before this item's part: state = merge(slot, state). Returns the LSE.
  __device__ float fold(O& o, float lse, int slot) const {
    all_output_warps<C>();  // the slot's state has been stored
    const Fold by(has_own_row() ? slots.state(slot, own_row())->x : kMinus, lse);
    float2 first[kTiles], second[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) first[n] = of_columns(by.first, n), second[n] = of_columns(by.second, n);
    const float* const values = slot_values(slot);
    for_rows([&](int beyond, int n, int i) {
#pragma unroll
      for (int m = 0; m < O::kDimTiles; ++m) {
        const float2 v = *reinterpret_cast<const float2*>(values + beyond * Traits::kDim + O::beyond(m));
        const float a = i == 0 ? first[n].x : first[n].y, b = i == 0 ? second[n].x : second[n].y;
        o.x[m][n][i] = Fold::mix(v.x, o.x[m][n][i], a, b);
        o.x[m][n][2 + i] = Fold::mix(v.y, o.x[m][n][2 + i], a, b);
      }
    });
    all_output_warps<C>();  // and read
    return by.lse;
  }
  __device__ void store(const O& o, float lse, int slot) const {
    float* const values = slot_values(slot);
    for_rows([&](int beyond, int n, int i) {
#pragma unroll
      for (int m = 0; m < O::kDimTiles; ++m) {
        *reinterpret_cast<float2*>(values + beyond * Traits::kDim + O::beyond(m)) = {o.x[m][n][i],
                                                                                     o.x[m][n][2 + i]};
      }
    });
    if (warp == 0 && has_own_row()) *slots.state(slot, own_row()) = {lse, lse == kMinus ? 0.0f : 1.0f};
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
    float lse = normalise(o);
    const planning::WorkItem& work = item.work;
    if (work.fold) lse = fold(o, lse, work.partial);
    if (work.finish) {
      write(o, lse);
    } else {
      store(o, lse, work.partial);
      if (item.first_slot >= 0) merge_parts(last);
    }
  }
};

}  // namespace halftone::cuda
