// The kernel of dense latent attention: roles.
#pragma once

#include "cuda/latent/dense/compute.h"
#include "cuda/latent/dense/load.h"

namespace halftone::cuda::dense {

template <LatentDenseConfig C>
__device__ inline void init_barriers(Shared& s) {
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    barrier_init(shared_address(&barrier), arrivals);
  };
  for (int stage = 0; stage < kStages; ++stage) {
    for (std::uint64_t& barrier : s.kv_full[stage]) init(barrier, 1);
    for (std::uint64_t& barrier : s.kv_empty[stage]) init(barrier, 4 * C.blocks);
    init(s.p_full[stage], 4);
  }
  init(s.q_full, 1);
  init(s.q_empty, kComputeThreads / 32);
  fence_async_shared();
}

/// A thread block of a worker, which is a cluster.
template <LatentDenseConfig C>
__device__ inline void dense_worker(const LatentDenseParams& params, Shared& s) {
  const AttentionParams& p = params.attention;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int worker = static_cast<int>(blockIdx.x) / C.blocks, rank = C.blocks == 1 ? 0 : cluster_rank();
  if (warp == kComputeThreads / 32) {
    if (lane == 0) prefetch_map(params.latent);
    if (lane == 1) prefetch_map(params.rope);
    if (lane == 2 && params.q_boxes) prefetch_map(params.q);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp == 0) s.queue.start(Queue::fetch(p.list, worker, lane), bounds_of(p), lane);
  if (warp == 1 && lane == 0) init_barriers<C>(s);  // one after the other, while the list is on its way
  if constexpr (C.blocks == 2) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  if (warp >= kComputeThreads / 32) {
    shrink_registers<kLoadRegisters>();
    const int role = warp - kComputeThreads / 32;
    if (role < 2) {
      TokenLoader<C>::run(params, s);
    } else if (role == 2) {
      check_inputs(p, worker, lane);
      QueryLoader<C>{params, s, rank, lane}.run();
    }
  } else {
    grow_registers<kComputeRegisters>();
    Compute<C>{{p, s, rank}}.run();
  }
  if constexpr (C.blocks == 2) cluster_barrier();  // the other block writes here
}

}  // namespace halftone::cuda::dense
