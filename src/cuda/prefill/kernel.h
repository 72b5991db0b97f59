// The prefill kernel: roles and the main loop.
#pragma once

#include "cuda/prefill/end.h"

namespace halftone::cuda {

/// The tiles that a warpgroup's rows see, as the tokens that they begin with: [first, end), and those of them
/// that all rows see whole: [unmasked.x, unmasked.y).
struct TileRange {
  int first, end;
  int2 unmasked;
};

template <int kTile>
__device__ inline TileRange tiles_seen(const AttentionParams& p, const DeviceItem& item, int group) {
  const planning::WorkItem& work = item.work;
  const int rows = work.row_end - work.row_begin;
  if (64 * group >= rows) return {work.kv_begin, work.kv_begin, {}};
  const int first = place_of(p, item, 64 * group).position;
  const int last = place_of(p, item, min(64 * group + 63, rows - 1)).position;
  const int begin = max(work.kv_begin, first - p.window_left) - work.kv_begin;
  const int end = min(work.kv_end, last + p.causal_right + 1) - work.kv_begin;
  if (begin >= end) return {work.kv_begin, work.kv_begin, {}};
  const int inner_begin = max(0, last - p.window_left - work.kv_begin);
  const int inner_end = min(work.kv_end, first + p.causal_right + 1) - work.kv_begin;
  const auto at = [&](int tile) { return work.kv_begin + tile * kTile; };
  return {at(begin / kTile),
          at((end + kTile - 1) / kTile),
          {at((inner_begin + kTile - 1) / kTile), at(max(inner_end, 0) / kTile)}};
}

/// A compute warpgroup: its rows of all items.
template <PrefillConfig C>
struct RowsLoop {
  using Traits = PrefillTraits<C>;
  using Logits = typename Consumer<C>::Logits;
  static constexpr int kTile = C.kv_tile;
  const AttentionParams& p;
  typename Traits::Shared& s;
  Consumer<C> c{p, s, thread_index()};
  RingPlace<C.stages> ring = {};

  __device__ bool modified() const {
    return p.softcap > 0.0f || p.alibi_slopes != nullptr || p.scale_log2 < 0.0f;
  }
  __device__ void wait(std::uint64_t& barrier) const { barrier_wait(shared_address(&barrier), ring.parity); }

  /// Tiles before `token` down to `first` that the rows do not see.
  __device__ void skip(int token, int first) {
#pragma unroll 1
    for (; token > first; token -= kTile, ring.advance()) {
      wait(s.k_full[ring.stage]);
      c.release(s.k_empty[ring.stage]);
      wait(s.v_full[ring.stage]);
      c.release(s.v_empty[ring.stage]);
    }
  }
  /// The products of the tile at `token`, of which the tiles `live` are there, become logits as the softmax
  /// takes them.
  __device__ void prepare(Logits& x, const DeviceItem& item, int token, std::uint32_t live) {
    constexpr std::uint32_t kAll = (1u << kTile / kTileTokens) - 1;
    if (modified()) c.cap_and_bias(x, token);
    const auto& [from, to, item_index] = s.warp_state[c.thread / 32];
    if (token < from || token >= to || live != kAll) c.mask(x, item, token, live);
  }

