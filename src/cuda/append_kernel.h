// Quantise and write new tokens.
//
// A unit is a window of 16 appended tokens; its warps take (KV head, part of the window's tokens). A lane has
// a chunk of 8 dims of 4 tokens at places 2t, 2t + 1, 2t + 8, 2t + 9: the tokens whose codes share words of
// V. A window owns the whole tile that begins in it: 16 tokens in a row, into the 16 places of one tile.
// These are written with wide stores; any other token of the window only touches bytes of its own.
#pragma once

#include "cuda/append_store.h"

namespace halftone::cuda {

inline constexpr int kAppendWarps = 8;
inline constexpr int kWindow = kTileTokens;
inline constexpr int kSlots = 3 * kWindow - 2;  // of tokens -15 to 30 of a window: tiles that overlap with it
inline constexpr int kLaneTokens = 4;

struct AppendShared {
  std::int64_t slots[kSlots + 2];
  float low[kAppendWarps][kWindow], high[kAppendWarps][kWindow];  // the extent of a warp's heads
};

/// The request that appended token `token` belongs to.
__device__ inline std::int32_t request_of(const std::int32_t* cu_seqlens, std::int32_t batch,
                                          std::int64_t token) {
  std::int32_t low = 0, high = batch;  // cu[low] <= token < cu[high]
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return low;
}

/// Slot of an appended token, or -1 for one that is skipped: padding, or a place that does not exist (which
/// sets the status).
__device__ inline std::int64_t slot_of(const AppendParams& p, std::int64_t token) {
  if (token < 0 || token >= p.tokens) return -1;
  std::int64_t page = 0, offset = 0;
  if (p.slot_mapping != nullptr) {
    const std::int64_t slot = p.slot_mapping[token];
    if (slot < 0) return -1;
    page = slot >> p.page_log2;
    offset = slot & ((1 << p.page_log2) - 1);
  } else {
    if (token < p.cu_seqlens[0] || token >= p.cu_seqlens[p.batch]) return -1;
    const std::int32_t request = request_of(p.cu_seqlens, p.batch, token);
    const std::int64_t position = std::int64_t{p.lengths[request]} + token - p.cu_seqlens[request];
    const std::int64_t entry = position >> p.page_log2;
    page = entry >= 0 && entry < p.table_width ? p.block_table[request * p.table_stride + entry] : -1;
    offset = position & ((1 << p.page_log2) - 1);
  }
  if (page < 0 || page >= p.num_pages) {
    set_status(p, kStatusBadPage);
    return -1;
  }
  return page << p.page_log2 | offset;
}

/// What a window has to write.
struct Window {
  unsigned loose;  // its tokens outside whole tiles, a bit each
  int tile;        // token at which its whole tile begins, or -1
};

/// By a whole warp. slots[15 + i] is of token i of the window.
__device__ inline Window window_of(const std::int64_t* slots) {
  const int lane = threadIdx.x % 32;
  std::uint64_t written = 0, begins = 0, runs = 0;  // bit i: of slots[i]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = i * 32 + lane;
    const std::int64_t slot = at < kSlots ? slots[at] : -1;
    const bool some = slot >= 0;
    const bool run = some && at + 1 < kSlots && slots[at + 1] == slot + 1;
    written |= std::uint64_t{__ballot_sync(~0u, some)} << 32 * i;
    begins |= std::uint64_t{__ballot_sync(~0u, some && slot % kTileTokens == 0)} << 32 * i;
    runs |= std::uint64_t{__ballot_sync(~0u, run)} << 32 * i;
  }
  runs &= runs >> 1;
  runs &= runs >> 2;
  runs &= runs >> 4;
  const std::uint64_t tiles = begins & runs & runs >> 7;  // 15 runs in a row
  std::uint64_t covered = tiles | tiles << 1;
  covered |= covered << 2;
  covered |= covered << 4;
  covered |= covered << 8;
  constexpr std::uint32_t kMask = (1u << kWindow) - 1;
  const std::uint32_t own = static_cast<std::uint32_t>(tiles >> (kWindow - 1)) & kMask;
  return {static_cast<std::uint32_t>((written & ~covered) >> (kWindow - 1)) & kMask,
          own == 0 ? -1 : __ffs(static_cast<int>(own)) - 1};
}

