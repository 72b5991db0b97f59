// The end of an item: the teams' states are merged, partial states folded and stored, the output written.
// A warp takes a group of rows at a time, one over a few lanes each, and works alone. With many rows the
// compute warps do it themselves, else the finish warps, beside the next item.
#pragma once

#include "cuda/decode/queries.h"
#include "cuda/device/values.h"
#include "format/status.h"

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
        const float merged = fmaxf(max, chunk.state[i].x);
        const float own = weight_log2(max, merged), w = weight_log2(chunk.state[i].x, merged);
        max = merged;
        sum = fmaf(chunk.state[i].y, w, sum * own);
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          if (has(j, lane)) x[j] = mix(x[j], own, chunk.x[i][j], w);
        }
      }
    }
  }
  /// this = merge(part, this), to the bit what add() makes of the two in that order.
  __device__ void put_behind(const Parts& part, int lane) {
    Chunk<1> chunk;
    chunk.load(part, 0, lane);
    const float merged = fmaxf(chunk.state[0].x, max);
    const float w = weight_log2(chunk.state[0].x, merged), own = weight_log2(max, merged);
    max = merged;
    sum = fmaf(sum, own, chunk.state[0].y * w);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      if (has(j, lane)) x[j] = mix(chunk.x[0][j], w, x[j], own);
    }
  }

 private:
  /// a * wa + b * wb, the latter in the fused operation.
  static __device__ float4 mix(const float4& a, float wa, const float4& b, float wb) {
    return {fmaf(b.x, wb, a.x * wa), fmaf(b.y, wb, a.y * wa), fmaf(b.z, wb, a.z * wa),
            fmaf(b.w, wb, a.w * wa)};
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

  /// `count` slots, `step` apart.
  __device__ Parts parts(int slot, int step, int count, int row) const {
    const int stride = step * p.schedule.params.row_block;
    return {states() + at(slot, row), p.partial_out + at(slot, row) * kDim, stride, stride * kDim, count};
  }
  template <class Row>
  __device__ void store(const Row& r, int slot, int row, int lane, bool keep) const {
    __syncwarp();  // all lanes have read what the slot held
    if (!keep) return;
    float* values = p.partial_out + at(slot, row) * kDim;
#pragma unroll
    for (int j = 0; j < Row::kQuads; ++j) {
      if (Row::has(j, lane)) *reinterpret_cast<float4*>(values + Row::dim(j, lane)) = r.x[j];
    }
    if (lane % Row::kLanes == 0) states()[at(slot, row)] = {r.max, r.sum};
  }
};

/// Divides by the sum (with the sink), rotates back, and writes O and the LSE of a row. O is bf16 or f16 with
/// rows that begin at multiples of 8 bytes, or anything with `kAnyOutput`.
template <int kDim, bool kAnyOutput, class Row>
__device__ inline void write_row(const AttentionParams& p, const RowPlace& place, const Row& r, int lane,
                                 bool keep) {
  constexpr int kQuads = Row::kQuads;
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
  float x[kQuads][4];
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    x[j][0] = r.x[j].x, x[j][1] = r.x[j].y, x[j][2] = r.x[j].z, x[j][3] = r.x[j].w;
  }
  if (p.rotate_v) {
    constexpr int kBlock = hadamard::block_size(kDim), kInLanes = 4 * Row::kLanes;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) rotate_lanes < 4, kBlock<kInLanes ? kBlock : kInLanes>(x[j], lane);
#pragma unroll
    for (int h = 1; h * kInLanes < kBlock; h *= 2) {
#pragma unroll
      for (int i = 0; i < 4 * kQuads; ++i) {
        if (i / 4 & h) continue;
        const float a = x[i / 4][i % 4], b = x[i / 4 + h][i % 4];
        x[i / 4][i % 4] = a + b, x[i / 4 + h][i % 4] = a - b;
      }
    }
    scale *= hadamard::factor(kBlock);
  }
  const std::int64_t out = place.token * p.out_token_stride + place.head * p.out_head_stride;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const float a = x[j][0] * scale, b = x[j][1] * scale, c = x[j][2] * scale, d = x[j][3] * scale;
    if (!keep || !Row::has(j, lane)) continue;
    const std::int64_t at = out + Row::dim(j, lane);
    if constexpr (kAnyOutput) {
      store_value(p.out_type, p.out, at, a);
      store_value(p.out_type, p.out, at + 1, b);
      store_value(p.out_type, p.out, at + 2, c);
      store_value(p.out_type, p.out, at + 3, d);
    } else {
      const bool bf16 = p.out_type == DType::kBFloat16;
      *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(p.out) + at) =
          bf16 ? uint2{pack_bf16x2(a, b), pack_bf16x2(c, d)} : uint2{pack_f16x2(a, b), pack_f16x2(c, d)};
    }
  }
  if (keep && lane % Row::kLanes == 0 && p.lse != nullptr) {
    p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = lse;
  }
}

/// Groups g, g + 8, ... of a unit's rows are a class: what one warp finishes, however many warps take part.
/// Bit c of a mask is class c.
inline constexpr int kRowClasses = kArrivalCounters;

/// The classes of warp `warp` of `warps`, a divisor of their number unless there is one group for each warp:
/// the warp's groups are `warp`, `warp` + `warps`, ...
__device__ inline std::uint32_t classes_of(int warp, int warps, int groups) {
  std::uint32_t mask = 0;
  for (int c = warp; c < min(kRowClasses, groups); c += warps) mask |= 1u << c;
  return mask;
}

