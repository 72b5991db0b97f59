// The end of a decode item: merging warps, folding and storing partial states, writing the output.
#pragma once

#include "cuda/decode_kernel.h"

namespace halftone::cuda {

/// A row's state as base-2 maximum and sum.
struct StateLog2 {
  float max, sum;
};

__device__ inline float weight_log2(float max, float merged) { return max == kMinus ? 0.0f : exp2f(max - merged); }

/// Where a packed row of an item stands in the tensors.
struct RowPlace {
  std::int64_t token;
  int head;
};
__device__ inline RowPlace row_place(const DecodeParams& p, int request, int kv_head, int packed) {
  const int group = p.schedule.params.group, query = packed / group;
  return {std::int64_t{p.schedule.cu_q[request]} + query, kv_head * group + packed - query * group};
}

/// Writes four neighbouring outputs of a row, given its unnormalised sums, and (from the row's first lane) its LSE.
__device__ inline void write_row(const DecodeParams& p, const RowPlace& place, int dim, float4 x, StateLog2 state,
                                 bool writes_lse) {
  float lse = kMinus, scale = 0.0f;
  if (state.max != kMinus || state.sum != 0.0f) {  // not empty, or NaN
    float max = state.max, sum = state.sum;
    if (p.sinks != nullptr) {
      const float sink = p.sinks[place.head] * kLog2e;
      max = fmaxf(state.max, sink);
      const float weight = exp2f(state.max - max);
      sum = state.sum * weight + exp2f(sink - max);
      scale = weight / sum;
    } else {
      scale = 1.0f / sum;
    }
    lse = (max + log2f(sum)) * kLn2;
  }
  const std::int64_t at = place.token * p.out_token_stride + place.head * p.out_head_stride + dim;
  uint2 packed;
  if (p.out_bf16) {
    packed = {pack_bf16x2(x.x * scale, x.y * scale), pack_bf16x2(x.z * scale, x.w * scale)};
  } else {
    packed = {pack_f16x2(x.x * scale, x.y * scale), pack_f16x2(x.z * scale, x.w * scale)};
  }
  std::uint16_t* out = static_cast<std::uint16_t*>(p.out) + at;
  *reinterpret_cast<uint2*>(out) = packed;
  if (writes_lse && p.lse != nullptr) p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = lse;
}

/// Sends merged rows to the output, undoing V's rotation first. `value(row, dim)` gives four sums, `state(row)` the state.
/// With rotation the rows pass through s.out[0].
template <DecodeConfig C, class Value, class State>
__device__ void write_rows(const DecodeParams& p, int request, int kv_head, int row_begin, int rows,
                           typename DecodeTraits<C>::Shared& s, Value value, State state) {
  using Traits = DecodeTraits<C>;
  constexpr int kQuads = Traits::kDim / 4;
  if (p.rotate_v) {
    float4 held[(Traits::kRows * kQuads + Traits::kThreads - 1) / Traits::kThreads];
    int count = 0;
#pragma unroll
    for (int i = threadIdx.x; i < Traits::kRows * kQuads; i += Traits::kThreads) {
      held[count++] = i / kQuads < rows ? value(i / kQuads, i % kQuads * 4) : float4{};
    }
    __syncthreads();
    count = 0;
#pragma unroll
    for (int i = threadIdx.x; i < Traits::kRows * kQuads; i += Traits::kThreads) {
      *reinterpret_cast<float4*>(&s.out[0][i / kQuads][i % kQuads * 4]) = held[count++];
    }
    __syncthreads();
    if (threadIdx.x < rows) hadamard::rotate(s.out[0][threadIdx.x], Traits::kDim);
    __syncthreads();
  }
  for (int i = threadIdx.x; i < rows * kQuads; i += Traits::kThreads) {
    const int row = i / kQuads, dim = i % kQuads * 4;
    const float4 x = p.rotate_v ? *reinterpret_cast<const float4*>(&s.out[0][row][dim]) : value(row, dim);
    write_row(p, row_place(p, request, kv_head, row_begin + row), dim, x, state(row), dim == 0);
  }
}

/// Merges the slots of a cut unit in KV order and writes the rows.
template <DecodeConfig C>
__device__ void merge_slots(const DecodeParams& p, const planning::MergeItem& unit,
                            typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  const int rows = unit.row_end - unit.row_begin, row_block = p.schedule.params.row_block;
  const auto slot_state = [&](int part, int row) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(p.partial_state) +
                            std::int64_t{unit.slot + part} * row_block + row);
    return StateLog2{v.x, v.y};
  };
  const auto state = [&](int row) {
    StateLog2 total{kMinus, 0.0f};
    for (int part = 0; part < unit.parts; ++part) total.max = fmaxf(total.max, slot_state(part, row).max);
    for (int part = 0; part < unit.parts; ++part) {
      const StateLog2 one = slot_state(part, row);
      total.sum += one.sum * weight_log2(one.max, total.max);
    }
    return total;
  };
  const auto value = [&](int row, int dim) {
    const float max = state(row).max;
    float4 x{};
    for (int part = 0; part < unit.parts; ++part) {
      const float weight = weight_log2(slot_state(part, row).max, max);
      const float4 y = __ldcg(reinterpret_cast<const float4*>(
          p.partial_out + (std::int64_t{unit.slot + part} * row_block + row) * Traits::kDim + dim));
      x.x += y.x * weight, x.y += y.y * weight, x.z += y.z * weight, x.w += y.w * weight;
    }
    return x;
  };
  write_rows<C>(p, unit.request, unit.kv_head, unit.row_begin, rows, s, value, state);
}

