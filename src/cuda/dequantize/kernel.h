// A cache back to rows of floats, request after request.
//
// A unit is a tile of a KV head: a warp reads it in the order of the page and writes up to 16 rows. The
// lengths are known only here, so every CTA runs over them, kRequests at a time, and its warps take their
// share of the units as they come by.
#pragma once

#include "cuda/dequantize/params.h"
#include "cuda/device/chunk.h"
#include "cuda/device/rotate.h"
#include "cuda/device/values.h"

namespace halftone::cuda {

inline constexpr int kDequantizeWarps = 8;
inline constexpr int kRequests = kDequantizeWarps * 32;

/// Running sums over the requests at hand, their own share included.
struct DequantizeShared {
  std::int64_t tiles[kRequests], rows[kRequests];
  std::int64_t warp_tiles[kDequantizeWarps], warp_rows[kDequantizeWarps];
};

__device__ __forceinline__ std::int64_t scan_warp(std::int64_t x) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1  // once for many requests: code is dearer
  for (int i = 1; i < 32; i *= 2) {
    const std::int64_t before = __shfl_up_sync(~0u, x, i);
    if (lane >= i) x += before;
  }
  return x;
}

/// Fills `s` for requests `first` and up.
__device__ __forceinline__ void place_requests(const DequantizeParams& p, std::int64_t first,
                                               DequantizeShared& s) {
  const int warp = threadIdx.x / 32;
  const std::int64_t request = first + threadIdx.x;
  const std::int64_t length = request < p.batch ? max(__ldg(p.lengths + request), 0) : 0;
  const std::int64_t each = p.row_tokens;
  std::int64_t rows = scan_warp((length + each - 1) & -each),
               tiles = scan_warp((length + kTileTokens - 1) / kTileTokens);
  __syncthreads();  // the readers of the requests before are done
  if (threadIdx.x % 32 == 31) s.warp_rows[warp] = rows, s.warp_tiles[warp] = tiles;
  __syncthreads();
#pragma unroll 1
  for (int w = 0; w < warp; ++w) rows += s.warp_rows[w], tiles += s.warp_tiles[w];
  s.rows[threadIdx.x] = rows;
  s.tiles[threadIdx.x] = tiles;
  __syncthreads();
}

/// The request at hand that tile `tile` of them belongs to.
__device__ __forceinline__ int request_at(const DequantizeShared& s, std::int64_t tile) {
  int low = 0;  // as many requests as end at or before the tile
#pragma unroll 1
  for (int step = kRequests / 2; step > 0; step /= 2) {
    if (s.tiles[low + step - 1] <= tile) low += step;
  }
  return low;
}

/// A lane's chunks of a row, one of each half.
template <int kHalves>
using RowChunks = float[kHalves][kChunk];

template <int kHalves>
__device__ __forceinline__ void rotate_chunks(int dim, RowChunks<kHalves>& x) {
  if constexpr (kHalves == 2) {
    rotate_halves(x[0], x[1]);
  } else {
    rotate_row(dim, x[0]);
  }
}

/// A tile of a KV head, or its first tokens, and where its rows go.
struct TilePlace {
  std::int64_t row;
  int count;  // of its tokens that are wanted
  int head;
  std::int64_t request;
  std::int64_t position;  // of its first token
};

/// Where rows go: to the caller's tensor, in his basis. One with take_tile() takes whole tiles instead, with
/// zero_tile() also those that are missing.
struct RowsOut {
  const DequantizeParams& p;

  /// Of all lanes that have the row; `live` ones have chunk `chunk` of its halves. `row` < 0: it is not
  /// wanted.
  template <int kHalves, class Codes>
  __device__ __forceinline__ void take(const Codes (&)[kHalves], const codec::Params&, RowChunks<kHalves>& x,
                                       std::int64_t row, int head, int chunk, bool live) const {
    if (p.part.rotated) rotate_chunks<kHalves>(p.part.dim, x);
    if (!live || row < 0) return;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) store(row, head, chunk + h * kHalfChunks, x[h]);
  }
  __device__ __forceinline__ void store(std::int64_t row, int head, int chunk,
                                        const float (&x)[kChunk]) const {
    const std::int64_t at = row * p.row_stride + head * p.head_stride + chunk * kChunk;
    if (p.aligned) {
      store_values(p.out_type, p.out, at, x);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) store_value(p.out_type, p.out, at + i, x[i]);
    }
  }
  __device__ __forceinline__ void zero(std::int64_t row, int head, int chunk) const {
    const float none[kChunk] = {};
    store(row, head, chunk, none);
  }
};

