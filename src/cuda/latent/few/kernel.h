// The kernel of latent attention for few rows: roles and the main loop.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/latent/few/end.h"
#include "cuda/latent/few/load.h"
#include "cuda/latent/few/scores.h"

namespace halftone::cuda {

/// Extends the queue up to item `current` and as far as there is room: no warp may be at an item whose place
/// is taken. By one thread of the scores.
template <LatentFewConfig C>
__device__ inline void produce_items(const AttentionParams& p, int worker, int current,
                                     typename LatentFewTraits<C>::Shared& s) {
#pragma unroll 1
  while (s.queue.more) {
    int oldest = s.queue.current;
    for (const volatile int& item : s.reading) oldest = min(oldest, item);
    if (s.queue.count < oldest + ItemQueue::kCapacity - 1) {
      s.queue.produce(p.schedule, bounds_of(p), worker);
    } else if (s.queue.count > current) {
      return;
    }
  }
}

/// The warp's rows of Q, as many at a time as fit into registers.
template <LatentFewConfig C>
__device__ inline void load_queries(const AttentionParams& p, const DeviceItem& item,
                                    typename LatentFewTraits<C>::Shared& s, int side, int warp) {
  constexpr int kWarps = LatentFewTraits<C>::kScoreWarps, kOwn = LatentFewTraits<C>::kRows / kWarps;
  constexpr int kAtOnce = kOwn < 4 || LatentFewTraits<C>::kScoreRegisters < 144 ? std::min(kOwn, 2) : 4;
#pragma unroll 1
  for (int first = 0; first < kOwn; first += kAtOnce) {
    QueryRow<C> rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) rows[i].load(p, item, (first + i) * kWarps + warp);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) store_query<C>(p, rows[i], s, side, (first + i) * kWarps + warp);
  }
}

/// Q of the first item, before the queue is there, by the first `warps` warps.
template <LatentFewConfig C>
__device__ inline void load_first_queries(const AttentionParams& p, int worker, int warps,
                                          typename LatentFewTraits<C>::Shared& s) {
  using Traits = LatentFewTraits<C>;
  if (p.list.counts[worker] == 0) return;
  DeviceItem item = p.list.items[std::int64_t{worker} * kListedItems];
  bounds_of(p).apply(item);
  constexpr int kFewest = Traits::kRows < 32 ? Traits::kScoreWarps : Traits::kFirstLoad / 32;
  constexpr int kOwn = (Traits::kRows + kFewest - 1) / kFewest;
  const int first = thread_index() / 32;
  QueryRow<C> rows[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (first + i * warps < Traits::kRows) rows[i].load(p, item, first + i * warps);
  }
#pragma unroll 1
  for (int row = first; row < Traits::kRows; row += warps) {
    store_query<C>(p, rows[0], s, 0, row);
#pragma unroll
    for (int i = 1; i < kOwn; ++i) rows[i - 1] = rows[i];
  }
}