__device__ inline codec::Params static_params_of(const AppendPart& part, int head) {
  const std::int64_t at = head * part.static_stride;
  return codec::static_params(part.static_scale[at], part.static_min != nullptr ? part.static_min[at] : 0.0f);
}

/// One part, K or V, of the windows of a CTA. In a window blockIdx.z and the warps walk the KV heads.
template <DType kType, bool kAsymmetric>
struct Appender {
  using Codec = codec::Codec<kType, kAsymmetric>;
  using Codes = ChunkCodes<Codec, kType>;
  static constexpr bool kQuantised = Codes::kBits != 16;

  const AppendParams& p;
  const AppendPart& part;
  AppendShared& s;
  RowLane lane;
  int warps, warp;
  uint4 raw[kLaneTokens];  // chunks, if they load early

  __device__ __forceinline__ Appender(const AppendParams& params, const AppendPart& of, AppendShared& shared)
      : p(params), part(of), s(shared) {
    const int in_warp = threadIdx.x % 32;
    lane.segment = 1 << segment_log2(part.part.dim);
    lane.chunk = in_warp & (lane.segment - 1);
    lane.segment_first = in_warp - lane.chunk;
    lane.live = lane.chunk < part.part.dim / kChunk;
    warps = blockDim.x / 32;
    warp = threadIdx.x / 32;
  }

  /// Token k of a lane within its 16.
  static __device__ int token_of(int t, int k) { return 2 * t + k % 2 + k / 2 * 8; }

