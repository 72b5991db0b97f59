// The roles that feed the compute warps, a warp each: items, tiles of K and of V by tensor copies, queries.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/attention/logits.h"
#include "cuda/attention/pages.h"
#include "cuda/attention/rows.h"
#include "cuda/device/tma.h"
#include "cuda/prefill/params.h"
#include "cuda/prefill/traits.h"
#include "plan/queue.h"

namespace halftone::cuda {

/// Tiles of kTile tokens from kv_begin on that hold an item's keys.
template <int kTile>
__device__ inline int tiles_of(const planning::WorkItem& work) {
  return (work.kv_end - work.kv_begin + kTile - 1) / kTile;
}

/// The items as a role takes them from the ring in shared memory.
template <PrefillConfig C>
struct ItemReader {
  using Traits = PrefillTraits<C>;
  typename Traits::Shared& s;
  int index = 0;

  __device__ int stage() const { return index % Traits::kItems; }
  __device__ void wait_empty() {
    barrier_wait(shared_address(&s.item_empty[stage()]), index / Traits::kItems % 2 ^ 1);
  }
  /// Null: there are no more.
  __device__ const typename Traits::Item* next() {
    barrier_wait(shared_address(&s.item_full[stage()]), index / Traits::kItems % 2);
    const typename Traits::Item& item = s.items[stage()];
    return item.item.work.row_end < 0 ? nullptr : &item;
  }
  __device__ void advance() { ++index; }
  /// By one lane of each warp that reads.
  __device__ void release() { barrier_arrive(shared_address(&s.item_empty[stage()])); }
};

/// Leaves out what the caller's tensors lack: queries beyond Q, keys beyond plain K and V.
__device__ inline void limit_item(const PrefillParams& p, DeviceItem& item) {
  planning::WorkItem& work = item.work;
  bounds_of(p.attention).apply(item);
  if (work.row_end == work.row_begin) work.kv_end = work.kv_begin;
  const std::int32_t* const cu_kv = p.attention.schedule.cu_kv;
  if (cu_kv == nullptr) return;
  const std::int64_t first = cu_kv[work.request], left = first < 0 ? 0 : p.kv_tokens - first;
  if (left >= item.keys) return;
  item.present = left < 0 ? 0 : static_cast<std::int32_t>(left);
  if (left >= work.kv_end) return;
  work.kv_end = left < work.kv_begin ? work.kv_begin : static_cast<std::int32_t>(left);
  if (p.attention.status != nullptr) atomicOr(p.attention.status, kStatusBadKeys);
}

/// Whether logits are more than products times a factor.
__device__ inline bool modifies_logits(const AttentionParams& p) {
  return caps_or_biases(p) || p.scale_log2 < 0.0f;
}

/// `position`: of the item's rows. Fills `tiles` piece by piece: registers are few.
template <int kTile>
__device__ inline void find_tiles(const AttentionParams& p, const DeviceItem& item, const int* position,
                                  int group, volatile GroupTiles& tiles) {
  const planning::WorkItem& work = item.work;
  const int rows = work.row_end - work.row_begin, zero = work.kv_begin, row = 64 * group;
  const int all = tiles_of<kTile>(work);
  tiles.before = all;
  tiles.last = -1;
  tiles.after = 0;
  if (row >= rows) return;
  const int first = position[row], last = position[min(row + 63, rows - 1)];
  const int begin = max(zero, first - p.window_left) - zero;
  const int end = min(work.kv_end, last + p.causal_right + 1) - zero;
  if (begin >= end) return;
  const int from = begin / kTile, behind = (end + kTile - 1) / kTile;
  tiles.before = all - behind;
  tiles.last = behind - from - 1;
  tiles.after = from;
  tiles.first = zero + from * kTile;
  tiles.alive = min(item.present - (zero + (behind - 1) * kTile), kTile);
  const KeyRange inner = seen_by_all(p, first, last, work.kv_end);
  const int inner_begin = max(zero, inner.begin) - zero, inner_end = max(zero, inner.end) - zero;
  const int whole_first = (inner_begin + kTile - 1) / kTile, whole_end = inner_end / kTile;
  tiles.unmasked_first = zero + whole_first * kTile;
  tiles.unmasked_end = zero + whole_end * kTile;
  // The first row sees none of the tile behind, if that is where its keys end.
  const int plain = whole_end - (whole_end * kTile == inner_end ? 1 : 0) - whole_first;
  tiles.plain = whole_first - from;
  tiles.plain_count = modifies_logits(p) ? 0 : max(plain, 0);
}

/// The warp that takes items from the queue for the block.
template <PrefillConfig C>
struct ItemTaker {
  using Traits = PrefillTraits<C>;
  const PrefillParams& params;
  typename Traits::Shared& s;

