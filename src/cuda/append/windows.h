// Quantise and write new tokens, many at a time.
//
// A CTA has a window of 16 appended tokens, or a part of it where rows are long: a lane holds a chunk of 8
// dims of 4 tokens at places 2t, 2t + 1, 2t + 8, 2t + 9, whose codes share words of V. A warp takes a KV
// head. A window owns the whole tile that begins in it: 16 tokens in a row, into the 16 places of one tile.
// These are written with wide stores; any other token of the window only touches bytes of its own.
#pragma once

#include <bit>

#include "cuda/append/ranges.h"
#include "cuda/append/slots.h"
#include "cuda/append/store.h"

namespace halftone::cuda {

inline constexpr int kGroupHeads = 8;   // of a CTA
inline constexpr int kAppendWarps = 4;  // each with two heads of these, one after the other
inline constexpr int kMeetWarps = 8;    // where heads share a scale: all of a token are in one CTA
inline constexpr int kLaneTokens = 4;

/// Where the scale of a row comes from.
enum class AppendScale : std::uint8_t {
  kGiven,   // from the caller; 16-bit formats need none
  kRow,     // one or several of the row
  kToken,   // of all KV heads of a token
  kEither,  // kToken or, with a scale per row, kRow, as the part says
};

/// `kDims`: of all rows, `kGroupLanes`: that share a scale; 0: as the part says.
template <DType kDType, bool kIsAsymmetric, AppendScale kFrom, RowKind kOf, int kDims = 0,
          int kGroupLanes = 0>
struct AppendTraits {
  static constexpr DType kType = kDType;
  static constexpr bool kAsymmetric = kIsAsymmetric;
  static constexpr AppendScale kScale = kFrom;
  static constexpr RowKind kKind = kOf;
  static constexpr int kDim = kDims;
  static constexpr bool kPlain = kKind == RowKind::kPlain, kAny = kKind == RowKind::kAny;
  static constexpr bool kQuantised = dtype_bits(kDType) != 16;
  // Lanes store each other's chunks: not within attention, where stores are few and registers, too.
  static constexpr bool kTogether = kDims == 0;
  using Codec = codec::Codec<kType, kAsymmetric>;
  static constexpr bool kComputes = kScale != AppendScale::kGiven;
  using Codes = ChunkCodes<Codec, kType, !kAny && kComputes>;
  using Store = ChunkStore<Codes, kType, kAny || kDims % 32 != 0>;
  using Params = ParamStore<kAsymmetric, !kAny>;

  /// The caller's scale and min of a head; codec::static_params() makes them params.
  static __device__ __forceinline__ float2 given(const AppendPart& part, int head) {
    if (kScale != AppendScale::kGiven || !kQuantised) return {1.0f, 0.0f};
    const std::int64_t at = head * part.static_stride;
    return {__ldg(part.static_scale + at), kAsymmetric ? __ldg(part.static_min + at) : 0.0f};
  }

  static __device__ __forceinline__ int group_log2(const AppendPart& part) {
    return kGroupLanes > 0 ? std::countr_zero(unsigned{kGroupLanes}) : part.group_log2;
  }

  static __device__ __forceinline__ codec::Params params_of(const AppendPart& part,
                                                            const codec::Range& range) {
    KvFormat format;
    format.dtype = kType;
    format.asymmetric = kAsymmetric;
    format.scale_dtype = kAny ? part.part.format.scale_dtype : DType::kFloat16;
    return codec::params_of(format, range);
  }
};

struct AppendShared {
  std::int64_t slots[kSlots + 2];
  Window window;
  float low[kMeetWarps][kWindow], high[kMeetWarps][kWindow];  // the extents of a warp's heads
};

/// K or V of a window. blockIdx.x: window and part of it, blockIdx.y: group of KV heads. Plain appends have
/// an appender for K and one for V, the others one for both. `kHalves`: 2 for wide rows.
template <class Traits, KvPart kWhich = KvPart::kK, int kHalves = 1>
struct Appender {
  using Codes = typename Traits::Codes;
  static constexpr int kChunks = kLaneTokens * kHalves;  // of a lane
  static constexpr bool kMeets = Traits::kScale == AppendScale::kToken;
  /// The four lanes next to each other find a scale each for all of them.
  static constexpr bool kShares = Traits::kPlain && Traits::kQuantised && Traits::kScale == AppendScale::kRow;
  using Ranges = SharedRanges<!Traits::kAsymmetric>;