  /// The tiles from the last one, at `token`, to the first.
  __device__ void attend(const DeviceItem& item, int token, int first) {
    const float factor = modified() ? 1.0f : p.scale_log2;
    float most[2];
    typename Consumer<C>::Probabilities prob;
    {
      Logits x;
      wait(s.k_full[ring.stage]);
      wgmma_begin();
      c.begin_scores(ring.stage, x);
      const std::uint32_t live = s.live[ring.stage];
      wgmma_wait();
      c.release(s.k_empty[ring.stage]);
      prepare(x, item, token, live);
      if (c.exceeds(x, factor, most)) c.raise(factor, most);
      c.exponentiate(x, factor);
      c.round(x, prob);
      wait(s.v_full[ring.stage]);
      if (item.keys - token < kTile) c.clear_dead(ring.stage, item.keys - token);
    }
#pragma unroll 1
    for (token -= kTile; token >= first; token -= kTile) {
      c.locate();
      const RingPlace<C.stages> before = ring;
      ring.advance();
      Logits x;
      wait(s.k_full[ring.stage]);
      wgmma_begin();
      c.begin_scores(ring.stage, x);
      barrier_wait(shared_address(&s.v_full[before.stage]), before.parity);
      wgmma_begin();
      c.begin_output(before.stage, prob);
      const std::uint32_t live = s.live[ring.stage];
      wgmma_wait<1>();
      pin(x);
      c.release(s.k_empty[ring.stage]);
      prepare(x, item, token, live);
      const bool raised = c.exceeds(x, factor, most);
      if (raised) c.raise(factor, most);
      c.exponentiate(x, factor);
      wgmma_wait<0>();
      c.release(s.v_empty[before.stage]);
      if (raised) c.rescale_output();
      c.round(x, prob);
    }
    wait(s.v_full[ring.stage]);
    wgmma_begin();
    c.begin_output(ring.stage, prob);
    c.release(s.q_empty[c.group()]);
    wgmma_wait<0>();
    c.release(s.v_empty[ring.stage]);
    ring.advance();
  }

  __device__ void run() {
    ItemReader<C> items{s};
#pragma unroll 1
    while (const DeviceItem* const item = items.next()) {
      c.locate();
      c.begin(*item);
      const TileRange range = tiles_seen<kTile>(p, *item, c.group());
      s.warp_state[c.thread / 32] = {range.unmasked.x, range.unmasked.y, items.index};
      __syncwarp();
      const int end = item->work.kv_begin + tiles_of<kTile>(item->work) * kTile;
      barrier_wait(shared_address(&s.q_full[c.group()]), items.index % 2);
      if (range.end > range.first) {
        skip(end, range.end);
        attend(*item, range.end - kTile, range.first);
      } else {
        c.release(s.q_empty[c.group()]);
        skip(end, range.end);
      }
      items.index = s.warp_state[c.thread / 32].item;
      const DeviceItem& done = s.items[items.stage()];
      skip(range.first, done.work.kv_begin);
      if (64 * c.group() < done.work.row_end - done.work.row_begin) RowsEnd<C>{c, done}();
      __syncwarp();
      if (c.lane() == 0) items.release();
      items.advance();
    }
  }
};

template <PrefillConfig C>
__device__ inline void init_barriers(typename PrefillTraits<C>::Shared& s) {
  using Traits = PrefillTraits<C>;
  const auto init = [](auto& barriers, int arrivals) {
    for (auto& barrier : barriers) barrier_init(shared_address(&barrier), arrivals);
  };
  init(s.k_full, 1);
  init(s.v_full, 1);
  init(s.k_empty, Traits::kComputeWarps);
  init(s.v_empty, Traits::kComputeWarps);
  init(s.q_full, 1);
  init(s.q_empty, 4);
  init(s.item_full, 1);
  init(s.item_empty, Traits::kComputeWarps + Traits::kQueryWarps + 1);
  fence_async_shared();
}

/// A worker: a thread block.
template <PrefillConfig C>
__device__ inline void prefill_worker(const PrefillParams& p, typename PrefillTraits<C>::Shared& s) {
  using Traits = PrefillTraits<C>;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  if (thread_index() == 0) init_barriers<C>(s);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp >= Traits::kComputeWarps) {
    shrink_registers<Traits::kOtherRegisters>();
    const int role = warp - Traits::kComputeWarps;
    if (role == kLoadKeys) {
      load_keys<C>(p, s, lane);
    } else if (role == kTakeItems) {
      if (lane == 0) take_items<C>(p, s);
    } else {
      QueryLoader<C>{p, s, thread_index() - 32 * (Traits::kComputeWarps + kLoadQueries)}.run();
    }
  } else {
    grow_registers<Traits::kComputeRegisters>();
    RowsLoop<C>{p.attention, s}.run();
  }
}

}  // namespace halftone::cuda
