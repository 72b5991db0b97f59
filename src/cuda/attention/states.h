// Softmax states of rows: their merge, their slots in the workspace, and who merges what.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"
#include "cuda/device/reduce.h"

namespace halftone::cuda {

__device__ inline float weight_log2(float max, float merged) {
  return max == kMinus ? 0.0f : exp2_approx(max - merged);
}

/// Two states, the first one of the keys before: the maximum of both, and what each is multiplied with.
struct MergedStates {
  float max, first, second;

  __device__ MergedStates(float first_max, float second_max)
      : max(fmaxf(first_max, second_max)),
        first(weight_log2(first_max, max)),
        second(weight_log2(second_max, max)) {}

  /// Of their sums or rows; the second one is in the fused operation.
  __device__ float mix(float a, float b) const { return fmaf(b, second, a * first); }
  __device__ float4 mix(const float4& a, const float4& b) const {
    return {mix(a.x, b.x), mix(a.y, b.y), mix(a.z, b.z), mix(a.w, b.w)};
  }
};

/// The states (maximum, sum) of up to kLanes parts, one in each of as many lanes: their weights, and that of
/// what (max, sum) has so far, which becomes the state of all. Of rows that are means a part's sum is 1.
template <int kLanes>
struct PartWeights {
  float own, before;

  __device__ PartWeights(const float2& part, float& max, float& sum) {
    const float top = fmaxf(largest_of_lanes<1, kLanes>(part.x), max);
    own = weight_log2(part.x, top), before = weight_log2(max, top);
    max = top;
    sum = fmaf(sum, before, sum_of_lanes<1, kLanes>(own * part.y));
  }
};

/// Softmax states and unnormalised rows of O, a part at a time: of the teams in shared memory, or of partial
/// slots in the workspace. Strides are in elements, from part to part.
struct Parts {
  const float2* states;  // maximum (base 2), sum
  const float* values;
  int state_stride, value_stride, count;
};

/// A row of O over kLanes lanes: the l-th has the dims 4 l + 4 kLanes j + 0..3. And its softmax state. The
/// rows of a group lie side by side in a warp, so that what is done once per row is done for all of them at
/// once.
template <int kDim, int kLanes_>
struct Row {
  static constexpr int kLanes = kLanes_;
  static constexpr int kGroup = 32 / kLanes;  // rows
  static constexpr int kQuads = (kDim + 4 * kLanes - 1) / (4 * kLanes);
  float4 x[kQuads] = {};
  float max = kMinus, sum = 0.0f;

  /// First dim of a lane's quad.
  static __device__ int dim(int quad, int lane) { return lane % kLanes * 4 + quad * (4 * kLanes); }
  static __device__ bool has(int quad, int lane) {
    return kDim % (4 * kLanes) == 0 || dim(quad, lane) < kDim;
  }

  /// Parts [first, first + kAtOnce) of a row, as far as there are so many.
  template <int kAtOnce>
  struct Chunk {
    float2 state[kAtOnce];
    float4 x[kAtOnce][kQuads];

    __device__ void load(const Parts& parts, int first, int lane) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int part = min(first + i, parts.count - 1);
        const float* row = parts.values + part * parts.value_stride;
        state[i] = parts.states[part * parts.state_stride];
        if (first + i >= parts.count) state[i] = {kMinus, 0.0f};
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          if (has(j, lane)) x[i][j] = *reinterpret_cast<const float4*>(row + dim(j, lane));
        }
      }
    }
  };

  /// this = merge(this, parts), one after the other; kAtOnce of them are read together.
  template <int kAtOnce>
  __device__ void add(const Parts& parts, int lane) {
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kAtOnce) {
      Chunk<kAtOnce> chunk;
      chunk.load(parts, first, lane);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const MergedStates both(max, chunk.state[i].x);
        max = both.max;
        sum = both.mix(sum, chunk.state[i].y);
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          if (has(j, lane)) x[j] = both.mix(x[j], chunk.x[i][j]);
        }
      }
    }
  }
  /// The same but for rounding: weights of kLanes parts are worked out side by side, beside the first reads.
  template <int kAtOnce>
  __device__ void weigh(const Parts& parts, int lane) {
    const int own = lane % kLanes;
#pragma unroll 1
    for (int base = 0; base < parts.count; base += kLanes) {
      const int count = min(parts.count - base, kLanes);
      const float* const values = parts.values + base * parts.value_stride;
      float2 state{kMinus, 0.0f};
      if (own < count) state = parts.states[(base + own) * parts.state_stride];
      float weight = 0.0f;
#pragma unroll 1
      for (int first = 0; first < count; first += kAtOnce) {
        float4 v[kAtOnce][kQuads] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int j = 0; j < kQuads; ++j) {
            if (first + i >= count || !has(j, lane)) continue;
            v[i][j] =
                *reinterpret_cast<const float4*>(values + (first + i) * parts.value_stride + dim(j, lane));
          }
        }
        if (first == 0) {
          const PartWeights<kLanes> weights(state, max, sum);
          weight = weights.own;
#pragma unroll
          for (float4& a : x) {
            a = {a.x * weights.before, a.y * weights.before, a.z * weights.before, a.w * weights.before};
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float w = __shfl_sync(~0u, weight, (first + i) % kLanes, kLanes);  // of no part: v is 0
#pragma unroll
          for (int j = 0; j < kQuads; ++j) {
            float4& a = x[j];
            const float4& b = v[i][j];
            a = {fmaf(b.x, w, a.x), fmaf(b.y, w, a.y), fmaf(b.z, w, a.z), fmaf(b.w, w, a.w)};
          }
        }
      }
    }
  }
  /// this = merge(part, this), to the bit what add() makes of the two in that order.
  __device__ void put_behind(const Parts& part, int lane) {
    Chunk<1> chunk;
    chunk.load(part, 0, lane);
    const MergedStates both(chunk.state[0].x, max);
    max = both.max;
    sum = both.mix(chunk.state[0].y, sum);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      if (has(j, lane)) x[j] = both.mix(chunk.x[0][j], x[j]);
    }
  }
};

