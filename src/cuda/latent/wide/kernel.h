// The kernel of latent attention for many heads over codes: roles.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/latent/wide/copy.h"
#include "cuda/latent/wide/load_single.h"
#include "cuda/latent/wide/output.h"
#include "cuda/latent/wide/pass.h"
#include "cuda/latent/wide/scores.h"

namespace halftone::cuda::wide {

/// By a thread each of four warps, every fourth barrier: those that one warp initialises follow one another.
template <LatentWideConfig C>
__device__ inline void init_barriers(Shared& s, int warp) {
  int turn = 0;
  const auto init = [&](std::uint64_t& barrier, int arrivals) {
    if (turn++ % 4 == warp) barrier_init(shared_address(&barrier), arrivals);
  };
  for (int stage = 0; stage < kStages; ++stage) {
    init(s.kv_full[stage], kSingle<C> ? 4 : 1);
    for (std::uint64_t& barrier : s.kv_empty[stage]) init(barrier, 8 * C.blocks);
    for (std::uint64_t& barrier : s.p_full[stage]) init(barrier, 4);
    for (std::uint64_t& barrier : s.converted[stage]) init(barrier, kPassers);
    init(s.rope_copied[stage], 1);
  }
  for (std::uint64_t& barrier : s.rope_empty) init(barrier, 8 * C.blocks);
  for (std::uint64_t& barrier : s.raw_full) init(barrier, 32 * kCopiers + 1);
  for (std::uint64_t& barrier : s.raw_empty) init(barrier, kPassers);
  init(s.q_full, 1);
  init(s.state_full, 4);
  init(s.state_empty, 8);
  fence_async_shared();
}

/// A thread block of a worker, which is a cluster.
template <LatentWideConfig C>
__device__ inline void wide_worker(const LatentWideParams& params, Shared& s) {
  static_assert(kLoadRegisters<C> + kScoreRegisters<C> + 2 * kOutputRegisters <= 512);
  const AttentionParams& p = params.attention;
  const auto thread = static_cast<unsigned>(thread_index());
  const unsigned warp = thread / 32 % 4, lane = thread % 32, role = thread / 128;
  const int worker = static_cast<int>(blockIdx.x) / C.blocks, rank = C.blocks == 1 ? 0 : cluster_rank();
  // Else older tokens are brought while the previous kernel ends, which may have written lists.
  if (!p.cache_settled || p.listed.list.indices != nullptr) wait_for_previous_kernel();
  if (thread_index() < 32) s.queue.start(Queue::fetch(p.list, worker, lane), bounds_of(p), lane);
  if (thread_index() < kAppenders) s.appended[thread_index()] = 0;
  if (role == 1 && lane == 0) init_barriers<C>(s, warp);
  if constexpr (C.blocks == 2) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  if (role > 0) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  if (role == 0) {
    shrink_registers<kLoadRegisters<C>>();
    if (warp == 3) check_inputs(p, worker, lane);  // of a pair, has nothing to convert yet
    if constexpr (kSingle<C>) {
      load_single<C>(params, s, warp, lane);
    } else if (warp < kCopiers) {
      Copier<C>{params, s, rank, warp, lane}.run();
    } else {
      Passer<C>{s, rank, warp - kCopiers, lane}.run();
    }
  } else if (role == 1) {
    shrink_registers<kScoreRegisters<C>>();
    Scores<C>{p, s, rank, {params, s, rank}}.run();
  } else {
    grow_registers<kOutputRegisters>();
    Output<C>{{p, s, rank}, params.step}.run();
  }
  if constexpr (C.blocks == 2) cluster_barrier();  // the other block writes here
}

}  // namespace halftone::cuda::wide