  // Read anew: registers are few.
  __device__ static int lane() { return thread_index() % 32; }
  __device__ static std::uint32_t grid_size() {
    std::uint32_t size;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size));
    return size;
  }
  __device__ void find(std::int64_t index, DeviceItem& item) const {
    find_queue_item(params.attention.schedule, index, item);
    limit_item(params, item);
  }
  /// By all lanes, what follows from the item.
  __device__ void complete(typename Traits::Item& item) const {
    const AttentionParams& p = params.attention;
    const int last = max(item.item.work.row_end - item.item.work.row_begin, 1) - 1;
#pragma unroll 1
    for (int row = lane(); row < Traits::kRows; row += 32) {
      const RowPlace place = place_of(p, item.item, min(row, last));
      item.position[row] = place.position;
      if (row % 64 == 0) item.tiles[row / 64].query = static_cast<int>(place.token);
      if constexpr (Traits::kKeepsSlopes) {
        if (p.alibi_slopes != nullptr) item.slope[row] = slope_of(p, place.head);
      }
    }
    __syncwarp();
    if (lane() < Traits::kRowGroups) {
      find_tiles<C.kv_tile>(p, item.item, item.position, lane(), item.tiles[lane()]);
    }
  }
  /// The worker's first item, which the schedule lists: to find it takes a chain of reads. Whether there is
  /// one.
  __device__ bool take_first(DeviceItem& item) const {
    const ItemList& list = params.attention.list;
    const bool has = list.counts[blockIdx.x] > 0;
    if (lane() < static_cast<int>(sizeof item / 4)) {
      reinterpret_cast<std::int32_t*>(&item)[lane()] =
          reinterpret_cast<const std::int32_t*>(list.items + std::int64_t{blockIdx.x} * kListedItems)[lane()];
    }
    __syncwarp();
    if (has && lane() == 0) limit_item(params, item);
    return has;
  }
  __device__ void run() const {
    ItemReader<C> place{s};
    std::uint32_t next = 0;
#pragma unroll 1
    for (;; place.advance()) {
      place.wait_empty();
      typename Traits::Item& item = s.items[place.stage()];
      bool more;
      if (place.index == 0) {
        more = take_first(item.item);
      } else {
        more = next < planning::queue_items(*params.attention.schedule.header);
        if (more && lane() == 0) find(next, item.item);
      }
      if (!more && lane() == 0) item.item.work.row_end = -1;
      __syncwarp();
      if (more) complete(item);
      __syncwarp();
      if (lane() == 0) barrier_arrive(shared_address(&s.item_full[place.stage()]));
      if (!more) break;
      barrier_wait(shared_address(&s.take_next), place.index % 2);
      next = grid_size() + __shfl_sync(~0u, lane() == 0 ? atomicAdd(&params.taken[0], 1) : 0, 0);
    }
    // The last worker leaves the counters as it found them.
    if (lane() == 0 && count_arrival(&params.taken[1]) == static_cast<int>(grid_size()) - 1) {
      params.taken[0] = params.taken[1] = 0;
    }
  }
};

/// The tiles of an item, from the last one on: tokens one after the other, or tiles of 16 tokens in pages.
/// Staged tokens are both: rows of tensors, of which those whose page is missing are left out.
template <PrefillConfig C>
struct TileLoader {
  using Traits = PrefillTraits<C>;
  static constexpr int kTiles = C.kv_tile / kTileTokens;
  const PrefillParams& p;
  const DeviceItem& item;
  int lane;
  int first_key = 0;                     // of the request's rows
  const std::int32_t* table = nullptr;   // of the request
  std::int32_t page = 0, next_page = 0;  // of the lane's tile of 16 tokens, here and in the tile behind

