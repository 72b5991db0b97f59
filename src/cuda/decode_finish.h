// The end of a decode item: merging warps, folding and storing partial states, writing the output.
#pragma once

#include "cuda/decode_warp.h"

namespace halftone::cuda {

__device__ inline float weight_log2(float max, float merged) {
  return max == kMinus ? 0.0f : exp2_approx(max - merged);
}

__device__ inline void add_weighted(float4& x, float weight, const float4& y) {
  x.x += y.x * weight, x.y += y.y * weight, x.z += y.z * weight, x.w += y.w * weight;
}

/// A finished row: what its sums are multiplied by, and its LSE.
struct RowResult {
  float scale, lse;
};

__device__ inline RowResult finish_row(const DecodeParams& p, int head, float2 state) {
  float max = state.x, sum = state.y;
  if (max == kMinus && sum == 0.0f) return {0.0f, kMinus};
  float weight = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2e;
    max = fmaxf(state.x, sink);
    weight = exp2_approx(state.x - max);
    sum = state.y * weight + exp2_approx(sink - max);
  }
  return {weight / sum, (max + log2f(sum)) * kLn2};
}

/// Writes the rows [0, rows) of an item whose states are in s.merged. `value(row, dim)` gives four
/// unnormalised sums.
template <DecodeConfig C, class Value>
__device__ inline void write_rows(const DecodeParams& p, const RowPlace* places, int rows,
                                  typename DecodeTraits<C>::Shared& s, Value value) {
  using Traits = DecodeTraits<C>;
  constexpr int kQuads = Traits::kDim / 4,
                kRounds = (Traits::kRows * kQuads + Traits::kThreads - 1) / Traits::kThreads;
  float4 x[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = threadIdx.x + i * Traits::kThreads;
    if (at / kQuads < rows) x[i] = value(at / kQuads, at % kQuads * 4);
  }
  if (p.rotate_v) {  // through the first warp's buffer
    named_barrier<Traits::kThreads>();
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int at = threadIdx.x + i * Traits::kThreads;
      if (at / kQuads < rows) *reinterpret_cast<float4*>(&s.out[0][at / kQuads][at % kQuads * 4]) = x[i];
    }
    named_barrier<Traits::kThreads>();
    if (threadIdx.x < rows) rotate_shared(s.out[0][threadIdx.x], Traits::kDim);
    named_barrier<Traits::kThreads>();
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = threadIdx.x + i * Traits::kThreads, row = at / kQuads, dim = at % kQuads * 4;
    if (row >= rows) continue;
    if (p.rotate_v) x[i] = *reinterpret_cast<const float4*>(&s.out[0][row][dim]);
    const RowPlace& place = places[row];
    const RowResult result = finish_row(p, place.head, s.merged[row]);
    const float a = x[i].x * result.scale, b = x[i].y * result.scale, c = x[i].z * result.scale,
                d = x[i].w * result.scale;
    const uint2 packed =
        p.out_bf16 ? uint2{pack_bf16x2(a, b), pack_bf16x2(c, d)} : uint2{pack_f16x2(a, b), pack_f16x2(c, d)};
    std::uint16_t* out = static_cast<std::uint16_t*>(p.out) + place.token * p.out_token_stride +
                         place.head * p.out_head_stride;
    *reinterpret_cast<uint2*>(out + dim) = packed;
    if (dim == 0 && p.lse != nullptr)
      p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = result.lse;
  }
}

/// Merges the slots of a cut unit in KV order and writes its rows, which are those of the current item.
template <DecodeConfig C>
__device__ inline void merge_slots(const DecodeParams& p, const DeviceItem& item,
                                   typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  const int rows = item.work.row_end - item.work.row_begin, row_block = p.schedule.params.row_block;
  const int lane = threadIdx.x % 32;
  const std::int64_t first = std::int64_t{item.first_slot} * row_block;
  const float2* states = reinterpret_cast<const float2*>(p.partial_state_log2) + first;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows; row += Traits::kWarps) {
    float max = kMinus, sum = 0.0f;
    for (int part = lane; part < item.parts; part += 32)
      max = fmaxf(max, __ldcg(states + part * row_block + row).x);
#pragma unroll 1
    for (int i = 16; i > 0; i /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, i));
    for (int part = lane; part < item.parts; part += 32) {
      const float2 one = __ldcg(states + part * row_block + row);
      sum += one.y * weight_log2(one.x, max);
    }
