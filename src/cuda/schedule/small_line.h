// The schedule of a small batch (is_small_batch()): lengths and totals. The phases are those of
// planning::build_schedule, with requests and workers in shared memory and numbers of 32 bits. What they take
// is latency, so there are few barriers, and every thread draws what follows from the totals for itself.
#pragma once

#include "cuda/schedule/kernel.h"

namespace halftone::cuda::small {

inline constexpr std::uint32_t kAll = ~0u;

/// Divides numbers by the same one, again and again.
struct Divisor {
  std::uint32_t value = 1, inverse = kAll;

  Divisor() = default;
  HT_HOST_DEVICE explicit Divisor(std::uint32_t by) : value(by), inverse(kAll / by) {}
  __device__ std::uint32_t quotient(std::uint32_t x) const {
    const std::uint32_t low = __umulhi(x, inverse);  // or one less than it should be
    return x - low * value >= value ? low + 1 : low;
  }
};

/// Divisors that are a pass's.
struct Divisors {
  Divisor group, row_block, kv_heads;
};

struct Params {
  ScheduleBuildParams build;
  Divisors divisors[planning::kMaxPasses];
};

/// Where a worker's share begins, as planning::WorkerStart has it, and the number of its unit.
struct Start {
  std::uint32_t position, unit;
  std::int32_t request, block, offset, steps;
  std::int32_t first, last, slot;
};

/// Sums of a warp's requests: of a tile's, and from `keys` on of all so far.
struct WarpSums {
  std::uint32_t steps, units, queries;
  std::uint32_t keys, least, most;
};

// A thread for each worker, and one for the end; numbers of listed items in 16 bits.
static_assert(kSmallWorkers < kScheduleThreads && kSmallWorkers * kListedItems <= UINT16_MAX + 1);

struct Shared {
  std::uint32_t position[kSmallBatch + 1];  // before each request, at first steps alone
  std::uint32_t units[kSmallBatch + 1];     // before each request
  std::int32_t cu_q[kSmallBatch + 1];
  std::int32_t keys[kSmallBatch];
  Start starts[kSmallWorkers + 1];
  WarpSums sums[2][32];                                // of alternate tiles
  std::uint32_t slots[32], listed[32];                 // of a warp's workers
  std::uint16_t places[kSmallWorkers * kListedItems];  // of listed items, by worker
};

/// Totals of the batch, and how its line is shared.
struct Line {
  std::uint32_t steps = 0, units = 0, queries = 0, keys = 0;
  bool alike = false;
  std::uint32_t unit_cost = 0, active = 0, total = 0;  // workers, positions
  Divisor by_active, by_total;

  __device__ std::uint32_t share_begin(std::uint32_t worker) const {
    return worker >= active ? total : by_active.quotient(worker * total);
  }
  __device__ std::int32_t worker_at(std::uint32_t at) const {
    return static_cast<std::int32_t>(by_total.quotient((at + 1) * active - 1));
  }
};

/// What the phases of one pass have in common. `simple`: neither lists nor a mask, which is known when this
/// is compiled.
struct Pass {
  const planning::Schedule& s;
  const planning::ScheduleParams& shape;
  const Divisors& divisors;
  Shared& shared;
  bool simple;

