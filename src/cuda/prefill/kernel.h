// The prefill kernel: roles and the main loop.
#pragma once

#include "cuda/prefill/end.h"
#include "cuda/prefill/packed.h"
#include "cuda/prefill/promote.h"
#include "cuda/prefill/queries.h"
#include "cuda/prefill/turn.h"

namespace halftone::cuda {

/// A compute warpgroup: its rows of all items.
template <PrefillConfig C>
struct RowsLoop {
  using Traits = PrefillTraits<C>;
  using Products = typename Consumer<C>::Products;
  using Logits = typename Consumer<C>::Logits;
  using Item = typename Traits::Item;
  using OwnTiles = typename Traits::OwnTiles;
  static constexpr int kTile = C.kv_tile;
  static constexpr std::uint32_t kAllLive = (1u << kTile / kTileTokens) - 1;
  /// Bits of Shared::live that such a tile may have whose products need nothing but their scales.
  static constexpr std::uint32_t kMayHave = Traits::kCodes || Traits::kScaledLogits ? kScaledTile : 0;
  static constexpr int kPromoted = C.promoted_keys / C.kv_tile;  // tiles of E4M3 products
  static_assert(!Traits::kE4m3 || (C.promoted_keys % C.kv_tile == 0 && kPromoted > 1));  // the last stays
  static constexpr int kBuffers = Traits::kQueryBuffers;
  static constexpr bool kTakesAhead = Traits::kTakesAhead;
  const PrefillParams& params;
  typename Traits::Shared& s;
  const AttentionParams& p = params.attention;
  Consumer<C> c{p, s, static_cast<std::uint32_t>(thread_index())};
  PackedRingPlace<C.stages> ring = {};
  int left = -1;  // tiles of the item that are still to come, or the number of the one at hand

  __device__ bool modified() const { return modifies_logits(p); }
  /// What the softmax multiplies logits of row g + 8 r by; of given keys the same for all rows.
  __device__ float row_factor(int r) const { return modified() ? 1.0f : c.factor(r); }
  /// Worked out anew, to keep no register.
  __device__ int stage_before() const {
    PackedRingPlace<C.stages> place = ring;
    asm volatile("" : "+r"(place.place));
    return place.previous().stage();
  }
  __device__ void wait(std::uint64_t& barrier) const {
    barrier_wait(shared_address(&barrier), ring.parity());
  }

  /// Passes tiles that the rows do not see.
  __device__ void skip(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles, ring.advance()) {
      wait(s.k_full[ring.stage()]);
      c.release(s.k_empty[ring.stage()]);
      wait(s.v_full[ring.stage()]);
      c.release(s.v_empty[ring.stage()]);
    }
  }
  __device__ OwnTiles& own() const { return s.own[c.thread / 32]; }
  /// Number of the item at hand, -1 before the first; looked up anew, to keep no register.
  __device__ int item_index() const {
    const volatile int& index = own().item;
    return index;
  }
  __device__ const Item& current() const { return item_of(item_index()); }
  __device__ int token() const {
    const volatile int& first = own().first;
    return first + left * kTile;
  }

  /// Bits of Shared::live of the tile at hand.
  __device__ std::uint32_t live() const {
    std::uint32_t live = s.live[ring.stage()];
    if constexpr (Traits::kFourBits) {
      const bool scaled = *reinterpret_cast<const std::uint64_t*>(s.keys_scaled[ring.stage()]) != 0;
      live |= scaled ? kScaledTile : 0;
    }
    return live;
  }
  /// Whether the products of the tile at hand need nothing but their scales.
  __device__ bool is_plain() const {
    const auto& tiles = own();
    const bool plain = static_cast<std::uint32_t>(left - tiles.plain) < tiles.plain_count;
    return plain && (live() & ~kMayHave) == kAllLive;
  }
  /// The products of the tile at hand become logits as the softmax takes them. `live`: of Shared.
  __device__ void prepare(const Products& products, Logits& x, std::uint32_t live) {
    c.take(products, x, ring.stage(), Traits::kCodes || live & kScaledTile);
    const Item& item = current();
    const GroupTiles& tiles = item.tiles[c.rows_index()];
    const int at = token();
    if (modified()) c.cap_and_bias(x, item, at);
    if (at < tiles.unmasked_first || at >= tiles.unmasked_end || (live & kAllLive) != kAllLive) {
      c.mask(x, item, at, live & kAllLive);
    }
  }