/// Counts the arrival of classes; returns those for which it was the last one. What the others stored of them
/// is visible then.
__device__ inline std::uint32_t last_arrivals(const AttentionParams& p, int slot, std::uint32_t classes,
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

/// The states that the teams of a configuration leave of a row.
template <DecodeConfig C>
struct TeamStates {
  using Traits = DecodeTraits<C>;
  const typename Traits::Shared& s;
  __device__ Parts operator()(int row) const {
    return {&s.state[0][row], s.out[0][row], Traits::kRows, Traits::kRows * (Traits::kDim + Traits::kPad),
            C.teams};
  }
};

/// Merges the teams' states of an item and writes the rows, or stores them in the item's slot; the last part
/// of a cut unit to arrive merges the slots in KV order and writes the rows. A rehearsal (not `real`) keeps
/// nothing. kAtOnce: parts that are read together, as the caller's registers allow. `states_of(row)`: the
/// Parts that the teams leave of a row.
template <class Traits, int kAtOnce, class StatesOf>
__device__ inline void finish_item(const AttentionParams& p, const DeviceItem& item,
                                   const StatesOf& states_of, int warp, int warps, int lane, bool real) {
  constexpr int kDim = Traits::kDim;
  using State = Row<kDim, Traits::kRowLanes>;
  constexpr int kGroup = State::kGroup;
  const planning::WorkItem& work = item.work;
  const Slots<kDim> slots{p};
  const int rows = real ? work.row_end - work.row_begin : kGroup, groups = (rows + kGroup - 1) / kGroup;
  std::uint32_t classes = real ? classes_of(warp, warps, groups) : 1;
  Merge merge{-1, 0, 0, 0, 0, (real ? work.finish : warp < 4) ? -1 : work.partial};
#pragma unroll 1
  while (classes != 0) {
#pragma unroll 1
    for (int group = real ? warp : 0; group < groups; group += warps) {
      if (!(classes >> group % kRowClasses & 1)) continue;
      const int place = group * kGroup + lane / State::kLanes, row = min(place, rows - 1);
      const bool keep = real && place < rows;
      State r;
      if (merge.first < 0) {
        r.template add<kAtOnce>(states_of(row), lane);
        if (real && work.fold) r.put_behind(slots.parts(work.partial, 0, 1, row), lane);
      } else {
        r.template add<kAtOnce>(slots.parts(merge.first, merge.step, merge.count, row), lane);
      }
      if (merge.target < 0) {
        write_row<kDim, Traits::kAnyOutput>(p, place_of(p, item, row), r, lane, keep);
      } else {
        slots.store(r, merge.target, row, lane, keep);
      }
    }
    if (!real || merge.target < 0 || item.first_slot < 0) return;
    merge = next_merge(item, merge, p.schedule.params.absolute);
    classes = last_arrivals(p, merge.counter, classes, merge.arrivals, lane);
  }
}

/// Brings lines of the block table and of Q to L2 (and their pages into the TLB) before anyone knows which of
/// them this worker needs: each worker takes other ones.
__device__ inline void prefetch_inputs(const AttentionParams& p, int worker, int thread) {
  constexpr int kLine = 128;
  const auto fetch = [&](const void* data, std::int64_t bytes) {
    const std::int64_t at = (std::int64_t{worker} * (32 * kFinishWarps) + thread) * kLine;
    if (at < bytes) prefetch_to_l2(static_cast<const char*>(data) + at);
  };
  const std::int64_t batch = p.schedule.params.batch;
  fetch(p.cache.block_table, (batch - 1) * p.cache.table_stride * 4 + 4);
  fetch(p.q, (p.q_tokens - 1) * p.q_token_stride * 2 + 2);
}

/// Sets the status if the schedule has more queries than Q has rows, or a static scale or min of the cache is
/// none. By a warp of each worker.
__device__ inline void check_inputs(const AttentionParams& p, int worker, int lane) {
  if (p.status == nullptr) return;
  const bool first = worker == 0 && lane == 0;
  if (first && p.schedule.header->total_q > p.q_tokens) atomicOr(p.status, kStatusBadQueries);
  const ParamView& part = lane % 2 == 0 ? p.k : p.v;
  if (part.static_scale == nullptr) return;
  const int heads = part.static_stride == 0 ? 1 : p.schedule.params.kv_heads;
#pragma unroll 1
  for (int head = worker * 16 + lane / 2; head < heads; head += static_cast<int>(gridDim.x) * 16) {
    const float min = part.static_min == nullptr ? 0.0f : part.static_min[head];
    if (!codec::is_static_scale(part.static_scale[head], min)) atomicOr(p.status, kStatusBadScale);
  }
}

/// A finish warp: the queries of item i + 1, then the end of item i, unless it is the last one. Before the
/// items are known it rehearses the queries of none.
template <DecodeConfig C>
__device__ inline void finish_worker(const AttentionParams& p, typename DecodeTraits<C>::Shared& s,
                                     int warp) {
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
    if (index == -1 && warp == 0) check_inputs(p, blockIdx.x, lane);  // idle until item 0 ends
    if (index < 0 || !has_next) continue;
    hardware_barrier_wait<kStates, Traits::kStatesThreads>();
    finish_item<Traits, Traits::kPartsOfFinish>(p, s.queue.items[index % ItemQueue::kCapacity],
                                                TeamStates<C>{s}, warp, kFinishWarps, lane, true);
    barrier_arrive(shared_address(&s.states_empty));
    __syncwarp();
    if (warp == 0 && lane == 0) s.queue.current = index + 1;
  }
}

}  // namespace halftone::cuda
