// The prefill kernel: roles and the main loop.
#pragma once

#include "cuda/prefill/end.h"
#include "cuda/prefill/queries.h"

namespace halftone::cuda {

/// A compute warpgroup: its rows of all items.
template <PrefillConfig C>
struct RowsLoop {
  using Traits = PrefillTraits<C>;
  using Products = typename Consumer<C>::Products;
  using Logits = typename Consumer<C>::Logits;
  using Item = typename Traits::Item;
  static constexpr int kTile = C.kv_tile;
  const PrefillParams& params;
  typename Traits::Shared& s;
  const AttentionParams& p = params.attention;
  Consumer<C> c{p, s, thread_index()};
  RingPlace<C.stages> ring = {};

  __device__ bool modified() const {
    return p.softcap > 0.0f || p.alibi_slopes != nullptr || p.scale_log2 < 0.0f;
  }
  /// What the softmax multiplies logits of row g + 8 r by; of given keys `common`, the same for all rows.
  __device__ float row_factor(int r, float common) const {
    if constexpr (!Traits::kStaged) return common;
    return modified() ? 1.0f : c.factor(r);
  }
  /// Worked out anew, to keep no register.
  __device__ int stage_before() const {
    int stage = ring.stage;
    asm volatile("" : "+r"(stage));
    return (stage == 0 ? C.stages : stage) - 1;
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
  /// The item at hand; looked up anew, to keep no register.
  __device__ const Item& current() const {
    const volatile int& index = s.item_index[c.thread / 32];
    return s.items[index % Traits::kItems];
  }
  /// Whether there is a tile at `token`, and what it needs beside its products, as bits.
  enum Need : std::uint32_t { kMask = 1, kLook = 2, kHere = 4 };
  __device__ std::uint32_t needs(int token) const {
    const TileRange tiles = current().tiles[c.group()];
    const bool masked = token < tiles.unmasked_first || token >= tiles.unmasked_end;
    // Rows may see their first key here, as long as the tile before was masked.
    return (masked ? kMask : 0) | (token + kTile >= tiles.unmasked_end ? kLook : 0) |
           (token >= tiles.first ? kHere : 0);
  }

  /// The products of the tile at `token` become logits as the softmax takes them. `live`: of Shared.
  __device__ void prepare(const Products& products, Logits& x, int token, std::uint32_t need,
                          std::uint32_t live) {
    constexpr std::uint32_t kAll = (1u << kTile / kTileTokens) - 1;
    c.take(products, x, ring.stage, Traits::kCodes || live & kScaledTile);
    if (modified()) c.cap_and_bias(x, current(), token);
    if (need & kMask || (live & ~kScaledTile) != kAll) c.mask(x, current(), token, live);
  }
  /// Whether the products need nothing but their scales.
  __device__ bool plain(std::uint32_t need, std::uint32_t live) const {
    return !(need & (kMask | kLook)) && live == ((1u << kTile / kTileTokens) - 1 | kScaledTile) &&
           !modified();
  }

  /// The tiles of the current item that the rows see, of which there are some, from the last one on.
  __device__ void attend() {
    int token = current().tiles[c.group()].end - kTile;
    std::uint32_t need = needs(token);
    const float common = modified() ? 1.0f : p.scale_log2;
    float sum[2];
    typename Consumer<C>::Probabilities prob;
    {
      Products products;
      Logits x;
      wait(s.k_full[ring.stage]);
      wgmma_begin();
      c.begin_scores(ring.stage, products);
      const std::uint32_t live = s.live[ring.stage];
      wgmma_wait();
      pin(products);
      prepare(products, x, token, need, live);
      c.release(s.k_empty[ring.stage]);
      const float factor[2] = {row_factor(0, common), row_factor(1, common)};
      c.raise(x, factor);
      need = needs(token - kTile);
      c.exponentiate(x, factor, sum);
      c.add(sum);
      c.round(x, prob);
      wait(s.v_full[ring.stage]);
      const int alive = current().item.keys - token;
      if (alive < kTile) c.clear_dead(ring.stage, alive);
    }
#pragma unroll 1
    while (need & kHere) {
      token -= kTile;
      c.locate();
      const RingPlace<C.stages> before = ring;
      ring.advance();
      Products products;
      Logits x;
      wait(s.k_full[ring.stage]);
      const std::uint32_t live = s.live[ring.stage];
      wgmma_begin();
      c.begin_scores(ring.stage, products);
      barrier_wait(shared_address(&s.v_full[before.stage]), before.parity);
      wgmma_begin();
      c.begin_output(before.stage, prob);
      wgmma_wait<1>();
      pin(products);
      bool raised = false;
      std::uint32_t next = 0;
#pragma unroll 1
      while (true) {
        if (Traits::kCodes && plain(need, live)) {
          next = needs(token - kTile);
          c.exponentiate(products, ring.stage, x, sum);
        } else {
          prepare(products, x, token, need, live);
          const float factor[2] = {row_factor(0, common), row_factor(1, common)};
          if (need & kLook) raised = c.raise(x, factor);
          next = needs(token - kTile);  // beside the exponentials
          c.exponentiate(x, factor, sum);
        }
        if (need & kLook || !c.exceeds(sum) || !c.exceeds(sum, current())) break;
        wgmma_wait<0>();
        c.repeat_scores(ring.stage, products);
        need |= kLook;
      }
      need = next;
      c.add(sum);
      c.release(s.k_empty[ring.stage]);
      wgmma_wait<0>();
      c.release(s.v_empty[stage_before()]);
      if (raised) c.rescale_output();
      c.round(x, prob);
    }
    wait(s.v_full[ring.stage]);
    wgmma_begin();
    c.begin_output(ring.stage, prob);
    c.release(s.q_empty[c.group()]);
    wgmma_wait<0>();
    pin(c.o);
    c.release(s.v_empty[ring.stage]);
    ring.advance();
  }

  __device__ void run() {
    ItemReader<C> items{s};
#pragma unroll 1
    while (const Item* const item = items.next()) {
      c.locate();
      c.begin();
      s.item_index[c.thread / 32] = items.index;
      __syncwarp();
      const planning::WorkItem& work = item->item.work;
      const TileRange& tiles = item->tiles[c.group()];
      skip(work.kv_begin + tiles_of<kTile>(work) * kTile, tiles.end);
      barrier_wait(shared_address(&s.q_full[c.group()]), items.index % 2);
      if (tiles.end > tiles.first) {
        if constexpr (Traits::kStaged) scale_queries(c);
        attend();
      } else {
        c.release(s.q_empty[c.group()]);
      }
      items.index = s.item_index[c.thread / 32];
      const Item& done = s.items[items.stage()];
      skip(done.tiles[c.group()].first, done.item.work.kv_begin);
      if (64 * c.group() < done.item.work.row_end - done.item.work.row_begin) {
        RowsEnd<C>{params, c, done.item}();
      }
      __syncwarp();
      if (c.lane() == 0) items.release();
      items.advance();
    }
    RowsEnd<C>::drain(c);
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
  init(s.item_empty, Traits::kComputeWarps + 3);
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
      load_tiles<C, false>(p, s, lane);
    } else if (role == kLoadValues) {
      load_tiles<C, true>(p, s, lane);
    } else if (role == kLoadQueries) {
      QueryLoader<C>{p, s, lane}.run();
    } else {
      ItemTaker<C>{p, s}.run();
    }
  } else {
    grow_registers<Traits::kComputeRegisters>();
    RowsLoop<C>{p, s}.run();
  }
}

}  // namespace halftone::cuda
