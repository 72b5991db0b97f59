// The kernel of latent attention for few rows: roles and the main loop.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/latent/few/end.h"
#include "cuda/latent/few/load.h"
#include "cuda/latent/few/scores.h"

namespace halftone::cuda {

/// Extends the queue up to the current item and as far as there is room: no load warp may be at an item whose
/// place is taken. By one thread, of a warp that has no row where registers are few.
template <LatentFewConfig C>
__device__ inline void produce_items(const AttentionParams& p, int worker,
                                     typename LatentFewTraits<C>::Shared& s) {
#pragma unroll 1
  while (s.queue.more) {
    int oldest = s.queue.current;
    for (const volatile int& item : s.reading) oldest = min(oldest, item);
    if (s.queue.count < oldest + ItemQueue::kCapacity - 1) {
      s.queue.produce(p.schedule, bounds_of(p), worker);
    } else if (s.queue.count > s.queue.current) {
      return;
    }
  }
}

/// By lane `block` of a warp that has read the step.
template <LatentFewConfig C>
__device__ inline void release(typename LatentFewTraits<C>::Shared& s, const Step<C>& at, unsigned block) {
  int stage = at.stage[0];
#pragma unroll
  for (unsigned b = 1; b < C.step; ++b) {
    if (block < b) break;
    if (at.stage[b] == stage) return;  // it stands in
    stage = at.stage[b];
  }
  barrier_arrive(shared_address(&s.empty[stage]));
}

/// A compute warp: its team's steps of all items.
template <LatentFewConfig C>
__device__ inline void latent_compute(const AttentionParams& params, int worker,
                                      typename LatentFewTraits<C>::Shared& s) {
  using Traits = LatentFewTraits<C>;
  const AttentionParams& p = params;
#pragma unroll 1
  while (true) {
    if (thread_index() == Traits::kComputeThreads - 1) produce_items<C>(p, worker, s);
    if (!s.queue.has(s.queue.current)) return;
    const DeviceItem& item = s.queue.items[s.queue.current % ItemQueue::kCapacity];
#pragma unroll 1
    for (int row = thread_index() / 32; row < Traits::kRows; row += Traits::kWarps) {
      load_query<C>(p, item, s, row);
    }
    all_compute_warps<C>();
    QueryFragments<C> q;
    q.load(s);
    RowSoftmax<C> softmax;
    softmax.begin(s);
    Output<C> o;
    o.clear();
    const int end = item.work.kv_end;
    if (thread_index() == 0) s.unmasked = seen_by_all(p, item, s.places, end);
    all_compute_warps<C>();  // `exchange` is free
    constexpr int kStep = Traits::kStep, kTurn = kStep * (C.split_rows ? 1 : Traits::kTeams);
    const int first = C.split_rows ? 0 : kStep * static_cast<int>(ComputeThread().team);
    std::uint32_t count = s.blocks_before + first;
#pragma unroll 1
    for (int token = item.work.kv_begin + first * Traits::kTokens; token < end;
         token += kTurn * Traits::kTokens, count += kTurn) {
      Step<C> at;
      at.token = token, at.end = end;
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        at.stage[b] = (count + b) % Traits::kStages;
        if (token + b * Traits::kTokens < end) {
          barrier_wait(shared_address(&s.full[at.stage[b]]), (count + b) / Traits::kStages & 1);
        } else {
          at.stage[b] = at.stage[b - 1];
        }
      }
      partial_scores<C>(p, s, q, at);
      all_team_warps<C>();
      softmax.step(p, s, at, !s.unmasked.has(token, Traits::kStepTokens));
      all_team_warps<C>();
      o.add(s, at);
      __syncwarp();
      if (ComputeThread().lane < kStep) release<C>(s, at, ComputeThread().lane);
    }
    const bool last = !s.queue.more && s.queue.count == s.queue.current + 1;
    ItemEnd<C>{p, s, s.queue.items[s.queue.current % ItemQueue::kCapacity]}(o, softmax, last);
    __syncwarp();
    if (thread_index() == 0) {  // whoever produces items passes the barrier first
      s.blocks_before += blocks_of(s.queue.items[s.queue.current % ItemQueue::kCapacity].work);
      s.queue.current = s.queue.current + 1;
    }
    all_compute_warps<C>();  // what the item had in shared memory is read
  }
}

/// One worker of the schedule: a thread block.
template <LatentFewConfig C>
__device__ inline void latent_few_worker(const AttentionParams& params, int worker,
                                         typename LatentFewTraits<C>::Shared& s) {
  using Traits = LatentFewTraits<C>;
  const AttentionParams& p = params;
  const int warp = thread_index() / 32 - Traits::kWarps, lane = thread_index() % 32;  // of the load warps
  if (warp == 0) {
    if (!p.cache_settled) wait_for_previous_kernel();
    const ItemQueue::Listed listed = ItemQueue::fetch(p.list, worker, lane);
    if (lane < Traits::kStages) {
      barrier_init(shared_address(&s.full[lane]), 32 + 1);
      barrier_init(shared_address(&s.empty[lane]), C.split_rows ? Traits::kWarps : Traits::kTeamWarps);
    }
    if (lane < Traits::kLoadWarps) s.reading[lane] = 0;
    s.queue.start(listed, bounds_of(p), lane);
    if (lane == 0) s.softcap = Softcap(p), s.blocks_before = 0;
    if (params.listed.list.indices != nullptr) wait_for_previous_kernel();  // it may have written the lists
  }
  __syncthreads();
  if (warp >= 0) {
    shrink_registers<Traits::kLoadRegisters>();
    RecordLoader<C>(params, s).run();
    if (warp == 0) {
      wait_for_previous_kernel();
      check_inputs(p, worker, lane);
    }
  } else {
    grow_registers<Traits::kComputeRegisters>();
    wait_for_previous_kernel();
    let_next_kernel_start();
    latent_compute<C>(params, worker, s);
  }
}

}  // namespace halftone::cuda