/// The same of a K whose channels are treated.
struct ChannelRowsOut : RowsOut {
  template <int kHalves, class Codes>
  __device__ __forceinline__ void take(const Codes (&)[kHalves], const codec::Params&, RowChunks<kHalves>& x,
                                       std::int64_t row, int head, int chunk, bool live) const {
    if (p.part.rotated) rotate_chunks<kHalves>(p.part.dim, x);
    if (!live || row < 0) return;
#pragma unroll
    for (int h = 0; h < kHalves; ++h, chunk += kHalfChunks) {
      const std::int64_t first = std::int64_t{head} * p.part.dim + chunk * kChunk;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[h][i] = p.channels.restored(x[h][i], first + i);
      store(row, head, chunk, x[h]);
    }
  }
};

/// `kRecords`: of a latent cache, whose tile is 16 records. `kHalves`: 2 for wide rows of others.
template <DType kType, bool kAsymmetric, bool kRecords, class Out = RowsOut, int kHalves = 1>
struct Dequantizer {
  using Load = ChunkLoad<kType, kAsymmetric>;
  static constexpr bool kQuantised = Load::kBits != 16;

  const DequantizeParams& p;
  DequantizeShared& s;
  Out out;
  int lanes;  // of a row, idle ones included
  int chunk;  // this lane's 8 dims of a row, or of its first half
  bool live;  // false: beyond the row's dims
  ChunkPlace place[kHalves];

  __device__ __forceinline__ Dequantizer(const DequantizeParams& params, DequantizeShared& shared, Out rows)
      : p(params),
        s(shared),
        out(rows),
        lanes(lanes_of(p.part.dim)),
        chunk(threadIdx.x % 32 & (lanes - 1)),
        live(chunk < p.part.dim / kChunk) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) place[h] = ChunkPlace(p.part, chunk + h * kHalfChunks, Load::kBits);
  }

  __device__ __forceinline__ void run() {
    const std::int64_t step = std::int64_t{gridDim.x} * kDequantizeWarps;
    const std::int64_t begin = std::int64_t{blockIdx.x} * kDequantizeWarps + threadIdx.x / 32;
    std::int64_t unit = begin, tiles = 0, rows = 0;
    for (std::int64_t first = 0; first < p.batch && rows < p.rows; first += kRequests) {
      place_requests(p, first, s);
      for (; unit < (tiles + s.tiles[kRequests - 1]) * p.kv_heads; unit += step) {
        const std::int64_t tile = unit / p.kv_heads;
        if (!take(first, rows, tile - tiles, static_cast<int>(unit - tile * p.kv_heads))) break;
      }
      tiles += s.tiles[kRequests - 1];
      rows += s.rows[kRequests - 1];
    }
    if (!p.clears_rest) return;
    for (unit = rows * p.kv_heads + begin; unit < p.rows * p.kv_heads; unit += step) {
      const std::int64_t row = unit / p.kv_heads;
      zero(row, 1, static_cast<int>(unit - row * p.kv_heads));
    }
  }

 private:
  /// One head of tile `tile` of the requests from `first` on, whose rows begin at `row`. False if the output
  /// ends before it.
  __device__ __forceinline__ bool take(std::int64_t first, std::int64_t row, std::int64_t tile, int head) {
    const int at = request_at(s, tile);
    const std::int64_t skipped = at > 0 ? s.rows[at - 1] : 0;
    const std::int64_t index = tile - (at > 0 ? s.tiles[at - 1] : 0), position = index * kTileTokens;
    row += skipped + position;
    const std::int64_t length = max(__ldg(p.lengths + first + at), 0);
    const std::int64_t left = min(length - position, p.rows - row);
    const int count = static_cast<int>(min(left, std::int64_t{kTileTokens}));
    if (count <= 0) return false;
    const std::int64_t entry = position >> p.page_log2;
    const std::int64_t page =
        entry < p.table_width ? __ldg(p.block_table + (first + at) * p.table_stride + entry) : -1;
    if (page < 0 || page >= p.num_pages) {
      zero(row, count, head);
    } else {
      const int offset = static_cast<int>(position & ((1 << p.page_log2) - 1));
      const std::uint8_t* bytes = p.pages + page * p.page_stride + page::tile_offset(p.layout, head, offset);
      if constexpr (kRecords) {
        read_records(bytes, offset / kTileTokens, row, count);
      } else if constexpr (requires { out.take_tile(bytes, TilePlace{}); }) {
        out.take_tile(bytes, TilePlace{row, count, head, first + at, position});
      } else {
        read(bytes, row, count, head);
      }
    }
    return true;
  }

  __device__ __forceinline__ void read(const std::uint8_t* tile, std::int64_t row, int count, int head) {
    const int together = 32 / lanes, own = threadIdx.x % 32 / lanes;
#pragma unroll 1
    for (int first = 0; first < 4 && 2 * first < count; first += together) {
      const int t = first + own;
      typename Load::Codes codes[kHalves][kLaneRows] = {};
      codec::Params params[kHalves][kLaneRows] = {};
      if (live) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          Load(place[h]).load(tile + p.part.data_offset, t, codes[h]);
          if (!kQuantised) continue;
          const std::int64_t at = std::int64_t{head} * p.static_stride;
          load_params<kAsymmetric>(p.part, p.static_scale + at, p.static_min + at, tile, t,
                                   group_of(chunk + h * kHalfChunks), params[h]);
        }
      }
