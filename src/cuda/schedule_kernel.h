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

__device__ inline void build_schedule_block(const ScheduleBuildParams& p) {
  const planning::Schedule& s = p.schedule;
  const planning::ScheduleParams& shape = s.params;
  planning::ScheduleHeader& header = *s.header;
  const int thread = threadIdx.x;
  if (thread == 0) header.magic = 0;

  std::int64_t steps_before = 0, queries_before = 0, keys = 0, units = 0;
  for (int base = 0; base < shape.batch; base += kScheduleThreads) {
    const int r = base + thread;
    std::int32_t q_len = 0, kv_len = 0;
    if (r < shape.batch) {
      q_len = p.cu_q == nullptr ? shape.max_q_len : within(p.cu_q[r + 1] - p.cu_q[r], 0, shape.max_q_len);
      kv_len = within(p.kv_lengths[r], 0, shape.max_kv_len);
      s.kv_lengths[r] = kv_len;
    }
    const std::int64_t steps =
        r < shape.batch ? planning::head_steps(shape, q_len, kv_len) * shape.kv_heads : 0;
    std::int64_t total = 0;
    const std::int64_t first_step = steps_before + exclusive_sum(steps, total);
    steps_before += total;
    const std::int64_t first_query = queries_before + exclusive_sum(q_len, total);
    queries_before += total;
    exclusive_sum(kv_len, total);
    keys += total;
    exclusive_sum(std::int64_t{planning::row_blocks(shape, q_len)} * shape.kv_heads, total);
    units += total;
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
    header.units = units;
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