  /// Whether K, or V, are rows of tensors.
  template <bool kValues>
  __device__ bool in_rows() const {
    return has_rows() && !(Traits::kE4m3 && !kValues && p.code_pages);
  }
  __device__ bool has_rows() const { return p.attention.schedule.cu_kv != nullptr; }
  __device__ bool has_table() const { return p.attention.cache.page_log2 > 0; }  // one without columns, too

  __device__ void begin(int token) {
    if (has_rows()) first_key = p.attention.schedule.cu_kv[item.work.request];
    if (!has_table()) return;
    table = table_row(p.attention.cache, item.work.request);
    page = look_up(token);
    next_page = look_up(token - C.kv_tile);
  }
  /// To the tile at `token`. Pages are asked for two tiles ahead, so that nothing waits for them.
  __device__ void advance(int token) {
    if (!has_table()) return;
    page = next_page;
    next_page = look_up(token - C.kv_tile);
  }
  __device__ std::int32_t look_up(int token) const {
    const int own = token + lane * kTileTokens;
    if (token < item.work.kv_begin || lane >= kTiles || own >= item.work.kv_end) return -1;
    return page_entry(p.attention.cache, table, own >> p.attention.cache.page_log2);
  }
  /// Which tiles of 16 tokens are there. Others are read outside the tensor, which gives zeros.
  __device__ std::uint32_t check(int token) {
    if (!has_table()) return (1u << kTiles) - 1;
    const bool wanted = lane < kTiles && token + lane * kTileTokens < item.work.kv_end;
    const bool has = wanted && has_page(p.attention, page);
    if (!has) page = -1;
    return __ballot_sync(~0u, has);
  }
  /// What a tile of V brings: of E4M3 only the tiles of 16 tokens that the request has.
  __device__ int value_bytes(int token) const {
    if constexpr (!Traits::kE4m3) return Traits::kValueTileBytes;
    return min(item.present - token + kTileTokens - 1, C.kv_tile) / kTileTokens * (kTileTokens * C.value_dim);
  }
  __device__ void copy_values(std::uint32_t to, std::uint32_t barrier, int token) const {
    const std::int64_t tile =
        item.work.kv_head * (p.kv_tokens / kTileTokens) + (first_key + token) / kTileTokens;
    bulk_load(to, p.value_tiles + tile * (kTileTokens * C.value_dim), value_bytes(token), barrier);
  }
  /// What a lane copies of a tile in pages.
  struct PageBox {
    int tile;   // of 16 tokens; kTiles and up: none
    int place;  // of that in its page
    std::int32_t page;
    bool pair;
  };
  /// A copy takes its time, however little it brings: of codes, two tiles in one page are one.
  template <bool kValues>
  __device__ PageBox box_at(int token) const {
    const int in_page = (1 << p.attention.cache.page_log2) / kTileTokens, first = token / kTileTokens;
    PageBox box{lane, (first + lane) & (in_page - 1), page, false};
    if constexpr (Traits::kE4m3 && !kValues) {
      if (in_page > 1) {
        const int odd = first % 2;  // then the first one is alone
        box.tile = max(2 * lane - odd, 0);
        box.place = (first + box.tile) & (in_page - 1);
        box.pair = lane >= odd && box.tile + 1 < kTiles;
      }
      box.page = __shfl_sync(~0u, page, box.tile % 32);
    }
    return box;
  }

  /// `box`: of the lane, where the tile is in pages.
  template <bool kValues>
  __device__ void load(std::uint32_t to, std::uint32_t barrier, int token, const PageBox& box) const {
    constexpr int kRow = kValues ? Traits::kRowBytes : Traits::kKeyRowBytes;
    constexpr int kChunks = kValues ? Traits::kValueChunks : Traits::kKeyChunks;
    constexpr int kChunkDims = kValues ? Traits::kChunkDims : Traits::kKeyChunkDims;
    if (in_rows<kValues>()) {
      if (lane < kChunks) {
        tensor_load(to + lane * (C.kv_tile * kRow), kValues ? p.v : p.k, barrier, lane * kChunkDims,
                    item.work.kv_head, first_key + token);
      }
      return;
    }
    if (box.tile >= kTiles) return;
    const CUtensorMap& map = box.pair ? p.k_pairs : kValues ? p.v : p.k;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const std::uint32_t at = to + chunk * (C.kv_tile * kRow) + box.tile * (kTileTokens * kRow);
      if constexpr (Traits::kE4m3 && !kValues) {
        tensor_load(at, map, barrier, 0, chunk * kTileTokens, box.place, item.work.kv_head, box.page);
      } else {
        tensor_load(at, map, barrier, chunk * kChunkDims, 0, box.place, item.work.kv_head, box.page);
      }
    }
  }
};

