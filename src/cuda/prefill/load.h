// The roles that feed the compute warps, a warp each: tiles of K and of V by tensor copies, queries.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/attention/pages.h"
#include "cuda/attention/rows.h"
#include "cuda/device/tma.h"
#include "cuda/prefill/take.h"

namespace halftone::cuda {

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

  /// Of the tile's keys, less the lane.
  static __device__ int count(const DeviceItem& item, int token, int lane) {
    return min(item.work.kv_end - token, C.kv_tile) - lane;
  }

  /// Of all tiles of an item, if there is one for all keys of the head.
  __device__ void begin(const PrefillParams& p, const DeviceItem& item) {
    if (!Traits::kE4m3 || p.key_scales != nullptr) return;
    const ParamView& k = p.attention.k;
    for (float& x : scale) x = k.static_scale[item.work.kv_head * k.static_stride];
  }
  __device__ void look_up(const PrefillParams& p, const DeviceItem& item, int first_key, int token,
                          int lane) {
    if (token < item.work.kv_begin || (Traits::kE4m3 && p.key_scales == nullptr)) return;
    const float* const from = p.key_scales + item.work.kv_head * p.kv_tokens;
    const int own_count = count(item, token, lane);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int own = token + lane + 32 * i;
      scale[i] = 32 * i < own_count ? from[first_key + own] : 1.0f;
    }
  }
  /// kScaledTile, if it holds.
  __device__ std::uint32_t mark(const PrefillParams& p, const DeviceItem& item, int token, int lane) const {
    if (Traits::kE4m3 && p.key_scales == nullptr) return 0;
    const int own_count = count(item, token, lane);
    const float usual = Traits::kCodes ? __shfl_sync(~0u, scale[0], 0) : 1.0f;
    bool scaled = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) scaled |= 32 * i < own_count && scale[i] != usual;
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
          live |= scales.mark(p, *item, token, lane);
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