/// A warp of the scores: its tiles of all items.
template <LatentFewConfig C>
__device__ inline void latent_scores(const AttentionParams& params, int worker,
                                     typename LatentFewTraits<C>::Shared& s) {
  using Traits = LatentFewTraits<C>;
  const AttentionParams& p = params;
  const int warp = thread_index() / 32;
  std::uint32_t before = 0;  // blocks of earlier items
  int index = 0;
  // The item at hand, where registers are scarcest looked up anew.
  const auto at_hand = [&] { return Traits::kLooksUpItem ? int{s.score_item[warp]} : index; };
#pragma unroll 1
  for (;; index = at_hand() + 1) {
    if (thread_index() == Traits::kFirstOutput - 1) produce_items<C>(p, worker, index, s);
    __syncwarp();
    if (!s.queue.has(index)) return;
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    if (index >= 2) barrier_wait(shared_address(&s.taken[index % 2]), index / 2 + 1 & 1);
    if (index > 0) {
      all_score_warps<C>();  // Q of the item before has been read
      load_queries<C>(p, item, s, index % 2, warp);
      all_score_warps<C>();
    }
    if constexpr (Traits::kLooksUpItem) {
      s.score_item[warp] = index;
      __syncwarp();
    }
    // What the loop reads anew each time it does not keep in registers. Every warp writes the same.
    s.unmasked[index % 2] = seen_by_all(p, item, s.places[index % 2], item.work.kv_end);
    TileSoftmax<C> softmax;
    softmax.begin();
#pragma unroll 1
    for (int block = warp / Traits::kBlockWarps; block < blocks_of(item.work); block += Traits::kTurn) {
      const std::uint32_t count = before + block;
      const int side = at_hand() % 2;
      const int first = item.work.kv_begin + block * Traits::kTokens;
      Tile<C> tile;
      tile.stage = count % Traits::kStages, tile.slot = count % Traits::kSlots;
      tile.half = warp % Traits::kBlockWarps;
      const std::uint32_t round = count / Traits::kStages;
      if (Traits::kStages % Traits::kTurn != 0 && round > 0) {  // the phase before the stage's
        barrier_wait(shared_address(&s.empty[tile.stage]), round + 1 & 1);
      }
      barrier_wait(shared_address(&s.full[tile.stage]), round & 1);
      typename Tile<C>::Sums x;
      tile.multiply(s, p.q_type != DType::kBFloat16, x);
      softmax.to_logits(p, s, side, x);
      const bool all_rows = s.unmasked[side].has(first, Traits::kTokens);
      const bool all_live = *reinterpret_cast<const std::uint32_t*>(s.live[tile.stage]) == ~0u;
      if (!all_rows || !all_live) softmax.mask(p, s, tile, side, first, item.work.kv_end, all_rows, x);
      softmax.weigh(x);
      if (count >= Traits::kSlots) {
        const std::uint32_t last = count - Traits::kSlots;  // of the slot
        barrier_wait(shared_address(&s.empty[last % Traits::kStages]), last / Traits::kStages & 1);
      }
      softmax.store(s, tile, x);
      __syncwarp();
      if (thread_index() % 32 == 0) barrier_arrive(shared_address(&s.weighed[tile.slot]));
    }
    const int side = at_hand() % 2;
    softmax.leave(s, side);
    __syncwarp();
    if (thread_index() % 32 == 0) barrier_arrive(shared_address(&s.stated[side]));
    before += blocks_of(item.work);
  }
}

/// A warp of the output: all blocks of all items.
template <LatentFewConfig C>
__device__ inline void latent_output(const LatentFewParams& params, typename LatentFewTraits<C>::Shared& s) {
  using Traits = LatentFewTraits<C>;
  static_assert(Traits::kOutputWarps == kAppenders);
  settle_lengths<32 * Traits::kOutputWarps>(params, params.schedule, thread_index() - Traits::kFirstOutput);
  std::uint32_t count = 0;
#pragma unroll 1
  for (int index = 0; s.queue.has(index); ++index) {
    if constexpr (C.appends) {
      if (params.appends) {
        append_items<C.codes, false>(params.append, s.queue, s.appended, index,
                                     (thread_index() - Traits::kFirstOutput) / 32, 1,
                                     [](const DeviceItem&, int) { return true; });
      }
    }
    const int side = index % 2;
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    Output<C> o;
    o.clear();
#pragma unroll 1
    for (const std::uint32_t end = count + blocks_of(item.work); count < end; ++count) {
      const int stage = count % Traits::kStages, slot = count % Traits::kSlots;
      barrier_wait(shared_address(&s.weighed[slot]), count / Traits::kSlots & 1);
      o.add(s, stage, slot);
      __syncwarp();
      if (thread_index() % 32 == 0) barrier_arrive(shared_address(&s.empty[stage]));
    }
    barrier_wait(shared_address(&s.stated[side]), index / 2 & 1);
    const bool last = !s.queue.more && s.queue.count == index + 1;
    ItemEnd<C>{params, s, item, side}(o, last);
    all_output_warps<C>();  // what the item had in shared memory is read
    if (thread_index() == Traits::kFirstOutput) {
      s.queue.current = index + 1;
      barrier_arrive(shared_address(&s.taken[side]));
    }
    __syncwarp();
  }
}

