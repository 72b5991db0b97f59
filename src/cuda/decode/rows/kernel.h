// The decode kernel with rows as M: who does what.
#pragma once

#include "cuda/decode/finish.h"
#include "cuda/decode/rows/append.h"
#include "cuda/decode/rows/convert.h"
#include "cuda/decode/rows/end.h"
#include "cuda/decode/rows/load.h"

namespace halftone::cuda {

/// The compute warpgroups: all items of the worker.
template <DecodeConfig C>
__device__ inline void compute_rows(const AttentionParams& p, typename DecodeRowsTraits<C>::Shared& s) {
  using Traits = DecodeRowsTraits<C>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  RowsTeam<C> team{p, s, static_cast<unsigned>(thread_index())};
  unsigned piece = 0;  // of all of the worker, the first of the item
#pragma unroll 1
  for (int index = 0; s.queue.has(index); ++index) {
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    typename Traits::Queries& queries = s.queries[index % 2];
    if (index == 0) {
      RowsQueries<C>{p, thread_index() / 32, 4 * Traits::kTeams, thread_index() % 32}.bring(
          item, s.queries[0], 0, Traits::kRows);
      fence_async_shared();
      hardware_barrier_wait<kCompute, Traits::kComputeThreads>();
    } else {
      // Of a buffer that other warps have filled for item 1, 2, 3 ...
      barrier_wait(shared_address(&s.queries_full[index % 2]), (index - 1) / 2 & 1);
    }
    team.begin(queries);
    team.attend(item, queries, piece);
    piece += PieceRange<Traits::kPieceTokens>(item.work).count;
    RowsEnd<C>{p, s, item, queries, thread_index()}(team);
    team.arrive(s.queries_empty[index % 2]);
    if (thread_index() == 0) s.queue.current = index;  // both warpgroups have come as far as this item
  }
}

/// One worker of the schedule: a thread block.
template <DecodeConfig C>
__device__ inline void decode_rows_worker(const DecodeParams& p, typename DecodeRowsTraits<C>::Shared& s) {
  using Traits = DecodeRowsTraits<C>;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  if (warp == Traits::kLoadWarp) start_rows<C>(p, s, lane);
  if (warp < Traits::kValueWarp) init_rows<C>(s, warp, lane);
  if (warp >= Traits::kKeyWarp) prefetch_inputs(p, blockIdx.x, thread_index() - 32 * Traits::kKeyWarp);
  __syncthreads();
  if (warp >= Traits::kLoadWarp) {
    shrink_registers<Traits::kOtherRegisters>();
    if (warp == Traits::kLoadWarp) {
      RowsLoader<C>{p, s, lane}.run();
    } else if (warp == Traits::kQueryWarp) {
      prepare_items<C>(p, s, lane);
    } else {
      RowsConverter<C>{s, warp - Traits::kKeyWarp, lane}.run_keys();
    }
  } else if (warp >= Traits::kValueWarp) {
    shrink_registers<Traits::kConvertRegisters>();
    RowsConverter<C>{s, warp - Traits::kValueWarp, lane}.run_values(p);
  } else {
    grow_registers<Traits::kComputeRegisters>();
    compute_rows<C>(p, s);
  }
}

}  // namespace halftone::cuda
