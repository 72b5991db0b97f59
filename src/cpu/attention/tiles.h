// Where the tiles of one request and KV head lie.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/attention/layer.h"
#include "format/page.h"

namespace halftone::cpu {

struct Tile {
  const std::uint8_t* k;
  const std::uint8_t* v;
  const std::uint8_t* k_params;
  const std::uint8_t* v_params;
  std::int64_t k_stride;  ///< row order: bytes from token to token
  std::int64_t v_stride;
  bool excluded;  ///< behind a bad block-table entry: its bytes must not count (they are zeros)
};

/// Zeros replace token t of a decoded tile of V.
inline void clear_values(const std::vector<QuadClass>& classes, int t, float* tile) {
  for (const QuadClass& quads : classes) {
    for (const std::int32_t base : quads.base) {
      for (const std::int32_t dim : quads.dim) tile[base + quads.token[t] + dim] = 0.0f;
    }
  }
}

/// Up to kChunkTokens tokens; token `begin` is the first of tile 0.
struct Chunk {
  int begin = 0;
  int end = 0;
  int tiles = 0;
  bool excluded = false;  ///< some tile is
  Tile tile[kChunkTiles];
};

/// Fetches the tiles of the next chunk, a few cache lines at a time, so that memory is busy while kernels
/// compute: a burst would wait for free line buffers, and no prefetcher in hardware follows the order in
/// which tiles are read. Into the second-level cache: a chunk would fill the first.
class Prefetcher {
 public:
  /// `calls`: how often advance() will be called for this chunk.
  void begin(const Layer& layer, const Chunk& chunk, int calls) {
    if (!layer.paged) return;
    for (int i = 0; i < chunk.tiles; ++i) tile_[chunk.tiles - 1 - i] = chunk.tile[i].k - layer.k.data_offset;
    left_ = chunk.tiles;
    bytes_ = layer.plan->layout.tile_bytes;
    const std::int64_t lines = (bytes_ / kLine + 1) * left_;
    step_ = (lines + calls - 1) / calls * kLine;
    next_tile();
  }

  void advance() {
    const std::uint8_t* const at = at_;
    if (at >= end_) return;
    const std::int64_t step = step_;
    for (std::int64_t i = 0; i < step; i += kLine)
      __builtin_prefetch(at + i, 0, 2);  // may pass the end: harmless
    at_ = at + step;
    if (at_ >= end_ && left_ > 0) next_tile();
  }

 private:
  static constexpr std::int64_t kLine = 64;
  void next_tile() {
    at_ = tile_[--left_];
    end_ = at_ + bytes_;
  }
  const std::uint8_t* tile_[kChunkTiles];
  const std::uint8_t* at_ = nullptr;
  const std::uint8_t* end_ = nullptr;
  std::int64_t bytes_ = 0;
  std::int64_t step_ = 0;
  int left_ = 0;
};

/// Finds chunks. Reads no block-table entry outside their range.
class TileFinder {
 public:
  TileFinder(const Layer& layer, const Item& item, Scratch& scratch)
      : layer_(layer), item_(item), scratch_(scratch) {
    if (layer.paged) table_ = layer.table + item.request * layer.table_stride;
  }

  /// The chunk that begins at `begin`: to the next multiple of `tokens` or the item's end.
  void find(int begin, Chunk& chunk, int tokens = kChunkTokens) const {
    find_range(begin, std::min(item_.kv_end, begin / tokens * tokens + tokens), chunk);
  }

  /// Tokens [begin, end) of the request, a chunk at most.
  void find_range(int begin, int end, Chunk& chunk) const {
    chunk.begin = begin;
    chunk.end = end;
    chunk.tiles = (end - begin + kTileTokens - 1) / kTileTokens;
    chunk.excluded = false;
    for (int i = 0; i < chunk.tiles; ++i) {
      if (layer_.paged) {
        paged(begin + i * kTileTokens, chunk.tile[i]);
      } else {
        plain(begin + i * kTileTokens, chunk.tile[i]);
      }
      chunk.excluded |= chunk.tile[i].excluded;
    }
  }

 private:
  void paged(int token, Tile& t) const {
    const std::int64_t page = table_[token >> layer_.page_log2];
    t.excluded = page < 0 || page >= layer_.num_pages;
    if (t.excluded) scratch_.excluded = true;
    const int within = token & ((1 << layer_.page_log2) - 1);
    const std::uint8_t* tile = t.excluded ? kZeros
                                          : layer_.pages + page * layer_.page_stride +
                                                page::tile_offset(layer_.plan->layout, item_.kv_head, within);
    t.k = tile + layer_.k.data_offset;
    t.v = tile + layer_.v.data_offset;
    t.k_params = tile + layer_.k.param_offset;
    t.v_params = tile + layer_.v.param_offset;
    t.k_stride = layer_.k.token_bytes;
    t.v_stride = layer_.v.token_bytes;
  }

  void plain(int token, Tile& t) const {
    t.excluded = false;
    t.k_params = t.v_params = nullptr;
    t.k_stride = layer_.k.token_bytes;
    t.v_stride = layer_.v.token_bytes;
    t.k = layer_.k.plain + (item_.kv_first + token) * t.k_stride + item_.kv_head * layer_.k.head_bytes;
    t.v = layer_.v.plain + (item_.kv_first + token) * t.v_stride + item_.kv_head * layer_.v.head_bytes;
    const int live = item_.kv_len - token;
    if (live >= kTileTokens) return;
    copy_tail(layer_.k, live, t.k, t.k_stride, scratch_.k_tail);
    copy_tail(layer_.v, live, t.v, t.v_stride, scratch_.v_tail);
  }

  /// Replaces a tile that reaches beyond the last token by a copy that ends in zeros.
  static void copy_tail(const Side& side, int live, const std::uint8_t*& data, std::int64_t& stride,
                        std::uint8_t* copy) {
    const std::int64_t bytes = std::int64_t{side.dim} * unit_bytes(side.element);
    for (int t = 0; t < live; ++t) {
      std::memcpy(copy + t * bytes, data + t * stride, static_cast<std::size_t>(bytes));
    }
    std::memset(copy + live * bytes, 0, static_cast<std::size_t>((kTileTokens - live) * bytes));
    data = copy;
    stride = bytes;
  }

  // K and V of a tile of kMaxDim dims in 16 bits, or with their params in fewer, and what is read beyond
  // them.
  alignas(64) static constexpr std::uint8_t kZeros[4 * kTileTokens * kMaxDim + 4 * 1024] = {};

  const Layer& layer_;
  const Item& item_;
  Scratch& scratch_;
  const std::int32_t* table_ = nullptr;
};

}  // namespace halftone::cpu