  /// O moves to the sums of earlier tiles.
  __device__ void promote() {
    const int item = own().item;
    bool& promoted = own().promoted[item % Traits::kItems];
    PromotedSums<C>{params, c, item}.add(promoted);
    promoted = true;
    __syncwarp();
  }

  /// Takes the next item, if there is one: notes which tiles the rows see and waits for its queries.
  __device__ bool take() {
    ItemReader<C> items{s, item_index() + 1};
    __syncwarp();  // all lanes have read the number
    c.locate();
    left = -1;
    const Item* const item = items.next();
    if (item == nullptr) return false;
    items.wait_for_tiles();
    const GroupTiles& tiles = item->tiles[c.rows_index()];
    const int buffer = items.index % kBuffers;
    c.queries = swizzled_word(shared_address(s.q[buffer][c.rows_index()]));
    left = tiles.last;
    own() = {tiles.plain,
             tiles.plain_count,
             tiles.first,
             tiles.alive,
             (buffer * Traits::kRowGroups + c.rows_index()) * Traits::kQueryBytes,
             items.index,
             OwnTiles::kFirst,
             {own().promoted[0], own().promoted[1]}};
    own().promoted[items.index % Traits::kItems] = false;
    __syncwarp();
    barrier_wait(shared_address(&s.q_full[buffer][c.rows_index()]), items.index / kBuffers % 2);
    if constexpr (Traits::kStaged) {
      if (left >= 0) scale_queries(c, s.q[buffer][c.rows_index()], item->item.work.kv_head);
    }
    c.keep_queries();
    if constexpr (Traits::kPacked) {
      for (int r = 0; r < 2; ++r) c.factors[r] = s.query_factors[c.first_row() + 8 * r];
    }
    return true;
  }
  /// The second warpgroup comes first: before the first tile that its rows see come so few that all find
  /// room, so that it needs nothing of the first one.
  __device__ void wait_for_turn() const {
    if (!Traits::kTakesTurns || c.group() != 0) return;
    const volatile int& begun = s.begun;
    const int item = item_index();
    while (begun < item) {
    }
  }
  __device__ void pass_turn() const {
    if (!Traits::kTakesTurns || c.thread != 128) return;
    volatile int& begun = s.begun;
    begun = item_index();
  }
  /// Begins Q K^T of the first tile that the rows see. Where they see none, it is of whatever there is.
  __device__ void begin_scores(Products& products) {
    if (left >= 0) {
      skip(current().tiles[c.rows_index()].before);
      wait(s.k_full[ring.stage()]);
    }
    wgmma_begin();
    c.begin_scores(ring.stage(), products);
  }
  /// All products with the queries of item `index` are complete.
  __device__ void release_queries(int index) {
    RowsEnd<C>::drain(c);
    c.release(s.q_empty[index % kBuffers][c.rows_index()]);
  }

  /// After a tile that is the item's first or has raised offsets.
  __device__ void settle() {
    const int step = own().step;
    if (step == OwnTiles::kFirst) {
      wait(s.v_full[ring.stage()]);
      if (Traits::kConvertWarps == 0 && own().alive < kTile) c.clear_dead(ring.stage(), own().alive);
    } else {
      c.release(s.v_empty[stage_before()]);
      if (step == OwnTiles::kRaised) c.rescale_output();
    }
    own().step = OwnTiles::kUsual;
    __syncwarp();
  }
  /// P of a tile, as soon as O has taken in the one before.
  __device__ void attend_tile(Products& products, typename Consumer<C>::Probabilities& prob, bool plain) {
    Logits x;
    float sum[2];
    if (plain) {
      c.exponentiate_plain(products, ring.stage(), x, sum);
      const bool exceeds = c.exceeds(sum);
      if (!exceeds || !c.must_repeat(sum, current())) {
        if constexpr (RunningSoftmax<C>::kLowers) {
          if (exceeds) c.lower(x, sum);
        }
        c.add(sum);
        c.release(s.k_empty[ring.stage()]);
        wgmma_wait<0>();
        c.release(s.v_empty[stage_before()]);
        c.round(x, prob);
        return;
      }
      wgmma_wait<0>();
      c.repeat_scores(ring.stage(), products);
    }
    prepare(products, x, live());
    const float factor[2] = {row_factor(0), row_factor(1)};
    c.raise(x, factor);
    c.exponentiate(x, factor, sum);
    c.add(sum);
    c.release(s.k_empty[ring.stage()]);
    wgmma_wait<0>();
    settle();
    c.round(x, prob);
  }
  /// The tiles of the item that the rows see, of which there are some, from the last one on; Q K^T of that is
  /// complete. Leaves P V of the first one under way.
  __device__ void attend(Products& products) {
    typename Consumer<C>::Probabilities prob;
    bool plain = false, moved = false;
#pragma unroll 1
    while (true) {
      attend_tile(products, prob, plain);
      if constexpr (Traits::kE4m3) {
        moved = static_cast<std::uint32_t>(left) % kPromoted == kPromoted - 1;
        if (moved) promote();
      }
      if (--left < 0) break;
      const PackedRingPlace<C.stages> before = ring;
      ring.advance();
      wait(s.k_full[ring.stage()]);
      plain = is_plain();
      wgmma_begin();
      c.begin_scores(ring.stage(), products);
      barrier_wait(shared_address(&s.v_full[before.stage()]), before.parity());
      wgmma_begin();
      c.begin_output(before.stage(), prob, moved);
      wgmma_wait<1>();
      c.join(products);
    }
    barrier_wait(shared_address(&s.v_full[ring.stage()]), ring.parity());
    wgmma_begin();
    c.begin_output(ring.stage(), prob);
  }

