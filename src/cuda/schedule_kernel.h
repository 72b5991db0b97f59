// Builds a schedule on the device: one block runs the phases of planning::build_schedule in parallel.
#pragma once

#include "cuda/schedule_params.h"

namespace halftone::cuda {

inline constexpr int kScheduleThreads = 1024;

/// Exclusive prefix sum of one value per thread; returns the block's total through `total`.
__device__ inline std::int64_t exclusive_sum(std::int64_t value, std::int64_t& total) {
  __shared__ std::int64_t warp_sums[kScheduleThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::int64_t sum = value;
  for (int i = 1; i < 32; i *= 2) {
    const std::int64_t below = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += below;
  }
  __syncthreads();  // the previous call's readers are done
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    std::int64_t s = warp_sums[lane];
    for (int i = 1; i < 32; i *= 2) {
      const std::int64_t below = __shfl_up_sync(~0u, s, i);
      if (lane >= i) s += below;
    }
    warp_sums[lane] = s;
  }
  __syncthreads();
  total = warp_sums[kScheduleThreads / 32 - 1];
  return sum - value + (warp == 0 ? 0 : warp_sums[warp - 1]);
}

/// Lengths outside the plan's bounds are limited to them, so that no later access leaves the caller's
/// buffers.
__device__ inline std::int32_t within(std::int32_t x, std::int32_t low, std::int32_t high) {
  return x < low ? low : x > high ? high : x;
}

/// The totals of the batch, for every thread. `lengths(r)`: queries and keys of request r.
template <class Lengths>
__device__ inline planning::BatchTotals batch_totals(const planning::ScheduleParams& shape, Lengths lengths) {
  __shared__ long long least, most;
  __shared__ unsigned long long units;
  if (threadIdx.x == 0) least = INT64_MAX, most = 0, units = 0;
  __syncthreads();
  long long own_least = INT64_MAX, own_most = 0;
  unsigned long long own_units = 0;
  for (int r = threadIdx.x; r < shape.batch; r += kScheduleThreads) {
    const int2 length = lengths(r);
    if (length.x == 0) continue;
    const long long steps = planning::head_steps(shape, 0, length.x, length.y);
    own_least = steps < own_least ? steps : own_least;
    own_most = steps > own_most ? steps : own_most;
    own_units += static_cast<unsigned long long>(planning::row_blocks(shape, length.x)) * shape.kv_heads;
  }
  for (int i = 16; i > 0; i /= 2) {
    const long long other_least = __shfl_xor_sync(~0u, own_least, i);
    const long long other_most = __shfl_xor_sync(~0u, own_most, i);
    own_least = other_least < own_least ? other_least : own_least;
    own_most = other_most > own_most ? other_most : own_most;
    own_units += __shfl_xor_sync(~0u, own_units, i);
  }
  if (threadIdx.x % 32 == 0 && own_units > 0) {
    atomicMin(&least, own_least);
    atomicMax(&most, own_most);
    atomicAdd(&units, own_units);
  }
  __syncthreads();
  return {static_cast<std::int64_t>(units), least >= most};
}

__device__ inline void build_schedule_block(const ScheduleBuildParams& p) {
  const planning::Schedule& s = p.schedule;
  const planning::ScheduleParams& shape = s.params;
  planning::ScheduleHeader& header = *s.header;
  const int thread = threadIdx.x;
  if (thread == 0) header.magic = 0;

  const auto lengths = [&](int r) {
    const std::int32_t q_len =
        p.cu_q == nullptr ? shape.max_q_len : within(p.cu_q[r + 1] - p.cu_q[r], 0, shape.max_q_len);
    return int2{q_len, within(p.kv_lengths[r], 0, shape.max_kv_len)};
  };
  const planning::BatchTotals totals = batch_totals(shape, lengths);
  if (thread == 0) planning::begin_schedule(s, totals);
  __syncthreads();
  const std::int32_t unit_cost = header.unit_cost;
  std::int64_t steps_before = 0, queries_before = 0, keys = 0;
  for (int base = 0; base < shape.batch; base += kScheduleThreads) {
    const int r = base + thread;
    std::int32_t q_len = 0, kv_len = 0;
    if (r < shape.batch) {
      const int2 length = lengths(r);
      q_len = length.x;
      s.kv_lengths[r] = kv_len = length.y;
    }
    const std::int64_t steps =
        r < shape.batch ? planning::head_steps(shape, unit_cost, q_len, kv_len) * shape.kv_heads : 0;
    std::int64_t total = 0;
    const std::int64_t first_step = steps_before + exclusive_sum(steps, total);
    steps_before += total;
    const std::int64_t first_query = queries_before + exclusive_sum(q_len, total);
    queries_before += total;
    exclusive_sum(kv_len, total);
    keys += total;
    if (r < shape.batch) {
      s.first_step[r] = first_step;
      s.cu_q[r] = static_cast<std::int32_t>(first_query);
    }
  }
  if (thread == 0) {
    s.first_step[shape.batch] = steps_before;
    s.cu_q[shape.batch] = static_cast<std::int32_t>(queries_before);
    header.total_q = static_cast<std::int32_t>(queries_before);
    header.total_kv = keys;
    planning::divide_steps(s);
  }
  __syncthreads();
  for (int w = thread; w <= shape.workers; w += kScheduleThreads) {
    if (w < shape.workers) p.list.counts[w] = 0;
    if (w <= header.active) planning::locate_worker(s, w);
  }
  __syncthreads();
  std::int64_t slots_before = 0;
  for (int base = 0; base <= header.active; base += kScheduleThreads) {
    const int w = base + thread;
    std::int64_t total = 0;
    const std::int64_t slot = exclusive_sum(w <= header.active ? planning::slots_of(s, w) : 0, total);
    if (w <= header.active) s.starts[w].slot = static_cast<std::int32_t>(slots_before + slot);
    slots_before += total;
  }
  __syncthreads();
  for (std::int64_t i = thread; i < slots_before * kArrivalCounters; i += kScheduleThreads) p.arrivals[i] = 0;
  for (int w = thread; w < header.active; w += kScheduleThreads) list_items(s, p.list, w);
  if (thread == 0) {
    header.partials = static_cast<std::int32_t>(slots_before);
    header.plan_id = p.plan_id;
    header.magic = planning::ScheduleHeader::kMagic;
  }
}

}  // namespace halftone::cuda