/// One worker of the schedule: a thread block.
template <LatentFewConfig C>
__device__ inline void latent_few_worker(const LatentFewParams& params, int worker,
                                         typename LatentFewTraits<C>::Shared& s) {
  using Traits = LatentFewTraits<C>;
  constexpr int kOutputReadyThreads = 32 * (Traits::kOutputWarps + Traits::kLoadWarps);
  const AttentionParams& p = params;
  const int warp = thread_index() / 32 - Traits::kFirstLoad / 32, lane = thread_index() % 32;  // that load
  if (warp < 0) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    // Of 8 rows none is left for the warps of the output; of 16 they leave theirs to the warps of the scores
    // where they have tokens to write.
    const bool few = Traits::kRows == 8 || (Traits::kRows == 16 && params.appends);
    const bool scores = thread_index() < Traits::kFirstOutput;
    if (scores || !few) {
      load_first_queries<C>(p, worker, few ? Traits::kScoreWarps : Traits::kFirstLoad / 32, s);
    }
    if (scores) {
      hardware_barrier_wait<kReadyBarrier, Traits::kThreads>();
      grow_registers<Traits::kScoreRegisters>();
      latent_scores<C>(params, worker, s);
    } else {
      hardware_barrier_arrive<kReadyBarrier, Traits::kThreads>();
      hardware_barrier_wait<kOutputReadyBarrier, kOutputReadyThreads>();
      if constexpr (Traits::kOutputRegisters < Traits::kFirstRegisters) {
        shrink_registers<Traits::kOutputRegisters>();
      } else if constexpr (Traits::kOutputRegisters > Traits::kFirstRegisters) {
        grow_registers<Traits::kOutputRegisters>();
      }
      latent_output<C>(params, s);
    }
    return;
  }
  // The previous kernel may have written the lists.
  if (!p.cache_settled || p.listed.list.indices != nullptr) wait_for_previous_kernel();
  RecordLoader<C> loader(params, s);
  ItemQueue::Listed listed{};
  if (warp == 0) listed = ItemQueue::fetch(p.list, worker, lane);
  const auto ahead = loader.look_ahead(worker);
  if (warp == 0) {
    s.queue.start(listed, bounds_of(p), lane);
  } else if (warp == 1) {  // barriers that one warp initialises follow one another
    if (lane < Traits::kStages) {
      barrier_init(shared_address(&s.full[lane]), Traits::kLoadWarps * (Traits::kWhole ? 1 : 32 + 1));
    }
    if (lane < Traits::kLoadWarps) s.reading[lane] = 0;
    if (lane < kAppenders) s.appended[lane] = 0;
  } else if (warp == 2) {
    if (lane < Traits::kStages) barrier_init(shared_address(&s.empty[lane]), Traits::kOutputWarps);
    if (lane == 0) s.softcap = Softcap(p);
  } else if (warp == 3) {
    if (lane < Traits::kSlots) barrier_init(shared_address(&s.weighed[lane]), Traits::kBlockWarps);
    if (lane < 2) {
      barrier_init(shared_address(&s.stated[lane]), Traits::kScoreWarps);
      barrier_init(shared_address(&s.taken[lane]), 1);
    }
  }
  if constexpr (Traits::kWhole) fence_async_shared();
  hardware_barrier_wait<kLoadBarrier, 32 * Traits::kLoadWarps>();
  hardware_barrier_arrive<kOutputReadyBarrier, kOutputReadyThreads>();
  hardware_barrier_arrive<kReadyBarrier, Traits::kThreads>();
  shrink_registers<Traits::kLoadRegisters>();
  loader.run(ahead);
  if (warp == 0) {
    wait_for_previous_kernel();
    check_inputs(p, worker, lane);
  }
}

}  // namespace halftone::cuda
