// Builds schedules of any size on the device: one block for each pass of a plan runs the phases of
// planning::build_schedule in parallel. The blocks do not meet: each writes the lengths that the passes
// share, and reads what it has written. Small batches have phases of their own (small_line.h).
#pragma once

#include "cuda/schedule/params.h"
#include "plan/listed.h"

namespace halftone::cuda {

inline constexpr int kScheduleThreads = 1024;

/// Exclusive prefix sums of N values per thread, in place; `totals` are the block's.
template <int N>
__device__ inline void exclusive_sums(std::int64_t (&values)[N], std::int64_t (&totals)[N]) {
  constexpr int kWarps = kScheduleThreads / 32;
  __shared__ std::int64_t warp_sums[kWarps][N];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan = [lane](std::int64_t sum) {
    for (int i = 1; i < 32; i *= 2) {
      const std::int64_t below = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += below;
    }
    return sum;
  };
  std::int64_t sums[N];
  for (int n = 0; n < N; ++n) sums[n] = scan(values[n]);
  __syncthreads();  // the previous call's readers are done
  for (int n = 0; n < N; ++n) {
    if (lane == 31) warp_sums[warp][n] = sums[n];
  }
  __syncthreads();
  if (warp < N) warp_sums[lane][warp] = scan(warp_sums[lane][warp]);
  __syncthreads();
  for (int n = 0; n < N; ++n) {
    totals[n] = warp_sums[kWarps - 1][n];
    values[n] = sums[n] - values[n] + (warp == 0 ? 0 : warp_sums[warp - 1][n]);
  }
}

/// Lengths outside the plan's bounds are limited to them, so that no later access leaves the caller's
/// buffers.
__device__ inline std::int32_t within(std::int64_t x, std::int32_t low, std::int32_t high) {
  return x < low ? low : x > high ? high : static_cast<std::int32_t>(x);
}

/// Queries and keys of request r. New tokens for which there is no room are no keys, and neither are then the
/// older ones: run() finds fewer keys than queries.
__device__ inline int2 request_lengths(const ScheduleBuildParams& p, const planning::ScheduleParams& shape,
                                       int r) {
  const std::int32_t q_len = within(
      p.cu_q == nullptr ? shape.max_q_len : std::int64_t{p.cu_q[r + 1]} - p.cu_q[r], 0, shape.max_q_len);
  if (p.appends && q_len > 0) {
    const std::int64_t grown = std::int64_t{p.kv_lengths[r]} + q_len;
    return {q_len, p.kv_lengths[r] < 0 || grown > shape.max_kv_len ? 0 : static_cast<std::int32_t>(grown)};
  }
  const std::int64_t keys = p.cu_kv == nullptr ? p.kv_lengths[r] : std::int64_t{p.cu_kv[r + 1]} - p.cu_kv[r];
  return {q_len, within(keys, 0, shape.max_kv_len)};
}

/// Places of a list of query `query`; none behind the end of its counts.
__device__ inline std::int32_t listed_count(const std::int32_t* counts, std::int32_t counted,
                                            std::int32_t top_k, std::int32_t query) {
  if (counts == nullptr) return top_k;
  return query < counted ? within(counts[query], 0, top_k) : 0;
}

/// Queries and keys of schedule request r, a query of its own with lists. `queries`: all of the batch.
__device__ inline int2 query_lengths(const ScheduleBuildParams& p, const planning::Schedule& s, int queries,
                                     int r) {
  const bool live = r < queries;
  const std::int32_t first = live ? listed_count(p.counts, p.counted, p.top_k, r) : 0;
  const std::int32_t second =
      live && p.extra_top_k > 0 ? listed_count(p.extra_counts, p.extra_counted, p.extra_top_k, r) : 0;
  if (s.first_list != nullptr) s.first_list[r] = first;
  return {live ? 1 : 0, planning::listed_length(first, second)};
}

/// Whether the least is at least the most: over the block, for every thread.
__device__ inline bool all_alike(long long own_least, long long own_most) {
  __shared__ long long least, most;
  if (threadIdx.x == 0) least = INT64_MAX, most = 0;
  __syncthreads();
  for (int i = 16; i > 0; i /= 2) {
    const long long other_least = __shfl_xor_sync(~0u, own_least, i);
    const long long other_most = __shfl_xor_sync(~0u, own_most, i);
    own_least = other_least < own_least ? other_least : own_least;
    own_most = other_most > own_most ? other_most : own_most;
  }
  if (threadIdx.x % 32 == 0 && own_most > 0) {
    atomicMin(&least, own_least);
    atomicMax(&most, own_most);
  }
  __syncthreads();
  return least >= most;
}

/// Writes what a schedule holds per request, first_step without what units cost, or of a queue the units.
/// Returns the totals.
__device__ inline planning::BatchTotals place_requests(const ScheduleBuildParams& p,
                                                       const planning::Schedule& s) {
  const planning::ScheduleParams& shape = s.params;
  std::int64_t before[5] = {};  // steps, units, queries, keys and staged rows
  long long least = INT64_MAX, most = 0;
  const int listed = p.top_k == 0 || p.cu_q == nullptr ? shape.batch : p.cu_q[p.requests];
  const bool plain = s.staged == nullptr && p.cu_kv != nullptr;
  if (plain) {
    if (threadIdx.x == 0) s.cu_kv[shape.batch] = 0;
    __syncthreads();
  }
  for (int base = 0; base < shape.batch; base += kScheduleThreads) {
    const int r = base + static_cast<int>(threadIdx.x);
    std::int64_t sums[5] = {}, totals[5];
    std::int32_t queries = 0;
    if (r < shape.batch) {
      const int2 length = p.top_k > 0 ? query_lengths(p, s, listed, r) : request_lengths(p, shape, r);
      queries = planning::served(shape, length.x);
      const long long steps = planning::head_steps(shape, queries, length.y);
      if (queries > 0) {
        least = steps < least ? steps : least;
        most = steps > most ? steps : most;
      }
      sums[0] = steps * shape.kv_heads;
      sums[1] = std::int64_t{planning::row_blocks(shape, queries)} * shape.kv_heads;
      sums[2] = length.x;
      sums[3] = s.kv_lengths[r] = length.y;
      sums[4] = planning::staged_rows(shape, queries, length.y);
    }
    exclusive_sums(sums, totals);
    if (r < shape.batch) {
      s.first_step[r] = shape.queue_tokens > 0 ? before[1] + sums[1] : before[0] + sums[0];
      if (s.staged != nullptr) {
        planning::stage_request(s, r, queries, before[4] + sums[4]);
      } else if (plain) {
        s.cu_kv[r] = p.cu_kv[r];
        atomicMax(&s.cu_kv[shape.batch], p.cu_kv[r + 1]);  // whatever their order: no key lies behind
      }
      s.cu_q[r] = static_cast<std::int32_t>(before[2] + sums[2]);
    }
    for (int n = 0; n < 5; ++n) before[n] += totals[n];
  }
  if (threadIdx.x == 0) {
    s.first_step[shape.batch] = shape.queue_tokens > 0 ? before[1] : before[0];
    s.cu_q[shape.batch] = static_cast<std::int32_t>(before[2]);
    s.header->total_q = static_cast<std::int32_t>(before[2] < INT32_MAX ? before[2] : INT32_MAX);
    s.header->total_kv = before[3];
  }
  return {before[0], before[1], all_alike(least, most)};
}

/// first_step moves by what the units before it cost.
__device__ inline void add_unit_costs(const planning::Schedule& s) {
  const planning::ScheduleParams& shape = s.params;
  std::int64_t before = 0;
  for (int base = 0; base <= shape.batch; base += kScheduleThreads) {
    const int r = base + static_cast<int>(threadIdx.x);
    std::int64_t units[1] = {}, total[1];
    if (r < shape.batch)
      units[0] = std::int64_t{planning::row_blocks(shape, planning::served_queries(s, r))} * shape.kv_heads;
    exclusive_sums(units, total);
    if (r <= shape.batch) s.first_step[r] += (before + units[0]) * s.header->unit_cost;
    before += total[0];
  }
}

__device__ inline void zero_arrivals(const PassBuildParams& pass, std::uint32_t slots) {
  static_assert(kArrivalCounters % 4 == 0);
  auto* const counters = reinterpret_cast<int4*>(pass.arrivals);
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < slots * (kArrivalCounters / 4); i += blockDim.x) counters[i] = {};
}

