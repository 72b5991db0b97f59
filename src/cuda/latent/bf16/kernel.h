// The kernel of latent attention for many heads over bf16: roles.
#pragma once

#include "cuda/latent/bf16/compute.h"
#include "cuda/latent/bf16/lists.h"
#include "cuda/latent/bf16/load.h"
#include "cuda/latent/bf16/queries.h"

namespace halftone::cuda::bf16 {

template <LatentBf16Config C>
__device__ inline void init_barriers(Shared& s) {
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    barrier_init(shared_address(&barrier), arrivals);
  };
  for (int stage = 0; stage < kStages; ++stage) {
    // Of lists every lane that copies counts, and with the first columns who says which tokens are there.
    init(s.kv_full[stage][0], C.listed ? 128 + ListLoader<C>::kWarps : 1);
    init(s.kv_full[stage][1], C.listed ? 128 : 1);
    for (std::uint64_t& barrier : s.kv_empty[stage]) init(barrier, kSharesTokens<C> ? 8 : 4);
    init(s.p_full[stage], 4);
  }
  init(s.q_full, C.listed ? ListLoader<C>::kWarps : 1);
  init(s.q_empty, kComputeThreads / 32);
  fence_async_shared();
}

/// A thread block of a worker, which is a cluster.
template <LatentBf16Config C>
__device__ inline void bf16_worker(const LatentBf16Params& params, Shared& s) {
  const AttentionParams& p = params.attention;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int worker = static_cast<int>(blockIdx.x) / C.blocks, rank = C.blocks == 1 ? 0 : cluster_rank();
  if (warp == kComputeThreads / 32) {
    if (!C.listed && lane == 0) prefetch_map(params.latent);
    if (!C.listed && lane == 1) prefetch_map(params.rope);
    if (lane == 2 && params.q_boxes) prefetch_map(params.q);
  }
  // Older tokens are brought while the previous kernel ends.
  const bool early = !C.listed && p.cache_settled;
  if (!early && !(C.listed && params.copied)) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  if (warp == 0) s.queue.start(Queue::fetch(p.list, worker, lane), bounds_of(p), lane);
  if (thread_index() < kAppenders) s.appended[thread_index()] = 0;
  if (warp == 1 && lane == 0) init_barriers<C>(s);  // one after the other, while the list is on its way
  if constexpr (kSharesTokens<C>) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  const int role = warp - kComputeThreads / 32;
  if (early && (role < 0 || role >= 2)) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  if (role >= 0) {
    shrink_registers<kLoadRegisters>();
    if (role == 2) check_inputs(p, worker, lane);
    if constexpr (C.listed) {
      ListLoader<C>::run(params, s, rank);
    } else if (role < 2) {
      TokenLoader<C>::run(params, s);
    } else if (role == 2) {
      QueryLoader{params, s, rank, lane}.run();
    }
  } else {
    grow_registers<kComputeRegisters>();
    Compute<C>{{p, s, rank}, params}.run();
  }
  if constexpr (kSharesTokens<C>) cluster_barrier();  // the other block writes here
}

}  // namespace halftone::cuda::bf16
