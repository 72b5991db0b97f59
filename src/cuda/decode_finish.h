// The end of an item: the teams' states are merged, partial states folded and stored, the output written.
// Warp f of the F that do it has the rows f, f + F, ... of every unit and works alone. With many rows the
// compute warps do it themselves, else the finish warps, beside the next item.
#pragma once

#include "cuda/decode_queries.h"

namespace halftone::cuda {

__device__ inline float weight_log2(float max, float merged) {
  return max == kMinus ? 0.0f : exp2_approx(max - merged);
}

/// Softmax states and unnormalised rows of O, a part at a time: of the teams in shared memory, or of partial
/// slots in the workspace. Strides are in elements, from part to part.
struct Parts {
  const float2* states;  // maximum (base 2), sum
  const float* values;
  int state_stride, value_stride, count;
};

/// One row of O over a warp: lane l has the dims 4 l + 128 j + 0..3. And its softmax state.
/// `kAtOnce` parts are read together, as the registers of the finish warps allow.
template <int kDim, int kAtOnce>
struct Row {
  static constexpr int kQuads = (kDim + 127) / 128;
  float4 x[kQuads] = {};
  float max = kMinus, sum = 0.0f;

  static __device__ bool has(int quad, int lane) { return kDim % 128 == 0 || lane * 4 + quad * 128 < kDim; }

  /// this = merge(this, parts).
  __device__ void add(const Parts& parts, int lane) {
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kAtOnce) {
      float2 state[kAtOnce];
      float4 v[kAtOnce][kQuads];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int part = min(first + i, parts.count - 1);
        const float* row = parts.values + part * parts.value_stride + lane * 4;
        state[i] = parts.states[part * parts.state_stride];
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          if (has(j, lane)) v[i][j] = *reinterpret_cast<const float4*>(row + j * 128);
        }
      }
      float merged = max;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= parts.count) state[i] = {kMinus, 0.0f};
        merged = fmaxf(merged, state[i].x);
      }
      scale(weight_log2(max, merged));
      max = merged;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float w = weight_log2(state[i].x, merged);
        sum += state[i].y * w;
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          if (has(j, lane)) add_scaled(x[j], v[i][j], w);
        }
      }
    }
  }
  /// this = merge(this, other).
  __device__ void fold(const Row& other) {
    const float merged = fmaxf(max, other.max), w = weight_log2(other.max, merged);
    scale(weight_log2(max, merged));
    max = merged;
    sum += other.sum * w;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) add_scaled(x[j], other.x[j], w);
  }

 private:
  __device__ void scale(float w) {
    sum *= w;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) x[j].x *= w, x[j].y *= w, x[j].z *= w, x[j].w *= w;
  }
  static __device__ void add_scaled(float4& x, const float4& y, float w) {
    x.x += y.x * w, x.y += y.y * w, x.z += y.z * w, x.w += y.w * w;
  }
};

/// Partial slots in the workspace.
template <int kDim>
struct Slots {
  const DecodeParams& p;

  __device__ std::int64_t at(int slot, int row) const {
    return std::int64_t{slot} * p.schedule.params.row_block + row;
  }
  __device__ float2* states() const { return reinterpret_cast<float2*>(p.partial_state_log2); }

  /// `count` slots, `step` apart.
  __device__ Parts parts(int slot, int step, int count, int row) const {
    const int stride = step * p.schedule.params.row_block;
    return {states() + at(slot, row), p.partial_out + at(slot, row) * kDim, stride, stride * kDim, count};
  }
  template <class Row>
  __device__ void store(const Row& r, int slot, int row, int lane, bool keep) const {
    __syncwarp();  // all lanes have read what the slot held
    if (!keep) return;
    float* values = p.partial_out + at(slot, row) * kDim + lane * 4;
#pragma unroll
    for (int j = 0; j < Row::kQuads; ++j) {
      if (Row::has(j, lane)) *reinterpret_cast<float4*>(values + j * 128) = r.x[j];
    }
    if (lane == 0) states()[at(slot, row)] = {r.max, r.sum};
  }
};

