// The decode kernel with rows as M: who does what.
#pragma once

#include "cuda/decode/rows/convert.h"
#include "cuda/decode/rows/end.h"
#include "cuda/decode/rows/load.h"
#include "cuda/decode/rows/queries.h"

namespace halftone::cuda {

/// The compute warpgroups: all items of the worker.
template <DecodeConfig C>
__device__ inline void compute_rows(const AttentionParams& p, typename DecodeRowsTraits<C>::Shared& s) {
  using Traits = DecodeRowsTraits<C>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  RowsTeam<C> team{p, s};
  unsigned piece = 0;  // of all of the worker, the first of the item
#pragma unroll 1
  for (int index = 0; s.queue.has(index); ++index) {
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    const typename Traits::Queries& queries = s.queries[index % 2];
    barrier_wait(shared_address(&s.queries_full[index % 2]), index / 2 & 1);
    team.begin(queries);
    team.attend(item, queries, piece);
    team.arrive(s.queries_empty[index % 2]);
    piece += PieceRange<Traits::kPieceTokens>(item.work).count;
    RowsEnd<C>{p, s, item}(team);
    if (thread_index() == 0) s.queue.current = index;  // both warpgroups have come as far as this item
  }
}

/// One worker of the schedule: a thread block.
template <DecodeConfig C>
__device__ inline void decode_rows_worker(const DecodeRowsParams& params,
                                          typename DecodeRowsTraits<C>::Shared& s) {
  using Traits = DecodeRowsTraits<C>;
  const AttentionParams& p = params.attention;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  if (warp == Traits::kLoadWarp) start_rows<C>(p, s, lane);
  __syncthreads();
  if (warp >= Traits::kLoadWarp) {
    shrink_registers<Traits::kOtherRegisters>();
    if (warp == Traits::kLoadWarp) {
      RowsLoader<C>{params, s, lane}.run();
    } else {
      RowsQueries<C>{p, s, warp - Traits::kQueryWarp, lane}.run();
    }
  } else if (warp >= Traits::kConvertWarp) {
    shrink_registers<Traits::kConvertRegisters>();
    ValueConverter<C>{p, s, warp - Traits::kConvertWarp, lane}.run();
  } else {
    grow_registers<Traits::kComputeRegisters>();
    compute_rows<C>(p, s);
  }
}

}  // namespace halftone::cuda
