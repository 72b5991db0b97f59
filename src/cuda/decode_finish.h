// The finishing role of the decode kernel: brings queries, merges the teams' states, folds and stores partial
// states, writes the output. Finish warp f has the rows f, f + 3, ... of every unit and works alone.
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
  std::int64_t state_stride, value_stride;
  int count;
};

/// One row of O over a warp: lane l has the dims 4 l + 128 j + 0..3. And its softmax state.
template <int kDim>
struct Row {
  static constexpr int kQuads = (kDim + 127) / 128;
  float4 x[kQuads] = {};
  float max = kMinus, sum = 0.0f;

  static __device__ bool has(int quad, int lane) { return kDim % 128 == 0 || lane * 4 + quad * 128 < kDim; }

  /// this = merge(this, the merge of up to 32 parts), which come after it.
  __device__ void fold(const Parts& parts, int lane) {
    const float2 state = lane < parts.count ? parts.states[lane * parts.state_stride] : float2{kMinus, 0.0f};
    float top = state.x;
#pragma unroll 1
    for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
    const float weight = weight_log2(state.x, top);
    float total = state.y * weight;
#pragma unroll 1
    for (int i = 16; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
    float4 y[kQuads] = {};
#pragma unroll 4
    for (int part = 0; part < parts.count; ++part) {
      const float w = __shfl_sync(~0u, weight, part);
      const float* row = parts.values + part * parts.value_stride + lane * 4;
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        if (!has(j, lane)) continue;
        const float4 v = *reinterpret_cast<const float4*>(row + j * 128);
        y[j].x += v.x * w, y[j].y += v.y * w, y[j].z += v.z * w, y[j].w += v.w * w;
      }
    }
    const float merged = fmaxf(max, top);
    const float a = weight_log2(max, merged), b = weight_log2(top, merged);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      x[j].x = x[j].x * a + y[j].x * b, x[j].y = x[j].y * a + y[j].y * b;
      x[j].z = x[j].z * a + y[j].z * b, x[j].w = x[j].w * a + y[j].w * b;
    }
    sum = sum * a + total * b;
    max = merged;
  }
};

/// Partial slots in the workspace.
template <int kDim>
struct Slots {
  float2* states;
  float* values;
  int row_block;
  __device__ explicit Slots(const DecodeParams& p)
      : states(reinterpret_cast<float2*>(p.partial_state_log2)),
        values(p.partial_out),
        row_block(p.schedule.params.row_block) {}

  /// `count` slots, `step` apart.
  __device__ Parts parts(int slot, int step, int count, int row) const {
    const std::int64_t at = std::int64_t{slot} * row_block + row, stride = std::int64_t{step} * row_block;
    return {states + at, values + at * kDim, stride, stride * kDim, count};
  }
  __device__ void store(const Row<kDim>& r, int slot, int row, int lane) const {
    const std::int64_t at = std::int64_t{slot} * row_block + row;
    __syncwarp();  // all lanes have read what the slot held
#pragma unroll
    for (int j = 0; j < Row<kDim>::kQuads; ++j) {
      if (Row<kDim>::has(j, lane)) {
        *reinterpret_cast<float4*>(values + at * kDim + lane * 4 + j * 128) = r.x[j];
      }
    }
    if (lane == 0) states[at] = {r.max, r.sum};
  }
};

/// Divides by the sum (with the sink), rotates back, and writes O and the LSE of a row.
template <int kDim>
__device__ inline void write_row(const DecodeParams& p, const RowPlace& place, Row<kDim>& r, int lane) {
  float scale = 0.0f, lse = kMinus;
  if (r.max != kMinus || r.sum != 0.0f) {
    float max = r.max, sum = r.sum, weight = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = p.sinks[place.head] * kLog2e;
      max = fmaxf(r.max, sink);
      weight = exp2_approx(r.max - max);
      sum = r.sum * weight + exp2_approx(sink - max);
    }
    scale = weight / sum;
    lse = (max + log2f(sum)) * kLn2;
  }
  float x[Row<kDim>::kQuads][4];