  /// When O is complete: passes the tiles of an item that are left.
  __device__ void leave(const Item& item) {
    const GroupTiles& tiles = item.tiles[c.rows_index()];
    if (tiles.last < 0) return;
    c.release(s.v_empty[ring.stage()]);
    ring.advance();
    skip(tiles.after);
  }
  __device__ const Item& item_of(int index) const { return s.items[index % Traits::kItems]; }
  /// Writes the rows of an item. `promoted`: PromotedSums has a part of O, some of it where the queries lay,
  /// which are only now released.
  __device__ void finish(const Item& item, int index, bool promoted) {
    if (64 * c.rows_index() < item.item.work.row_end - item.item.work.row_begin) {
      if constexpr (Traits::kE4m3) {
        if (promoted) {
          PromotedSums<C>{params, c, index}.collect();
          if (kBuffers == 1) release_queries(index);
        }
      }
      RowsEnd<C>{params, c, item, index}();
    }
    __syncwarp();
    if (c.lane() == 0) barrier_arrive(shared_address(&s.item_empty[index % Traits::kItems]));
  }

  /// All items. The loop begins with what the first item needs: were it the end of the item before, the
  /// compiler would put its 30 KB ahead of that, and a call with flushed caches would take 6 us more.
  __device__ void run() {
    Products products;
    own().item = -1;
    __syncwarp();
    bool more = !kTakesAhead || take();
#pragma unroll 1
    while (kTakesAhead ? more : take()) {
      wait_for_turn();
      begin_scores(products);
      c.begin();
      wgmma_wait();
      c.join(products);
      pass_turn();
      if (kBuffers == 2 && own().item > 0) release_queries(own().item - 1);
      if (left >= 0) {
        attend(products);
      } else {  // before the next item is taken: it may have to wait for warpgroups that wait for these
                // stages
        skip(current().tiles[c.rows_index()].before);
      }
      const int done = item_index();
      const bool promoted = Traits::kE4m3 && own().promoted[done % Traits::kItems];
      if (kBuffers == 1 && !promoted) release_queries(done);
      if (kTakesAhead) more = take();
      wgmma_wait();
      pin(c.o);
      leave(item_of(done));
      finish(item_of(done), done, promoted);
    }
    RowsEnd<C>::drain(c);
  }
};

/// By one warp.
template <PrefillConfig C>
__device__ inline void init_barriers(typename PrefillTraits<C>::Shared& s, int lane) {
  using Traits = PrefillTraits<C>;
  const auto init = [lane]<int kCount>(std::uint64_t(&barriers)[kCount], int arrivals) {
    static_assert(kCount <= 32);
    if (lane < kCount) barrier_init(shared_address(&barriers[lane]), arrivals);
  };
  if constexpr (Traits::kPackedStages > 0) init(s.packed_full, 1);
  if constexpr (Traits::kPacked) {
    init(s.packed_empty, Traits::kTasks);
    if constexpr (Traits::kFourBits) {
      if (lane < C.stages) *reinterpret_cast<std::uint64_t*>(s.keys_scaled[lane]) = 0;
    }
  }
  init(s.k_full, Traits::kPacked ? Traits::kPackedTiles : 2);  // else its copies, and what is known of it
  init(s.v_full, Traits::kTurns ? Traits::kConvertWarps : Traits::kPackedTiles);
  init(s.k_empty, Traits::kComputeWarps);
  init(s.v_empty, Traits::kComputeWarps);
  for (int i = 0; i < Traits::kQueryBuffers; ++i) {
    init(s.q_full[i], 1);
    init(s.q_empty[i], 4 * C.shares);
  }
  init(s.item_full, 1);
  // Who loads queries, and K and V, or packed tiles.
  init(s.item_empty, Traits::kComputeWarps + (Traits::kPacked ? 2 : 3));
  if (lane < Traits::kItems) barrier_init(shared_address(&s.items[lane].followed), 1);
  if (lane == 0) {
    barrier_init(shared_address(&s.take_next), 1);
    s.begun = -1;
  }
  fence_async_shared();
}