/// The last thing that is written.
__device__ inline void seal(const ScheduleBuildParams& p, planning::ScheduleHeader& header) {
  header.plan_id = p.plan_id;
  header.magic = planning::ScheduleHeader::kMagic;
}

__device__ inline void build_queue_block(const ScheduleBuildParams& p, const PassBuildParams& pass) {
  const planning::Schedule& s = pass.schedule;
  if (threadIdx.x == 0) s.header->magic = 0;
  const planning::BatchTotals totals = place_requests(p, s);
  if (threadIdx.x == 0) {
    planning::begin_queue(s, totals.units, totals.steps);
    pass.taken[0] = pass.taken[1] = 0;
  }
  __syncthreads();
  zero_arrivals(pass, static_cast<std::uint32_t>(s.header->partials));
  const std::int64_t items = planning::queue_items(*s.header);
  for (int w = threadIdx.x; w < s.params.workers; w += kScheduleThreads) {
    pass.list.counts[w] = w < items ? 1 : 0;
    if (w < items) find_queue_item(s, w, pass.list.items[std::int64_t{w} * kListedItems]);
  }
  if (threadIdx.x == 0) seal(p, *s.header);
}

__device__ inline void build_schedule_block(const ScheduleBuildParams& p, const PassBuildParams& pass) {
  const planning::Schedule& s = pass.schedule;
  const planning::ScheduleParams& shape = s.params;
  planning::ScheduleHeader& header = *s.header;
  const int thread = threadIdx.x;
  if (thread == 0) header.magic = 0;

  const planning::BatchTotals totals = place_requests(p, s);
  if (thread == 0) planning::begin_schedule(s, totals);
  __syncthreads();
  if (header.unit_cost > 0) {
    add_unit_costs(s);
    __syncthreads();
  }
  if (thread == 0) planning::divide_steps(s);
  __syncthreads();
  for (int w = thread; w <= shape.workers; w += kScheduleThreads) {
    if (w < shape.workers) pass.list.counts[w] = 0;
    if (w <= header.active) planning::locate_worker(s, w);
  }
  __syncthreads();
  std::int64_t slots_before = 0;
  for (int base = 0; base <= header.active; base += kScheduleThreads) {
    const int w = base + thread;
    std::int64_t slot[1] = {w <= header.active ? planning::slots_of(s, w) : 0}, total[1];
    exclusive_sums(slot, total);
    if (w <= header.active) s.starts[w].slot = static_cast<std::int32_t>(slots_before + slot[0]);
    slots_before += total[0];
  }
  __syncthreads();
  zero_arrivals(pass, static_cast<std::uint32_t>(slots_before));
  for (int w = thread; w < header.active; w += kScheduleThreads) list_items(s, pass.list, w);
  if (thread == 0) {
    header.partials = static_cast<std::int32_t>(slots_before);
    seal(p, header);
  }
}

}  // namespace halftone::cuda