/// Divides by the sum (with the sink), rotates back, and writes O and the LSE of a row.
template <int kDim, class Row>
__device__ inline void write_row(const DecodeParams& p, const RowPlace& place, const Row& r, int lane,
                                 bool keep) {
  float scale = 0.0f, lse = kMinus;
  if (r.max != kMinus || r.sum != 0.0f) {
    float max = r.max, sum = r.sum, weight = 1.0f;
    if (p.sinks != nullptr && keep) {
      const float sink = p.sinks[place.head] * kLog2e;
      max = fmaxf(r.max, sink);
      weight = exp2_approx(r.max - max);
      sum = r.sum * weight + exp2_approx(sink - max);
    }
    scale = weight / sum;
    lse = (max + log2f(sum)) * kLn2;
  }
  float x[Row::kQuads][4];
#pragma unroll
  for (int j = 0; j < Row::kQuads; ++j) {
    x[j][0] = r.x[j].x, x[j][1] = r.x[j].y, x[j][2] = r.x[j].z, x[j][3] = r.x[j].w;
  }
  if (p.rotate_v) {
    constexpr int kBlock = hadamard::block_size(kDim);
#pragma unroll
    for (int j = 0; j < Row::kQuads; ++j) {
      rotate_lanes < 4, kBlock<128 ? kBlock : 128>(x[j], lane);
    }
    if constexpr (kBlock == 256) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = x[0][i], b = x[1][i];
        x[0][i] = a + b, x[1][i] = a - b;
      }
    }
    scale *= hadamard::factor(kBlock);
  }
  std::uint16_t* out =
      static_cast<std::uint16_t*>(p.out) + place.token * p.out_token_stride + place.head * p.out_head_stride;
#pragma unroll
  for (int j = 0; j < Row::kQuads; ++j) {
    const float a = x[j][0] * scale, b = x[j][1] * scale, c = x[j][2] * scale, d = x[j][3] * scale;
    if (keep && Row::has(j, lane)) {
      *reinterpret_cast<uint2*>(out + lane * 4 + j * 128) = p.out_bf16
                                                                ? uint2{pack_bf16x2(a, b), pack_bf16x2(c, d)}
                                                                : uint2{pack_f16x2(a, b), pack_f16x2(c, d)};
    }
  }
  if (keep && lane == 0 && p.lse != nullptr) {
    p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = lse;
  }
}

/// Rows r, r + 8, ... of a unit are a class: what one warp finishes at a time, however many warps take part.
/// Bit c of a mask is class c.
inline constexpr int kRowClasses = kArrivalCounters;

/// The classes of warp `warp` of `warps`.
__device__ inline std::uint32_t classes_of(int warp, int warps, int rows) {
  std::uint32_t mask = 0;
  for (int c = warp; c < min(kRowClasses, rows); c += warps) mask |= 1u << c;
  return mask;
}

/// Counts the arrival of classes; returns those for which it was the last one. What the others stored of them
/// is visible then.
__device__ inline std::uint32_t last_arrivals(const DecodeParams& p, int slot, std::uint32_t classes,
                                              int expected, int lane) {
  bool last = false;
  __syncwarp();
  if (classes >> lane & 1) {
    std::int32_t* counter = p.arrivals + (std::int64_t{slot} * kArrivalCounters + lane);
    last = count_arrival(counter) == expected - 1;
    if (last) *counter = 0;
  }
  const std::uint32_t mask = __ballot_sync(~0u, last);
  __syncwarp();
  return mask;
}

/// Many parts are merged in groups of this size first, so that the work spreads over CTAs.
inline constexpr int kMergeGroup = 8;

/// Which parts a finish warp merges next, and where they go.
struct Merge {
  int first;     // slot of the first part; -1: the teams' states of the item
  int step;      // between slots
  int count;     // of parts
  int arrivals;  // parts that must be there: the last one to arrive merges
  int counter;   // slot whose counter they use
  int target;    // slot; -1: the output
};

/// The merge after `done` for an item that is a part of a cut unit.
__device__ inline Merge next_merge(const DeviceItem& item, const Merge& done, bool absolute) {
  const int first = item.first_slot, groups = (item.parts + kMergeGroup - 1) / kMergeGroup;
  if (absolute || groups == 1) return {first, 1, item.parts, item.arrivals, first, -1};
  const int group = (item.work.partial - first) / kMergeGroup;
  const int members = min(kMergeGroup, item.parts - group * kMergeGroup);
  const int group_slot = first + group * kMergeGroup;
  // A group's counter is that of its second slot: the first one's may be the unit's.
  if (done.first < 0 && members > 1) return {group_slot, 1, members, members, group_slot + 1, group_slot};
  return {first, kMergeGroup, groups, groups, first, -1};
}

/// The part of an absolute split's unit that its first worker has folded, or the slots of the unit: a left
/// fold, wherever the first slot ends.
template <int kDim, class Row>
__device__ inline void fold_slots(const Slots<kDim>& slots, int first, int count, int row, int lane, Row& r) {
  const Row last = r;
  r = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    Row one;
    one.add(slots.parts(first + i, 0, 1, row), lane);
    r.fold(one);
  }
  r.fold(last);
}