/// Partial slots in the workspace.
template <int kDim>
struct Slots {
  const AttentionParams& p;

  __device__ std::int64_t at(int slot, int row) const {
    return std::int64_t{slot} * p.schedule.params.row_block + row;
  }
  __device__ float2* states() const { return reinterpret_cast<float2*>(p.partial_state_log2); }
  __device__ float2* state(int slot, int row) const { return states() + at(slot, row); }
  __device__ float* values(int slot, int row) const { return p.partial_out + at(slot, row) * kDim; }

  /// `count` slots, `step` apart.
  __device__ Parts parts(int slot, int step, int count, int row) const {
    const int stride = step * p.schedule.params.row_block;
    return {state(slot, row), values(slot, row), stride, stride * kDim, count};
  }
  template <class Row>
  __device__ void store(const Row& r, int slot, int row, int lane, bool keep) const {
    __syncwarp();  // all lanes have read what the slot held
    if (!keep) return;
    float* to = values(slot, row);
#pragma unroll
    for (int j = 0; j < Row::kQuads; ++j) {
      if (Row::has(j, lane)) *reinterpret_cast<float4*>(to + Row::dim(j, lane)) = r.x[j];
    }
    if (lane % Row::kLanes == 0) *state(slot, row) = {r.max, r.sum};
  }
};

/// Groups g, g + 8, ... of a unit's rows are a class: what one warp finishes, however many warps take part.
/// Bit c of a mask is class c.
inline constexpr int kRowClasses = kArrivalCounters;

/// The classes of warp `warp` of `warps`, a divisor of their number unless there are no more groups than
/// classes: the warp's groups are `warp`, `warp` + `warps`, ...
__device__ inline std::uint32_t classes_of(int warp, int warps, int groups) {
  std::uint32_t every = 0;  // known when this is compiled, as `warps` mostly is
#pragma unroll
  for (int c = 0; c < kRowClasses; ++c) every |= (c % warps == 0 ? 1u : 0u) << c;
  return every << warp & ((1u << min(kRowClasses, groups)) - 1);
}

/// Counts an arrival; true for the last one of `expected`, which leaves the counter at zero. What the others
/// stored before is visible then.
__device__ inline bool arrives_last(std::int32_t* counter, int expected) {
  const bool last = count_arrival(counter) == expected - 1;
  if (last) *counter = 0;
  return last;
}

/// Counts the arrival of classes; returns those for which it was the last one. What the others stored of them
/// is visible then.
__device__ inline std::uint32_t last_arrivals(const AttentionParams& p, int slot, std::uint32_t classes,
                                              int expected, int lane) {
  bool last = false;
  __syncwarp();
  if (classes >> lane & 1) {
    last = arrives_last(p.arrivals + (std::int64_t{slot} * kArrivalCounters + lane), expected);
  }
  const std::uint32_t mask = __ballot_sync(~0u, last);
  __syncwarp();
  return mask;
}

/// Which parts are merged next, and where they go.
struct Merge {
  int first;     // slot of the first part; -1: the teams' states of the item
  int step;      // between slots
  int count;     // of parts
  int arrivals;  // parts that must be there: the last one to arrive merges
  int counter;   // slot whose counter they use
  int target;    // slot; -1: the output
};

/// The merge after `done` for an item that is a part of a cut unit. Parts of up to `at_once` groups are
/// merged together.
__device__ inline Merge next_merge(const DeviceItem& item, const Merge& done, int at_once, bool absolute) {
  const int first = item.first_slot, groups = (item.parts + kMergeGroup - 1) / kMergeGroup;
  if (absolute || groups <= at_once) return {first, 1, item.parts, item.arrivals, first, -1};
  const int group = (item.work.partial - first) / kMergeGroup;
  const int members = min(kMergeGroup, item.parts - group * kMergeGroup);
  const int group_slot = first + group * kMergeGroup;
  // A group's counter is that of its second slot: the first one's may be the unit's.
  if (done.first < 0 && members > 1) return {group_slot, 1, members, members, group_slot + 1, group_slot};
  return {first, kMergeGroup, groups, groups, first, -1};
}

}  // namespace halftone::cuda