  __device__ bool has_mask() const { return !simple && planning::has_mask(shape); }
};

/// Rows and keys of a row block.
struct Unit {
  std::int32_t row_begin, row_end;
  planning::KvRange range;
  std::int32_t first_step, steps;
};

__device__ inline Unit unit_of(const Pass& p, std::int32_t queries, std::int32_t keys, std::int32_t block) {
  Unit u;
  const std::int32_t rows = queries * p.shape.group;
  u.row_begin = block * p.shape.row_block;
  u.row_end = planning::min_of(rows, u.row_begin + p.shape.row_block);
  u.range = {0, keys};
  if (p.has_mask()) {
    const auto query_of = [&](std::int32_t row) {
      return static_cast<std::int32_t>(p.divisors.group.quotient(static_cast<std::uint32_t>(row)));
    };
    u.range = planning::visible_range(p.shape, queries, keys, query_of(u.row_begin), query_of(u.row_end - 1));
  }
  u.first_step = u.range.begin >> p.shape.step_log2;
  u.steps = u.range.end == 0 ? 1 : ((u.range.end - 1) >> p.shape.step_log2) - u.first_step + 1;
  return u;
}

__device__ inline std::int32_t row_blocks(const Pass& p, std::int32_t queries) {
  const std::int32_t rows = queries * p.shape.group;
  return static_cast<std::int32_t>(
      p.divisors.row_block.quotient(static_cast<std::uint32_t>(rows + p.shape.row_block - 1)));
}

__device__ inline std::uint32_t head_steps(const Pass& p, std::int32_t queries, std::int32_t keys,
                                           std::int32_t blocks) {
  if (!p.has_mask()) return blocks * unit_of(p, queries, keys, 0).steps;
  std::uint32_t steps = 0;
#pragma unroll 1
  for (std::int32_t block = 0; block < blocks; ++block) steps += unit_of(p, queries, keys, block).steps;
  return steps;
}

/// Inclusive prefix sums over a warp.
template <int N>
__device__ inline void warp_sums(std::uint32_t (&sums)[N], int lane) {
#pragma unroll 1
  for (int i = 1; i < 32; i *= 2) {
    for (int n = 0; n < N; ++n) {
      const std::uint32_t below = __shfl_up_sync(kAll, sums[n], i);
      if (lane >= i) sums[n] += below;
    }
  }
}

/// Sets what is before a warp, of which lane i knows warp i's, and returns the total.
__device__ inline std::uint32_t sum_warps(std::uint32_t of_lane, int lane, int warp, std::uint32_t& before) {
  before = __reduce_add_sync(kAll, lane < warp ? of_lane : 0);
  return __reduce_add_sync(kAll, of_lane);
}

/// Lengths, and what is before each request, into shared memory. Returns the totals, to every thread.
__device__ inline Line place_requests(const ScheduleBuildParams& build, const Pass& p) {
  const planning::ScheduleParams& shape = p.shape;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, threads = blockDim.x;
  const bool lists = !p.simple && build.top_k > 0;
  const int listed = !lists || build.cu_q == nullptr ? shape.batch : build.cu_q[build.requests];
  Line line;
  std::uint32_t keys = 0, least = kAll, most = 0;
  int turn = 0;  // one barrier for each tile: the next one's sums go elsewhere
#pragma unroll 1
  for (int base = 0; base < shape.batch; base += threads, turn ^= 1) {
    const int r = base + thread;
    WarpSums* const tile = p.shared.sums[turn];
    std::uint32_t own[3] = {}, sums[3];  // steps, units and queries
    if (warp * 32 < shape.batch) {
      if (r < shape.batch) {
        const int2 length = lists ? query_lengths(build, p.s, listed, r) : request_lengths(build, shape, r);
        const std::int32_t queries = planning::served(shape, length.x), blocks = row_blocks(p, queries);
        const std::uint32_t steps = head_steps(p, queries, length.y, blocks);
        if (queries > 0) {
          least = min(least, steps);
          most = max(most, steps);
        }
        own[0] = steps * shape.kv_heads, own[1] = blocks * shape.kv_heads, own[2] = length.x;
        keys += length.y;
        p.s.kv_lengths[r] = p.shared.keys[r] = length.y;
      }
      for (int n = 0; n < 3; ++n) sums[n] = own[n];
      warp_sums(sums, lane);
      const std::uint32_t warp_keys = __reduce_add_sync(kAll, keys),
                          warp_least = __reduce_min_sync(kAll, least),
                          warp_most = __reduce_max_sync(kAll, most);
      if (lane == 31) tile[warp] = {sums[0], sums[1], sums[2], warp_keys, warp_least, warp_most};
    }
    __syncthreads();
    WarpSums of_lane{0, 0, 0, 0, kAll, 0};
    if (lane < threads / 32 && lane * 32 < shape.batch) of_lane = tile[lane];
    std::uint32_t before[3];
    const std::uint32_t steps = sum_warps(of_lane.steps, lane, warp, before[0]),
                        units = sum_warps(of_lane.units, lane, warp, before[1]),
                        queries = sum_warps(of_lane.queries, lane, warp, before[2]);
    if (r < shape.batch) {
      p.shared.position[r] = line.steps + before[0] + sums[0] - own[0];
      p.shared.units[r] = line.units + before[1] + sums[1] - own[1];
      p.s.cu_q[r] = p.shared.cu_q[r] = static_cast<std::int32_t>(line.queries + before[2] + sums[2] - own[2]);
    }
    line.steps += steps, line.units += units, line.queries += queries;
    line.keys = __reduce_add_sync(kAll, of_lane.keys);
    line.alike = __reduce_min_sync(kAll, of_lane.least) >= __reduce_max_sync(kAll, of_lane.most);
  }
  return line;
}

/// planning::workers_for(), a warp together: its lanes try one number each, all that may stay idle.
__device__ inline std::uint32_t workers_for(const planning::ScheduleParams& p, const Line& batch) {
  static_assert(kSmallWorkers / 16 < 32);
  const std::uint32_t workers = p.workers, cost = p.unit_cost;
  const bool counts = batch.alike && cost > 0, few = batch.units <= workers;
  if (batch.units == 0 || (!few && !counts)) return workers;
  const std::uint32_t mine = max(1u, workers - threadIdx.x % 32);
  const std::uint32_t rest = (few ? workers : batch.units) % (few ? batch.units : mine);
  std::uint32_t even = workers - rest;
  if (few && rest * 16 <= workers) return even;
  if (few && !(p.even_parts && counts)) return workers;
  if (!few) {
    const bool divides = rest == 0 && mine <= workers && (workers - mine) * 16 <= workers;
    const std::uint32_t divisors = __ballot_sync(kAll, divides);
    if (divisors == 0) return workers;
    even = workers - (__ffs(static_cast<int>(divisors)) - 1);
  }
  const bool pays = (batch.steps + batch.units * cost) / even * (workers - even) < (2 * cost + 1) * workers;
  return pays ? even : workers;
}

/// planning::begin_schedule() and divide_steps().
__device__ inline void share_line(const planning::ScheduleParams& p, Line& line) {
  line.active = workers_for(p, line);
  const bool equal_parts =
      line.alike && line.units > 0 && max(line.active, line.units) % min(line.active, line.units) == 0;
  line.unit_cost = equal_parts ? 0 : p.unit_cost;
  line.total = line.steps + line.units * line.unit_cost;
  line.active = min(line.active, line.total);
  line.by_active = Divisor(max(1u, line.active));
  line.by_total = Divisor(max(1u, line.total));
}

__device__ inline void write_header(planning::ScheduleHeader& h, const Line& line) {
  h.total_steps = line.total;
  const std::uint32_t share = line.by_active.quotient(line.total);
  h.share = share;
  h.extra = static_cast<std::int32_t>(line.total - share * line.active);
  h.active = static_cast<std::int32_t>(line.active);
  h.unit_cost = static_cast<std::int32_t>(line.unit_cost);
  h.total_q = static_cast<std::int32_t>(line.queries);
  h.total_kv = line.keys;
  h.units = line.units;
}

/// first_step, with what units cost.
__device__ inline void place_positions(const Pass& p, const Line& line) {
#pragma unroll 1
  for (int r = threadIdx.x; r <= p.shape.batch; r += blockDim.x) {
    std::uint32_t position = line.total;
    if (r < p.shape.batch) {
      position = p.shared.position[r] + p.shared.units[r] * line.unit_cost;
    } else {
      p.s.cu_q[r] = p.shared.cu_q[r] = static_cast<std::int32_t>(line.queries);
      p.shared.units[r] = line.units;
    }
    p.s.first_step[r] = p.shared.position[r] = position;
  }
}

}  // namespace halftone::cuda::small