/// Merges the teams' states of an item and writes the rows, or stores them in the item's slot; the last part
/// of a cut unit to arrive merges the slots in KV order and writes the rows. A rehearsal (not `real`) keeps
/// nothing.
template <DecodeConfig C>
__device__ inline void finish_item(const DecodeParams& p, const DeviceItem& item,
                                   typename DecodeTraits<C>::Shared& s, int warp, int warps, int lane,
                                   bool real) {
  using Traits = DecodeTraits<C>;
  constexpr int kDim = C.head_dim;
  const planning::WorkItem& work = item.work;
  const Slots<kDim> slots{p};
  const int rows = real ? work.row_end - work.row_begin : 8;
  std::uint32_t classes = classes_of(warp, warps, rows);
  const bool absolute = p.schedule.params.absolute;
  Merge merge{-1, 0, C.teams, 0, 0, (real ? work.finish : warp < 4) ? -1 : work.partial};
#pragma unroll 1
  while (classes != 0) {
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      if (!(classes >> row % kRowClasses & 1)) continue;
      Row<kDim, Traits::kPartsAtOnce> r;
      if (merge.first < 0 || !absolute) {
        Parts parts = slots.parts(max(merge.first, 0), merge.step, merge.count, row);
        if (merge.first < 0) {
          parts = {&s.state[0][row], s.out[0][row], Traits::kRows, Traits::kRows * (kDim + Traits::kPad),
                   C.teams};
        }
        r.add(parts, lane);
      }
      if (absolute && real && (merge.first >= 0 || work.fold)) {
        fold_slots(slots, merge.first < 0 ? work.partial : merge.first, merge.first < 0 ? 1 : merge.count,
                   row, lane, r);
      }
      if (merge.target < 0) {
        write_row<kDim>(p, place_of(p, item, row), r, lane, real);
      } else {
        slots.store(r, merge.target, row, lane, real);
      }
    }
    if (!real || merge.target < 0 || item.first_slot < 0) return;
    merge = next_merge(item, merge, absolute);
    classes = last_arrivals(p, merge.counter, classes, merge.arrivals, lane);
  }
}

/// Brings lines of the block table and of Q to L2 (and their pages into the TLB) before anyone knows which of
/// them this worker needs: each worker takes other ones.
__device__ inline void prefetch_inputs(const DecodeParams& p, int worker, int thread) {
  constexpr int kLine = 128;
  const auto fetch = [&](const void* data, std::int64_t bytes) {
    const std::int64_t at = (std::int64_t{worker} * (32 * kFinishWarps) + thread) * kLine;
    if (at < bytes) prefetch_to_l2(static_cast<const char*>(data) + at);
  };
  const std::int64_t batch = p.schedule.params.batch;
  fetch(p.cache.block_table, (batch - 1) * p.cache.table_stride * 4 + 4);
  fetch(p.q, (p.q_tokens - 1) * p.q_token_stride * 2 + 2);
}

/// A finish warp: the queries of item i + 1, then the end of item i, unless it is the last one. Before the
/// items are known it rehearses the queries of none.
template <DecodeConfig C>
__device__ inline void finish_worker(const DecodeParams& p, typename DecodeTraits<C>::Shared& s, int warp) {
  using Traits = DecodeTraits<C>;
  const int lane = thread_index() % 32;
  prefetch_inputs(p, blockIdx.x, warp * 32 + lane);
  bool has_next = true;
#pragma unroll 1
  for (int index = -2; has_next; ++index) {
    const bool real = index > -2;
    if (index == -1) {
      hardware_barrier_wait<kFinishReady, 32 * (kFinishWarps + 1)>();
      wait_for_previous_kernel();
      let_next_kernel_start();  // not before: what the next one may read ahead is complete only now
    }
    if (real) has_next = s.queue.has(index + 1);
    if (has_next) {
      const DeviceItem& next = real ? s.queue.items[(index + 1) % ItemQueue::kCapacity]
                                    : s.queue.nothing(ItemQueue::kRehearsals - 1 - warp, lane);
      QueryLoader<C>::load(p, next, s.queries[index + 1 & 1], warp);
      if (real) barrier_arrive(shared_address(&s.queries_full[(index + 1) % 2]));
      __syncwarp();
      if (real && lane == 0 && next.first_slot >= 0) {
        prefetch_to_l2(p.arrivals + std::int64_t{next.first_slot} * kArrivalCounters);
      }
    }
    if (index < 0 || !has_next) continue;
    hardware_barrier_wait<kStates, Traits::kStatesThreads>();
    finish_item<C>(p, s.queue.items[index % ItemQueue::kCapacity], s, warp, kFinishWarps, lane, true);
    barrier_arrive(shared_address(&s.states_empty));
    __syncwarp();
    if (warp == 0 && lane == 0) s.queue.current = index + 1;
  }
}

}  // namespace halftone::cuda
