// Parts of cut units: a warpgroup leaves what it has of one in a slot of the workspace, and the last one to
// arrive merges them.
#pragma once

#include "cuda/attention/states.h"
#include "cuda/prefill/compute.h"

namespace halftone::cuda {

/// A part's rows of a warpgroup. In slots O lies as registers hold it, 16 bytes of each lane of a warp side
/// by side; states lie by row.
template <PrefillConfig C>
struct UnitParts {
  using Traits = PrefillTraits<C>;
  static constexpr int kDims = Consumer<C>::kValueDim, kQuads = kDims / 8;
  /// How much of O is read together: as much as registers hold twice beside the rest of O.
  static constexpr int at_once() {
    constexpr int kOthers = 64;  // registers
    int quads = kQuads;
    while (kQuads % quads != 0 || 4 * (kQuads + quads) > Traits::kComputeRegisters - kOthers) --quads;
    return quads;
  }
  static constexpr int kAtOnce = at_once();
  Consumer<C>& c;
  const DeviceItem& item;

  __device__ std::int64_t first_row(int slot) const {
    return std::int64_t{slot} * c.p.schedule.params.row_block + 64 * c.rows_index() + 16 * c.warp();
  }
  /// Of dims 0 to 7; the next ones are 32 further.
  __device__ float4* values(int slot) const {
    float* const rows = c.p.partial_out + first_row(slot) * C.value_dim + c.share() * (16 * kDims);
    return reinterpret_cast<float4*>(rows) + c.lane();
  }
  /// Of row g; that of row g + 8 is 8 further.
  __device__ float2* states(int slot) const {
    return reinterpret_cast<float2*>(c.p.partial_state_log2) + first_row(slot) + c.lane() / 4;
  }

  __device__ void store(int slot) const {
    float4* const to = values(slot);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      to[32 * q] = {c.o[4 * q], c.o[4 * q + 1], c.o[4 * q + 2], c.o[4 * q + 3]};
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (c.lane() % 4 != 0 || c.share() != 0) continue;
      states(slot)[8 * r] = {c.softmax.empty(r) ? kMinus : c.softmax.offset[r], c.softmax.sum[r]};
    }
  }

  /// O and the softmax become those of all parts, one after the other in the order of their keys.
  __device__ void read(const Merge& merge) const {
#pragma unroll
    for (int first = 0; first < kQuads; first += kAtOnce) {
      float4 o[kAtOnce] = {};
      float max[2] = {kMinus, kMinus}, sum[2] = {};
#pragma unroll 1
      for (int part = 0; part < merge.count; ++part) {
        const int slot = merge.first + part * merge.step;
        const float2 state[2] = {states(slot)[0], states(slot)[8]};
        float4 x[kAtOnce];
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q) x[q] = values(slot)[32 * (first + q)];
        const MergedStates both[2] = {{max[0], state[0].x}, {max[1], state[1].x}};
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q) {
          o[q].x = both[0].mix(o[q].x, x[q].x), o[q].y = both[0].mix(o[q].y, x[q].y);
          o[q].z = both[1].mix(o[q].z, x[q].z), o[q].w = both[1].mix(o[q].w, x[q].w);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sum[r] = both[r].mix(sum[r], state[r].y);
          max[r] = both[r].max;
        }
      }
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        float* const to = c.o + 4 * (first + q);
        to[0] = o[q].x, to[1] = o[q].y, to[2] = o[q].z, to[3] = o[q].w;
      }
      c.softmax = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (max[r] != kMinus) c.softmax.offset[r] = max[r];
        c.softmax.sum[r] = sum[r];
      }
    }
    shared_rows_barrier(c);  // all who have the rows have read what slots hold, before that is replaced
  }

  /// Stores the part. The last warpgroup to arrive with these rows of a group of parts merges them, the last
  /// one of the unit's groups those: whether the warpgroup has that, the rows of the whole unit.
  __device__ bool merge() const {
    Merge merge{-1, 0, 0, 0, 0, item.work.partial};
#pragma unroll 1
    while (merge.target >= 0) {
      store(merge.target);
      merge = next_merge(item, merge, false);
      shared_rows_barrier(c);
      bool last = false;
      if (c.thread % (128 * C.shares) == 0) {
        last = arrives_last(c.p.arrivals + std::int64_t{merge.counter} * kArrivalCounters + c.rows_index(),
                            merge.arrivals);
      }
      if (!shared_rows_any(c, last)) return false;
      __threadfence();
      read(merge);
    }
    return true;
  }
};

}  // namespace halftone::cuda
