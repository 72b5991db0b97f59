// The finishing role of the decode kernel: two warps that bring the queries of the next item and end the last
// one; with many rows the compute warps do both.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/decode/append.h"
#include "cuda/decode/queries.h"

namespace halftone::cuda {

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

/// A finish warp: the queries and the new tokens of item i + 1, then the end of item i, unless it is the last
/// one.
template <DecodeConfig C>
__device__ inline void finish_worker(const DecodeParams& p, typename DecodeTraits<C>::Shared& s, int warp) {
  using Traits = DecodeTraits<C>;
  const int lane = thread_index() % 32;
  prefetch_inputs(p, blockIdx.x, warp * 32 + lane);
  hardware_barrier_wait<kFinishReady, 32 * (kFinishWarps + 1)>();
  wait_for_previous_kernel();
  let_next_kernel_start();  // not before: what the next one may read ahead is complete only now
  begin_appends<32 * kFinishWarps>(p, s.appended[warp], warp * 32 + lane);
  if (warp == 0 && !s.queue.has(0)) check_inputs(p, blockIdx.x, lane);
#pragma unroll 1
  for (int index = -1; s.queue.has(index + 1); ++index) {
    const DeviceItem& next = s.queue.items[(index + 1) % ItemQueue::kCapacity];
    QueryLoader<C>::load(p, next, s.queries[index + 1 & 1], warp);
    barrier_arrive(shared_address(&s.queries_full[(index + 1) % 2]));
    if (p.appends) append_item<C>(p.append, s, index + 1, warp);
    __syncwarp();
    if (lane == 0 && next.first_slot >= 0) {
      prefetch_to_l2(p.arrivals + std::int64_t{next.first_slot} * kArrivalCounters);
    }
    if (index < 0) {
      if (warp == 0) check_inputs(p, blockIdx.x, lane);  // idle until item 0 ends
      continue;
    }
    hardware_barrier_wait<kStates, Traits::kStatesThreads>();
    finish_item<Traits, Traits::kPartsOfFinish>(p, s.queue.items[index % ItemQueue::kCapacity],
                                                TeamStates<C>{s}, warp, kFinishWarps, lane);
    barrier_arrive(shared_address(&s.states_empty));
    __syncwarp();
    if (warp == 0 && lane == 0) s.queue.current = index + 1;
  }
}

}  // namespace halftone::cuda