#pragma unroll 1
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane == 0) s.merged[row] = {max, sum};
  }
  named_barrier<Traits::kThreads>();
  write_rows<C>(p, s.places, rows, s, [&](int row, int dim) {
    const float max = s.merged[row].x;
    const float4* values =
        reinterpret_cast<const float4*>(p.partial_out + (first + row) * Traits::kDim + dim);
    float4 x{};
#pragma unroll 4
    for (int part = 0; part < item.parts; ++part) {
      const float4 y = __ldcg(values + std::int64_t{part} * row_block * (Traits::kDim / 4));
      add_weighted(x, weight_log2(__ldcg(states + part * row_block + row).x, max), y);
    }
    return x;
  });
}

/// Merges the warps' states and writes the item's rows, or its partial slot; the last part of a cut unit to
/// arrive merges the unit.
template <DecodeConfig C>
__device__ inline void finish_item(const DecodeParams& p, const DeviceItem& item,
                                   typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  constexpr int kQuads = Traits::kDim / 4;
  const planning::WorkItem& work = item.work;
  const int rows = work.row_end - work.row_begin;
  const std::int64_t slot_row = std::int64_t{work.partial} * p.schedule.params.row_block;
  float2* slot_states = reinterpret_cast<float2*>(p.partial_state_log2) + slot_row;
  named_barrier<Traits::kThreads>();
  if (threadIdx.x < rows) {
    const int row = threadIdx.x;
    const float2 slot = work.fold ? slot_states[row] : float2{kMinus, 0.0f};
    float max = slot.x;
#pragma unroll 1
    for (int w = 0; w < Traits::kWarps; ++w) max = fmaxf(max, s.state[w][row][0]);
    s.weights[Traits::kWarps][row] = weight_log2(slot.x, max);
    float sum = slot.y * s.weights[Traits::kWarps][row];
#pragma unroll 1
    for (int w = 0; w < Traits::kWarps; ++w) {
      s.weights[w][row] = weight_log2(s.state[w][row][0], max);
      sum += s.state[w][row][1] * s.weights[w][row];
    }
    s.merged[row] = {max, sum};
    if (!work.finish) slot_states[row] = {max, sum};
  }
  named_barrier<Traits::kThreads>();
  const auto value = [&](int row, int dim) {
    float4 x{};
    if (work.fold) {
      add_weighted(x, s.weights[Traits::kWarps][row],
                   *reinterpret_cast<const float4*>(p.partial_out + (slot_row + row) * Traits::kDim + dim));
    }
#pragma unroll 2
    for (int w = 0; w < Traits::kWarps; ++w) {
      add_weighted(x, s.weights[w][row], *reinterpret_cast<const float4*>(&s.out[w][row][dim]));
    }
    return x;
  };
  if (work.finish) {
    write_rows<C>(p, s.places, rows, s, value);
    return;
  }
#pragma unroll 1
  for (int at = threadIdx.x; at < rows * kQuads; at += Traits::kThreads) {
    const int row = at / kQuads, dim = at % kQuads * 4;
    *reinterpret_cast<float4*>(p.partial_out + (slot_row + row) * Traits::kDim + dim) = value(row, dim);
  }
  if (item.owner < 0) return;  // batch-invariant splits that one worker folds
  __threadfence();
  named_barrier<Traits::kThreads>();
  if (threadIdx.x == 0) {
    s.last_arrival = atomicAdd(&p.arrivals[item.owner], 1) == item.arrivals - 1;
    if (s.last_arrival) p.arrivals[item.owner] = 0;
  }
  named_barrier<Traits::kThreads>();
  if (!s.last_arrival) return;
  __threadfence();
  merge_slots<C>(p, item, s);
}

}  // namespace halftone::cuda