  __device__ __forceinline__ void run() {
    const bool per_token = takes_tokens();
    if (per_token && blockIdx.z > 0) return;
    const int stride = per_token ? warps : warps * static_cast<int>(gridDim.z);
    const int first_head = static_cast<int>(blockIdx.z) * warps + warp;
    const int splits = lane.segment / 8;  // CTAs of a window
    const std::int64_t units = (p.tokens + kWindow - 1) / kWindow * splits;
    for (std::int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const std::int64_t first = unit / splits * kWindow;
      const int t = static_cast<int>(unit % splits) * (4 / splits) + lane.segment_first / lane.segment;
      if (first_head < p.kv_heads) load(first, t, first_head);
      __syncthreads();  // the previous unit's readers are done
      for (int i = threadIdx.x; i < kSlots; i += blockDim.x) s.slots[i] = slot_of(p, first - kWindow + 1 + i);
      __syncthreads();
      const Window window = window_of(s.slots);
#pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {  // loose tokens, the tile
        const bool tile = pass == 1;
        if (tile ? window.tile < 0 : window.loose == 0) continue;
        const int shift = tile ? window.tile : 0;
        const unsigned wanted = tile ? (1u << kWindow) - 1 : window.loose;
        if (per_token) clear_extents(t);
#pragma unroll 1
        for (int step = per_token ? 0 : 1; step < 2; ++step) {
#pragma unroll 1
          for (int head = first_head; head < p.kv_heads; head += stride) {
            if (per_token || shift > 0 || head != first_head) load(first + shift, t, head);
            take(first + shift, shift, t, head, wanted, tile, step == 0);
          }
          if (step == 0) __syncthreads();
        }
      }
    }
  }

  /// Issues the loads of a lane's tokens of the 16 from `first` on.
  __device__ __forceinline__ void load(std::int64_t first, int t, int head) {
    if (!loads_early(part)) return;
#pragma unroll
    for (int k = 0; k < kLaneTokens; ++k) {
      const std::int64_t token = first + token_of(t, k);
      raw[k] = {};
      if (lane.live && token < p.tokens) raw[k] = load_raw(part, input_offset(part, token, head), lane.chunk);
    }
  }

  /// Token k in raw[0], all tokens in turn.
  __device__ __forceinline__ void next_raw() {
#pragma unroll
    for (int k = 0; k + 1 < kLaneTokens; ++k) raw[k] = raw[k + 1];
  }

  __device__ __forceinline__ codec::Range token_range(int token) const {
    codec::Range range{s.low[0][token], s.high[0][token]};
    for (int w = 1; w < warps; ++w) range.include(codec::Range{s.low[w][token], s.high[w][token]});
    return range;
  }

  __device__ __forceinline__ codec::Params params_of(const codec::Range& range) const {
    KvFormat format = part.part.format;
    format.dtype = kType;
    format.asymmetric = kAsymmetric;
    return codec::params_of(format, range);
  }

  /// One scale for all heads of a token.
  __device__ bool takes_tokens() const {
    return kQuantised && part.part.format.granularity == Granularity::kToken;
  }

  __device__ __forceinline__ void clear_extents(int t) {
    __syncthreads();  // readers of the extents before are done
    if (lane.chunk == 0) {
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) {
        const codec::Range none;
        s.low[warp][token_of(t, k)] = kAsymmetric ? none.lo : 0.0f;
        s.high[warp][token_of(t, k)] = kAsymmetric ? none.hi : 0.0f;
      }
    }
  }

  /// Takes the wanted tokens of a head, of 16 from `first` on. `measure`: only adds to the extents of tokens
  /// over all heads; `tile`: all 16 are wanted and go into the places of one tile.
  __device__ __forceinline__ void take(std::int64_t first, int shift, int t, int head, unsigned wanted,
                                       bool tile, bool measure) {
    const int groups = part.part.groups;
    const int group_lanes = groups > 1 ? part.part.format.group_size / kChunk : lane.segment;
    const bool dynamic = part.part.format.dynamic_scale(), per_token = takes_tokens();
    const ChunkStore<Codec, kType> store(part.part, lane.chunk);
    const bool fours = kQuantised && tile && part.part.which == KvPart::kV && !store.tail;
    const std::int64_t* slots = s.slots + kWindow - 1 + shift;
    codec::Params params;
    if (kQuantised && part.part.format.static_scale()) params = static_params_of(part, head);
    Codes codes[kLaneTokens];
    std::uint8_t* at = nullptr;
#pragma unroll 1
    for (int k = 0; k < kLaneTokens; ++k, next_raw()) {
      const int token = token_of(t, k);
      const bool mine = wanted >> token & 1;
      float x[kChunk];
      load_row(p, part, lane, raw[0], first + token, head, mine, x);
      if (kQuantised && dynamic) {
        codec::Range range;
        if (measure || !per_token) range = group_range<!kAsymmetric>(lane, x, group_lanes);
        if (measure) {
          if (lane.chunk == 0) {
            s.low[warp][token] = fminf(s.low[warp][token], range.lo);
            s.high[warp][token] = fmaxf(s.high[warp][token], range.hi);
          }
          continue;
        }
        if (per_token) range = token_range(token);
        params = params_of(range);
      }
#pragma unroll
      for (int i = 0; i + 1 < kLaneTokens; ++i) codes[i] = codes[i + 1];
      codes[kLaneTokens - 1].encode(params, x);
      if (!mine || !lane.live) continue;
      const std::int64_t slot = slots[token];
      const int offset = static_cast<int>(slot & ((1 << p.page_log2) - 1)), place = offset % kTileTokens;
      at = p.pages + (slot >> p.page_log2) * p.page_stride + page::tile_offset(p.layout, head, offset);
      if (!fours) store.token(codes[kLaneTokens - 1], place, at);
      if (kQuantised && dynamic && lane.chunk % group_lanes == 0) {
        store_params(part.part, params, place, lane.chunk / group_lanes, at);
      }
    }
    if (fours && lane.live && !measure) store.v_four(codes, t, at);
  }
};

}  // namespace halftone::cuda