  const AppendParams& p;
  const AppendPart& part;
  AppendShared& s;
  RowLane lane;
  int t, warp, warps;
  Rows<Traits::kType, kLaneTokens, Traits::kKind, 0, kHalves> rows;

  __device__ __forceinline__ Appender(const AppendParams& params, const AppendPart& of, AppendShared& shared)
      : p(params), part(of), s(shared), lane(of), warp(threadIdx.x / 32), warps(blockDim.x / 32) {}

  /// Token k of a lane within its 16.
  __device__ __forceinline__ int token_of(int k) const { return 2 * t + decltype(rows)::away(k); }

  __device__ __forceinline__ void run() {
    const int splits_log2 = part.segment_log2 - 3, split = blockIdx.x & ((1 << splits_log2) - 1);
    const std::int64_t first = std::int64_t{blockIdx.x >> splits_log2} * kWindow;
    t = (split << (2 - splits_log2)) + (lane.segment_first >> part.segment_log2);
    const int group_heads = kMeets ? p.kv_heads : kGroupHeads;
    const int head = static_cast<int>(blockIdx.y) * group_heads + warp;
    const int end = min(p.kv_heads, static_cast<int>(blockIdx.y + 1) * group_heads);
    if (head < end) load(first, head);
    const Window window = find_window(first);
    if (head >= end) return;  // never where heads meet
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // loose tokens, the tile
      const bool tile = pass == 1;
      if (tile ? window.tile < 0 : window.loose == 0) continue;
      const int shift = tile ? window.tile : 0;
      const unsigned wanted = wanted_of(tile ? (1u << kWindow) - 1 : window.loose);
      const Target target{wanted, s.slots + kWindow - 1 + shift, tile ? window.bytes : nullptr};
      if (shift > 0) load(first + shift, head);
      if constexpr (kMeets) {
        take_tokens(first + shift, head, target);
      } else {
#pragma unroll 1
        for (int of = head; of < end; of += warps) {
          rows.transform(p, part, lane, of, wanted);
          Ranges ranges;
          if constexpr (kShares) measure(ranges);
          if (of + warps < end) rows.load_next(part, lane, warps);
          if constexpr (kShares) {
            write_shared(ranges, of, target);
          } else {
            write(params_of_rows(of, wanted), of, target);
          }
        }
      }
    }
  }

 private:
  /// Where 16 tokens go.
  struct Target {
    unsigned wanted;            // of the lane's tokens, a bit each
    const std::int64_t* slots;  // of the 16
    std::uint8_t* tile;         // of KV head 0, if they fill one
  };
  struct LaneParams {
    codec::Params of[kChunks];
  };
  struct LaneRanges {
    codec::Range of[kChunks];
  };

  __device__ __forceinline__ Window find_window(std::int64_t first) {
    for (int i = threadIdx.x; i < kSlots; i += blockDim.x) {
      s.slots[i] = slot_of<request_of>(p, first - kWindow + 1 + i);
    }
    __syncthreads();
    if (warp == 0) {
      const Window window = window_of(p, s.slots);
      if (threadIdx.x == 0) s.window = window;
    }
    __syncthreads();
    return s.window;
  }

  /// Those of 16 tokens that are the lane's, bit k for its token k.
  __device__ __forceinline__ unsigned wanted_of(unsigned tokens) const {
    const unsigned mine = tokens >> 2 * t;
    return (mine & 3) | (mine >> 6 & 12);
  }