/// Scales of a tile's keys, asked for a tile ahead, a lane every 32nd.
template <PrefillConfig C>
struct KeyScales {
  using Traits = PrefillTraits<C>;
  static constexpr int kEach = (C.kv_tile + 31) / 32;
  float scale[kEach];
  int count;  // of the tile's keys, less the lane

  /// Of all tiles of an item, if there is one for all keys of the head.
  __device__ void begin(const PrefillParams& p, const DeviceItem& item) {
    if (!Traits::kE4m3 || p.key_scales != nullptr) return;
    const ParamView& k = p.attention.k;
    count = 0;
    for (float& x : scale) x = k.static_scale[item.work.kv_head * k.static_stride];
  }
  __device__ void look_up(const PrefillParams& p, const DeviceItem& item, int first_key, int token,
                          int lane) {
    if (token < item.work.kv_begin || (Traits::kE4m3 && p.key_scales == nullptr)) return;
    const float* const from = p.key_scales + item.work.kv_head * p.kv_tokens;
    count = min(item.work.kv_end - token, C.kv_tile) - lane;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int own = token + lane + 32 * i;
      scale[i] = 32 * i < count ? from[first_key + own] : 1.0f;
    }
  }
  /// kScaledTile, if it holds.
  __device__ std::uint32_t mark() const {
    const float usual = Traits::kCodes ? __shfl_sync(~0u, scale[0], 0) : 1.0f;
    bool scaled = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) scaled |= 32 * i < count && scale[i] != usual;
    return __any_sync(~0u, scaled) ? kScaledTile : 0;
  }
  __device__ void store(float* to, int lane) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane + 32 * i < C.kv_tile) to[lane + 32 * i] = scale[i];
    }
  }
};

/// A warp that brings K, or V, of all items. That of K has the next item taken when few tiles are left.
template <PrefillConfig C, bool kValues>
__device__ inline void load_tiles(const PrefillParams& p, typename PrefillTraits<C>::Shared& s, int lane) {
  using Traits = PrefillTraits<C>;
  constexpr bool kScales = Traits::kStaged && !kValues;
  ItemReader<C> items{s};
  RingPlace<C.stages> ring;
#pragma unroll 1
  while (const auto* const next = items.next()) {
    const DeviceItem* const item = &next->item;
    TileLoader<C> loader{p, *item, lane};
    [[maybe_unused]] KeyScales<C> scales;
    int token = item->work.kv_begin + (tiles_of<C.kv_tile>(item->work) - 1) * C.kv_tile;
    constexpr int kAhead = Traits::kTakenAhead * C.kv_tile;
    const auto take_next = [&] {
      if (!kValues && lane == 0) barrier_arrive(shared_address(&s.take_next));
    };
    if (token < item->work.kv_begin + kAhead) take_next();
    loader.begin(token);
    if constexpr (kScales) {
      scales.begin(p, *item);
      scales.look_up(p, *item, loader.first_key, token, lane);
    }
#pragma unroll 1
    for (; token >= item->work.kv_begin; token -= C.kv_tile, ring.advance()) {
      std::uint32_t live = loader.check(token);
      const auto box = loader.template box_at<kValues>(token);
      const std::uint32_t full = shared_address(kValues ? &s.v_full[ring.stage] : &s.k_full[ring.stage]);
      barrier_wait(shared_address(kValues ? &s.v_empty[ring.stage] : &s.k_empty[ring.stage]),
                   ring.empty_parity());
      if (lane == 0) {
        barrier_expect_bytes(full, kValues ? loader.value_bytes(token) : Traits::kKeyTileBytes);
      }
      __syncwarp();
      if constexpr (kValues && Traits::kE4m3) {
        if (lane == 0) loader.copy_values(shared_address(s.v[ring.stage]), full, token);
      } else {
        const auto& stage = kValues ? s.v[ring.stage] : s.k[ring.stage];
        loader.template load<kValues>(shared_address(stage), full, token, box);
      }
      if constexpr (!kValues) {  // what is known of the tile, beside its copies
        if constexpr (kScales) {
          live |= scales.mark();
          scales.store(s.key_scales[ring.stage], lane);
        }
        if (lane == 0) s.live[ring.stage] = live;
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
      }
      loader.advance(token - C.kv_tile);
      if constexpr (kScales) scales.look_up(p, *item, loader.first_key, token - C.kv_tile, lane);
      if (token == item->work.kv_begin + kAhead) take_next();
    }
    __syncwarp();  // all lanes have read the item
    if (lane == 0) items.release();
    items.advance();
  }
}