/// Brings the maps and what the first items are found by closer, all at once: to find them takes a chain of
/// reads. By 128 threads.
template <bool kKeyMap, bool kValueMap>
__device__ inline void prefetch_schedule(const PrefillParams& p, int thread) {
  constexpr int kLine = 128;
  const planning::Schedule& s = p.attention.schedule;
  const auto fetch = [&](const void* data, std::int64_t bytes) {
    if (data != nullptr && thread * kLine < bytes) {
      prefetch_to_l2(static_cast<const char*>(data) + thread * kLine);
    }
  };
  const std::int64_t batch = s.params.batch;
  fetch(s.header, sizeof(planning::ScheduleHeader));
  fetch(s.first_step, (batch + 1) * 8);
  fetch(s.cu_q, (batch + 1) * 4);
  fetch(s.kv_lengths, batch * 4);
  fetch(s.cu_kv, batch * 4);
  fetch(p.attention.list.items + std::int64_t{blockIdx.x} * kListedItems, sizeof(DeviceItem));
  fetch(p.attention.list.counts + blockIdx.x, sizeof(std::int32_t));
  // Of the block table, whose rows nobody knows yet, each block brings other lines, unless it is large.
  constexpr std::int64_t kLargeTable = 1 << 18;
  const CacheView& cache = p.attention.cache;
  const std::int64_t own = (std::int64_t{blockIdx.x} * 128 + thread) * kLine;
  const std::int64_t table = ((batch - 1) * cache.table_stride + cache.table_width) * 4;
  if (cache.table_width > 0 && own < table && table <= kLargeTable) {
    prefetch_to_l2(reinterpret_cast<const char*>(cache.block_table) + own);
  }
  if (kKeyMap && thread == 0) prefetch_map(p.k);
  if (kValueMap && thread == 32 && p.value_tiles == nullptr) prefetch_map(p.v);
  if (thread == 64 && p.q_boxes) prefetch_map(p.q);
  if (thread == 96 && p.out_boxes) prefetch_map(p.out);
}

/// A worker: a thread block.
template <PrefillConfig C>
__device__ inline void prefill_worker(const PrefillParams& p, typename PrefillTraits<C>::Shared& s) {
  using Traits = PrefillTraits<C>;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  if (warp == 0) init_barriers<C>(s, lane);
  if (warp >= Traits::kComputeWarps &&
      (Traits::kConvertWarps == 0 || warp < Traits::kComputeWarps + kConvert)) {
    prefetch_schedule<!Traits::kPacked, !Traits::kPacked && !Traits::kTurns>(
        p, thread_index() - 32 * Traits::kComputeWarps);
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp >= Traits::kComputeWarps) {
    const int role = warp - Traits::kComputeWarps;
    if constexpr (Traits::kConvertWarps > 0) {
      if (role >= kConvert) {
        shrink_registers<Traits::kConvertRegisters>();
        if constexpr (Traits::kTurns) {
          turn_values<C>(s, role - kConvert);
        } else {
          PackedConverter<C>{s, role - kConvert}.run();
        }
        return;
      }
    }
    shrink_registers<Traits::kOtherRegisters>();
    if (role == kLoadKeys) {
      if constexpr (Traits::kPacked) {
        load_packed<C>(p, s, lane);
      } else {
        load_tiles<C, false>(p, s, lane);
      }
    } else if (role == kLoadValues) {
      if constexpr (Traits::kTurns) {
        load_packed<C>(p, s, lane);
      } else if constexpr (!Traits::kPacked) {
        load_tiles<C, true>(p, s, lane);
      }
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