  /// Issues the loads of a lane's tokens of the 16 from `first` on.
  __device__ __forceinline__ void load(std::int64_t first, int head) {
    rows.first = first + token_of(0);
    rows.load(p, part, lane, head);
  }

  __device__ __forceinline__ LaneParams params_of_rows(int head, unsigned wanted) const {
    LaneParams params;
    if constexpr (Traits::kScale == AppendScale::kGiven) {
      if (Traits::kPlain && Traits::kQuantised) rows.check(p, part, wanted);
      const float2 given = Traits::given(part, head);
      params.of[0] = codec::static_params(given.x, given.y);
      if (Traits::kQuantised) check_given(p, params.of[0], wanted != 0);
#pragma unroll
      for (int c = 1; c < kChunks; ++c) params.of[c] = params.of[0];
    } else {
      LaneRanges ranges;
      rows.template extents<!Traits::kAsymmetric, Traits::kPlain>(p, part, wanted, ranges.of);
      group_extents<!Traits::kAsymmetric, kHalves>(lane, part.group_log2, ranges.of);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) params.of[c] = Traits::params_of(part, ranges.of[c]);
    }
    return params;
  }

  /// One scale for all heads of a token: measures them all, then writes them. By all warps.
  __device__ __forceinline__ void take_tokens(std::int64_t first, int first_head, const Target& target) {
    LaneRanges ranges;
    LaneParams params;
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {  // measure, write
#pragma unroll 1
      for (int head = first_head; head < p.kv_heads; head += warps) {
        if (step == 0 || p.kv_heads > warps) {
          if (step > 0 || head != first_head) load(first, head);
          rows.transform(p, part, lane, head, target.wanted);
        }
        if (step == 0) {
          LaneRanges more;
          rows.template extents<!Traits::kAsymmetric, false>(p, part, target.wanted, more.of);
          group_extents<!Traits::kAsymmetric, kHalves>(lane, part.group_log2, more.of);
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            ranges.of[c].lo = fminf(ranges.of[c].lo, more.of[c].lo);
            ranges.of[c].hi = fmaxf(ranges.of[c].hi, more.of[c].hi);
          }
        } else {
          write(params, head, target);
        }
      }
      if (step == 0) {
        meet(ranges);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) params.of[c] = Traits::params_of(part, ranges.of[c]);
      }
    }
  }

  /// Extends the ranges of a warp's heads to those of all.
  __device__ __forceinline__ void meet(LaneRanges& ranges) {
    __syncthreads();  // readers of the pass before are done
    if (lane.chunk == 0) {
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) {
        s.low[warp][token_of(k)] = ranges.of[k * kHalves].lo;
        s.high[warp][token_of(k)] = ranges.of[k * kHalves].hi;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ranges.of[c].lo = fminf(ranges.of[c].lo, s.low[w][token_of(c / kHalves)]);
        ranges.of[c].hi = fmaxf(ranges.of[c].hi, s.high[w][token_of(c / kHalves)]);
      }
    }
  }

  /// What the rows' scales follow from, before the next rows take their place.
  __device__ __forceinline__ void measure(Ranges& ranges) const {
    if (part.input_type == DType::kBFloat16) {
      ranges.template measure<true>(rows.raw, lane.live);
    } else {
      ranges.template measure<false>(rows.raw, lane.live);
    }
  }

  /// Codes and params of the wanted tokens. Each lane of four finds the params of one of their tokens.
  __device__ __forceinline__ void write_shared(const Ranges& ranges, int head, const Target& target) {
    codec::Range range = part.input_type == DType::kBFloat16
                             ? ranges.template range<true>(lane.chunk, part.group_log2)
                             : ranges.template range<false>(lane.chunk, part.group_log2);
    const bool accepted =
        __all_sync(~0u, range.hi <= part.largest && (!Traits::kAsymmetric || -range.lo <= part.largest));
    if (!accepted) range = accepted_range(target.wanted);
    const codec::Params found = Traits::params_of(part, range);
    const bool within = __all_sync(~0u, !lane.live || Codes::within(found, range)) && accepted;
    Codes codes[kLaneTokens];
#pragma unroll
    for (int k = 0; k < kLaneTokens; ++k) {
      const int from = k >> 1 | (k & 1) << 1;  // of the four lanes, Ranges::token_of()
      codec::Params of;
      of.inverse = __shfl_sync(~0u, found.inverse, from, 4);
      if (Traits::kAsymmetric) of.min = __shfl_sync(~0u, found.min, from, 4);
      if (!within) Codes::limit(of, rows.x[k]);
      rows.template encode<true>(of, k, codes[k]);
    }
    codec::Params own[1] = {found};
    if (lane.live) write_chunks(lane.chunk, codes, own, head, target);
  }

  /// What Ranges would have found without NaN. Values that are not accepted set the status.
  __device__ __forceinline__ codec::Range accepted_range(unsigned wanted) const {
    LaneRanges ranges;
    rows.template extents<!Traits::kAsymmetric, true>(p, part, wanted, ranges.of);
    group_extents<!Traits::kAsymmetric>(lane, part.group_log2, ranges.of);
    const bool odd = lane.chunk & 1, upper = lane.chunk & 2;  // Ranges::token_of()
    const auto own = [odd, upper](float a, float b, float c, float d) {
      return odd ? upper ? d : c : upper ? b : a;
    };
    const codec::Range(&of)[kChunks] = ranges.of;
    return {own(of[0].lo, of[1].lo, of[2].lo, of[3].lo), own(of[0].hi, of[1].hi, of[2].hi, of[3].hi)};
  }

  /// Codes and params of the wanted tokens.
  __device__ __forceinline__ void write(const LaneParams& params, int head, const Target& target) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      codec::Params of[kLaneTokens];
      Codes codes[kLaneTokens];
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) {
        of[k] = params.of[k * kHalves + h];
        rows.encode(of[k], k * kHalves + h, codes[k]);
      }
      if (lane.live) write_chunks(lane.chunk + h * kHalfChunks, codes, of, head, target);
    }
  }

  /// A chunk of the lane's tokens, of a whole tile or each on its own. `params`: of each token, or of the
  /// lane's own.
  __device__ __forceinline__ void write_chunks(int chunk, Codes (&codes)[kLaneTokens],
                                               codec::Params (&params)[kShares ? 1 : kLaneTokens], int head,
                                               const Target& target) const {
    const typename Traits::Store store(part, Traits::kPlain ? kWhich : part.part.which, chunk);
    const int in_group = chunk & ((1 << part.group_log2) - 1), own = Ranges::token_of(chunk);
    const bool stores_params =
        kShares ? in_group < 4 : Traits::kScale != AppendScale::kGiven && in_group == 0;
    if (target.tile != nullptr && (Traits::kPlain || !store.tail())) {
      std::uint8_t* at = target.tile + head * p.head_bytes;
      store.four(codes, t, at);
      if (!stores_params) return;
      const typename Traits::Params param_store(part, chunk);
      if constexpr (kShares) {
        param_store.token(params[0], token_of(own), at);
      } else {
#pragma unroll
        for (int k = 0; k < kLaneTokens; ++k) param_store.token(params[k], token_of(k), at);
      }
      return;
    }
#pragma unroll 1
    for (int k = 0; k < kLaneTokens; ++k) {
      if (target.wanted >> k & 1) {
        const std::int64_t slot = target.slots[token_of(k)];
        const int place = static_cast<int>(slot % kTileTokens);
        std::uint8_t* at = tile_of(p, slot) + head * p.head_bytes;
        store.token(codes[0], place, at);
        if (stores_params && (!kShares || k == own)) {
          typename Traits::Params(part, chunk).token(params[0], place, at);
        }
      }
#pragma unroll
      for (int next = 0; next + 1 < kLaneTokens; ++next) {
        codes[next] = codes[next + 1];
        if constexpr (!kShares) params[next] = params[next + 1];
      }
    }
  }
};

}  // namespace halftone::cuda