#pragma unroll 1
      for (int k = 0; k < kLaneRows; ++k) {
        float x[kHalves][kChunk];
        typename Load::Codes own_codes[kHalves];
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          own_codes[h] = codes[h][0];
          own_codes[h].decode(params[h][0], x[h]);
        }
        const int token = lane_token(t, k);
        out.template take<kHalves>(own_codes, params[0][0], x, token < count ? row + token : -1, head, chunk,
                                   live);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
#pragma unroll
          for (int i = 0; i + 1 < kLaneRows; ++i) {
            codes[h][i] = codes[h][i + 1], params[h][i] = params[h][i + 1];
          }
        }
      }
    }
  }

  __device__ __forceinline__ int group_of(int of) const {
    return p.part.groups > 1 ? of * kChunk / p.part.format.group_size : 0;
  }

  __device__ __forceinline__ void read_records(const std::uint8_t* tile, int before, std::int64_t row,
                                               int count) {
    constexpr int kWords = Load::kBits / 4;
    const int chunks = p.part.dim / kChunk, width = p.part.dim / max(p.part.groups, 1);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count * chunks; i += 32) {
      const int t = i / chunks, c = i % chunks;
      const auto* from = reinterpret_cast<const std::uint32_t*>(
          tile + p.part.data_offset + std::int64_t{t} * p.part.row_bytes + c * kWords * 4);
      Chunk<kType, kAsymmetric> codes;
#pragma unroll
      for (int w = 0; w < kWords; ++w) codes.words[w] = __ldg(from + w);
      codec::Params params;
      if (kQuantised) {
        const int g = c * kChunk / width;
        params.scale = load_param(p.part.format.scale_dtype, tile + p.part.scale_offset(before, t, g));
        if (kAsymmetric) {
          params.min = load_param(p.part.format.scale_dtype, tile + p.part.min_offset(t, g));
        }
      }
      float x[kChunk];
      codes.decode(params, x);
      out.store(row + t, 0, c, x);
    }
  }

  __device__ __forceinline__ void zero(std::int64_t row, int count, int head) {
    if constexpr (requires { out.zero_tile(row, head); }) {
      out.zero_tile(row, head);
      return;
    } else {
      zero_rows(row, count, head);
    }
  }
  __device__ __forceinline__ void zero_rows(std::int64_t row, int count, int head) {
    const int chunks = p.part.dim / kChunk;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count * chunks; i += 32) {
      out.zero(row + i / chunks, head, i % chunks);
    }
  }
};

}  // namespace halftone::cuda