/// The worker that began the unit of `item`, an item of `worker`.
__device__ inline int unit_owner(const planning::Schedule& schedule, const planning::WorkItem& item, int worker) {
  const planning::WorkerStart& start = schedule.starts[worker];
  const bool continued = start.offset > 0 && item.request == start.request && item.kv_head == start.kv_head &&
                         item.row_begin == start.block * schedule.params.row_block;
  if (!continued) return worker;
  const std::int64_t first = planning::share_begin(*schedule.header, worker) - start.offset;
  int owner = worker;
  while (planning::share_begin(*schedule.header, owner) > first) --owner;
  return owner;
}

/// Merges the warps' states and writes the item's rows, or its partial slot; the last part to arrive merges its unit.
template <DecodeConfig C>
__device__ void finish_item(const DecodeParams& p, const planning::WorkItem& item,
                            typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  constexpr int kQuads = Traits::kDim / 4;
  const int rows = item.row_end - item.row_begin;
  const std::int64_t slot_row = std::int64_t{item.partial} * p.schedule.params.row_block;
  float2* slot_states = reinterpret_cast<float2*>(p.partial_state) + slot_row;
  const auto state = [&](int row) {
    StateLog2 total{kMinus, 0.0f};
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) total.max = fmaxf(total.max, s.state[w][row][0]);
    if (item.fold) total.max = fmaxf(total.max, slot_states[row].x);
    if (item.fold) total.sum = slot_states[row].y * weight_log2(slot_states[row].x, total.max);
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      total.sum += s.state[w][row][1] * weight_log2(s.state[w][row][0], total.max);
    }
    return total;
  };
  const auto value = [&](int row, int dim) {
    const float max = state(row).max;
    float4 x{};
    if (item.fold) {
      const float4 y = *reinterpret_cast<const float4*>(p.partial_out + (slot_row + row) * Traits::kDim + dim);
      const float weight = weight_log2(slot_states[row].x, max);
      x = {y.x * weight, y.y * weight, y.z * weight, y.w * weight};
    }
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      const float weight = weight_log2(s.state[w][row][0], max);
      const float4 y = *reinterpret_cast<const float4*>(&s.out[w][row][dim]);
      x.x += y.x * weight, x.y += y.y * weight, x.z += y.z * weight, x.w += y.w * weight;
    }
    return x;
  };
  __syncthreads();
  if (item.finish) {
    write_rows<C>(p, item.request, item.kv_head, item.row_begin, rows, s, value, state);
    return;
  }
  constexpr int kHeld = (Traits::kRows * kQuads + Traits::kThreads - 1) / Traits::kThreads;
  float4 held[kHeld];
  StateLog2 states[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = threadIdx.x + i * Traits::kThreads, row = at / kQuads;
    if (row >= rows) continue;
    held[i] = value(row, at % kQuads * 4);
    states[i] = state(row);
  }
  __syncthreads();  // a fold reads the slot that is written next
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = threadIdx.x + i * Traits::kThreads, row = at / kQuads;
    if (row >= rows) continue;
    *reinterpret_cast<float4*>(p.partial_out + (slot_row + row) * Traits::kDim + at % kQuads * 4) = held[i];
    if (at % kQuads == 0) slot_states[row] = {states[i].max, states[i].sum};
  }
}

/// Counts a stored part of a unit; the last part of a cut unit to arrive merges it.
template <DecodeConfig C>
__device__ void arrive(const DecodeParams& p, const planning::WorkItem& item, int worker,
                       typename DecodeTraits<C>::Shared& s) {
  const int owner = unit_owner(p.schedule, item, worker);
  planning::MergeItem unit;
  const bool cut = planning::merge_item(p.schedule, owner, unit) && unit.request == item.request &&
                   unit.kv_head == item.kv_head && unit.row_begin == item.row_begin;
  if (!cut) return;  // batch-invariant splits that one worker folds
  const int parts = p.schedule.params.absolute ? p.schedule.starts[owner + 1].steps : unit.parts;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    s.last_arrival = atomicAdd(&p.arrivals[owner], 1) == parts - 1;
    if (s.last_arrival) p.arrivals[owner] = 0;
  }
  __syncthreads();
  if (!s.last_arrival) return;
  __threadfence();
  merge_slots<C>(p, unit, s);
}

}  // namespace halftone::cuda