#pragma unroll
  for (int j = 0; j < Row<kDim>::kQuads; ++j) {
    x[j][0] = r.x[j].x, x[j][1] = r.x[j].y, x[j][2] = r.x[j].z, x[j][3] = r.x[j].w;
  }
  if (p.rotate_v) {
    constexpr int kBlock = hadamard::block_size(kDim);
#pragma unroll
    for (int j = 0; j < Row<kDim>::kQuads; ++j) {
      rotate_lanes<4, kBlock < 128 ? kBlock : 128>(x[j], lane);
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
  for (int j = 0; j < Row<kDim>::kQuads; ++j) {
    const float a = x[j][0] * scale, b = x[j][1] * scale, c = x[j][2] * scale, d = x[j][3] * scale;
    if (Row<kDim>::has(j, lane)) {
      *reinterpret_cast<uint2*>(out + lane * 4 + j * 128) =
          p.out_bf16 ? uint2{pack_bf16x2(a, b), pack_bf16x2(c, d)}
                     : uint2{pack_f16x2(a, b), pack_f16x2(c, d)};
    }
  }
  if (lane == 0 && p.lse != nullptr) {
    p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = lse;
  }
}

/// Counts an arrival of this warp's rows; true for the last one, which then sees what the others stored.
__device__ inline bool is_last_arrival(const DecodeParams& p, int slot, int warp, int expected, int lane) {
  std::int32_t* counter = p.arrivals + (std::int64_t{slot} * kArrivalCounters + warp);
  bool last = false;
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    last = atomicAdd(counter, 1) == expected - 1;
    if (last) *counter = 0;
    __threadfence();
  }
  return __shfl_sync(~0u, last, 0);
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

/// Merges the teams' states of an item and writes the rows, or stores them in the item's slot; the last part of
/// a cut unit to arrive merges the slots in KV order and writes the rows.
template <DecodeConfig C>
__device__ inline void finish_item(const DecodeParams& p, const DeviceItem& item,
                                   typename DecodeTraits<C>::Shared& s, int warp, int lane) {
  using Traits = DecodeTraits<C>;
  constexpr int kDim = C.head_dim;
  const planning::WorkItem& work = item.work;
  const Slots<kDim> slots(p);
  const int rows = work.row_end - work.row_begin;
  const bool absolute = p.schedule.params.absolute;
  Merge merge{-1, 0, C.teams, 0, 0, work.finish ? -1 : work.partial};
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (int row = warp; row < rows; row += kFinishWarps) {
      Row<kDim> r;
      // Absolute splits are a left fold, wherever the first slot ends.
      const int at_once = merge.first >= 0 && absolute ? 1 : 32;
#pragma unroll 1
      for (int i = merge.first < 0 && work.fold ? -1 : 0; i < merge.count; i += i < 0 ? 1 : at_once) {
        Parts parts = i < 0 ? slots.parts(work.partial, 0, 1, row)
                            : slots.parts(merge.first + i * merge.step, merge.step, min(at_once, merge.count - i), row);
        if (i >= 0 && merge.first < 0) {
          parts = {&s.state[0][row], s.out[0][row], Traits::kRows, Traits::kRows * (kDim + Traits::kPad), C.teams};
        }
        r.fold(parts, lane);
      }
      if (merge.target < 0) {
        write_row<kDim>(p, place_of(p, item, row), r, lane);
      } else {
        slots.store(r, merge.target, row, lane);
      }
    }
    if (merge.first < 0) {  // the teams may store their next states
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.states_empty);
    }
    if (merge.target < 0 || item.first_slot < 0 || warp >= rows) return;
    merge = next_merge(item, merge, absolute);
    if (!is_last_arrival(p, merge.counter, warp, merge.arrivals, lane)) return;
  }
}

/// A finish warp: the queries of item i + 1, then the end of item i.
template <DecodeConfig C>
__device__ inline void finish_worker(const DecodeParams& p, typename DecodeTraits<C>::Shared& s, int warp) {
  const int lane = threadIdx.x % 32;
  bool has_next = true;
#pragma unroll 1
  for (int index = -1; has_next; ++index) {
    has_next = s.queue.has(index + 1);
    if (has_next) {
      const DeviceItem& next = s.queue.items[(index + 1) % ItemQueue::kCapacity];
      QueryLoader<C>::load(p, next, s.queries[(index + 1) % 2], warp);
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.queries_full[(index + 1) % 2]);
    }
    if (index < 0) continue;
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    barrier_wait(&s.states_full, index & 1);
    finish_item<C>(p, item, s, warp, lane);
    __syncwarp();
    if (warp == 0 && lane == 0) s.queue.current = index + 1;
  }
}

}  // namespace halftone::cuda