/// Queries of each 64 rows, in the chunks and the swizzle of tensor copies.
template <PrefillConfig C>
struct QueryLoader {
  using Traits = PrefillTraits<C>;
  static constexpr int kPieces = Traits::kDim / 8;
  static constexpr int kAcross = kPieces < 32 ? kPieces : 32;  // at a time, a lane each
  static constexpr int kStep = 32 / kAcross;                   // rows at a time; lanes may be left
  static_assert(kPieces % kAcross == 0);
  const PrefillParams& params;
  typename Traits::Shared& s;
  int lane;

  /// By tensor copies of whole rows, those of other requests among them, whose results are not written.
  __device__ void copy_boxes(const DeviceItem& item, int buffer, int group) const {
    const std::uint32_t full = shared_address(&s.q_full[buffer][group]);
    const int heads = params.attention.schedule.params.group;
    if (lane == 0) barrier_expect_bytes(full, Traits::kQueryBytes);
    if (lane >= Traits::kChunks) return;
    tensor_load(shared_address(s.q[buffer][group]) + lane * (64 * Traits::kRowBytes), params.q, full,
                lane * Traits::kChunkDims, item.work.kv_head * heads,
                item.first_query + (item.work.row_begin + 64 * group) / heads);
  }
  /// By rows, of long ones a part at a time.
  __device__ void copy_rows(const DeviceItem& item, int buffer, int group) const {
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kAcross) {
      copy_parts(item, buffer, group, first + lane % kAcross);
    }
    copy_async_wait();
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.q_full[buffer][group]));
  }
  /// Piece `piece` of the lane's rows.
  __device__ void copy_parts(const DeviceItem& item, int buffer, int group, int piece) const {
    const AttentionParams& p = params.attention;
    const int rows = item.work.row_end - item.work.row_begin;
    using Place = typename Traits::Place;
    std::uint8_t* to = s.q[buffer][group] + piece / Place::kPieces * (64 * Traits::kRowBytes);
#pragma unroll 1
    for (int i = lane < kStep * kAcross ? lane / kAcross : 64; i < 64; i += kStep) {
      const bool has = 64 * group + i < rows;
      const RowPlace place = place_of(p, item, has ? 64 * group + i : 0);
      const auto* from = static_cast<const std::uint16_t*>(p.q) + piece * 8 +
                         (has ? place.token * p.q_token_stride + place.head * p.q_head_stride : 0);
      std::uint8_t* at = to + i * Traits::kRowBytes + Place::piece(i % 8, piece % Place::kPieces);
      if (p.q_aligned) {
        copy_async(shared_address(at), from, has ? 16 : 0);
      } else {
        *reinterpret_cast<uint4*>(at) = has ? load_eight(from, false) : uint4{};
      }
    }
  }
  __device__ void run() const {
    check_inputs(params.attention, blockIdx.x, lane);
    ItemReader<C> items{s};
#pragma unroll 1
    while (const auto* const item = items.next()) {
#pragma unroll 1
      for (int group = 0; group < Traits::kRowGroups; ++group) {
        const int buffer = items.index % Traits::kQueryBuffers;
        barrier_wait(shared_address(&s.q_empty[buffer][group]), items.index / Traits::kQueryBuffers % 2 ^ 1);
        if (params.q_boxes) {
          copy_boxes(item->item, buffer, group);
        } else {
          copy_rows(item->item, buffer, group);
        }
      }
      __syncwarp();
      if (lane == 0) items.release();
      items.advance();
    }
  }
};

}  // namespace halftone::cuda
