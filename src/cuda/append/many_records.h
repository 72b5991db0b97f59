// Records of many tokens, whose latents load early: a warp has four, a lane a chunk of each half of all of
// them, so that four lanes next to each other find the scales of one token each (ranges.h).
#pragma once

#include "cuda/append/ranges.h"
#include "cuda/append/record.h"

namespace halftone::cuda {

inline constexpr int kManyTokens = 4;  // of a warp
static_assert(kManyTokens << kRotarySegment <= 32);

/// The requests of a warp's tokens, of which lane 0 has the first: often one, or in a decode step those that
/// have the tokens' numbers.
__device__ inline std::int32_t near_request_of(const std::int32_t* cu_seqlens, std::int32_t batch,
                                               std::int64_t token) {
  if (batch == 0) return 0;  // whose tokens are all padding
  const auto at = static_cast<std::int32_t>(min(token, std::int64_t{0x7fffffff}));
  if (__all_sync(~0u, at < batch && cu_seqlens[at] <= at && at < cu_seqlens[at + 1])) return at;
  const std::int32_t request = last_begun(cu_seqlens, batch, __shfl_sync(~0u, at, 0));
  return at < cu_seqlens[request + 1] ? request : request_of(cu_seqlens, batch, at);
}

/// Loads, slots, latents, rotary dims. The rotary ones come last, for RoPE needs as many registers as
/// latents.
template <DType kType, bool kAsymmetric>
struct ManyRecords {
  static constexpr int kBits = dtype_bits(kType);
  using Codec = codec::Codec<kType, kAsymmetric>;
  using Ranges = SharedRanges<!kAsymmetric>;
  // Those of an f16 scale are any scale's of values that append accepts: no inverse is too small for them.
  using Codes = ChunkCodes<Codec, kType, true>;

  const AppendParams& p;
  const AppendPart& part;
  std::int64_t first;
  int lane, chunks;
  uint4 raw[kPieces][kManyTokens];
  RecordPlace own;                // of the lane's token, Ranges::token_of()
  unsigned wanted;                // tokens that are not skipped, a bit each
  std::uint8_t* to[kManyTokens];  // codes of the lane's first chunk

  /// Tokens from `at` on, or the last ones: what several warps have they write alike.
  __device__ __forceinline__ ManyRecords(const AppendParams& params, std::int64_t at)
      : p(params),
        part(params.parts[0]),
        first(min(at, params.tokens - kManyTokens)),
        lane(threadIdx.x % 32),
        chunks(chunks_of(part)) {}

  __device__ __forceinline__ void run() {
    load();
    const int segment = lane >> kRotarySegment, rotary_chunks = chunks_of(p.parts[1]);
    const int chunk = lane & ((1 << kRotarySegment) - 1);
    const uint4 rotary = load_early(p.parts[1], first + segment, min(chunk, rotary_chunks - 1));
    own = place_of(first + Ranges::token_of(lane));
    wanted = 0;
    const unsigned exist = __ballot_sync(~0u, own.codes != nullptr);
#pragma unroll
    for (int k = 0; k < kManyTokens; ++k) {
      wanted |= (exist >> Ranges::token_of(k) & 1) << k;
      to[k] = shuffled(own.codes, Ranges::token_of(k)) + lane * kBits;
    }
    if (part.input_type == DType::kBFloat16) {
      write<true>();
    } else {
      write<false>();
    }
    append_rotary<AnyRecord<true>>(p, first + segment, shuffled(own.codes, Ranges::token_of(segment)),
                                   rotary);
  }

 private:
  static __device__ __forceinline__ int chunks_of(const AppendPart& of) {
    return static_cast<unsigned>(of.part.dim) / kChunk;  // a shift
  }

  /// Lanes beyond a row have its last chunk again, which changes no extent.
  __device__ __forceinline__ void load() {
    const auto* row = static_cast<const std::uint16_t*>(part.input) + first * part.token_stride;
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      if (!has(h)) break;
      const std::uint16_t* from = row + min(h * 32 + lane, chunks - 1) * kChunk;
#pragma unroll
      for (int k = 0; k < kManyTokens; ++k, from += part.token_stride) {
        raw[h][k] = __ldg(reinterpret_cast<const uint4*>(from));
      }
    }
  }

  __device__ __forceinline__ RecordPlace place_of(std::int64_t token) const {
    // By all lanes, before some may have a token that is skipped.
    const std::int32_t request = p.cu_seqlens == nullptr ? 0 : near_request_of(p.cu_seqlens, p.batch, token);
    return {p, slot_of(p, token, [request](auto...) { return request; })};
  }

  /// Whether rows have a half h.
  __device__ __forceinline__ bool has(int h) const { return h == 0 || chunks > h * 32; }
  /// The tokens whose chunk of half h the lane writes, a bit each.
  __device__ __forceinline__ unsigned writes(int h) const { return h * 32 + lane < chunks ? wanted : 0; }

  template <bool kBFloat16>
  __device__ __forceinline__ void write() {
    if constexpr (kBits == 16) {
      copy<kBFloat16 ? DType::kBFloat16 : DType::kFloat16>();
    } else {
      quantise<kBFloat16>();
    }
  }

  /// 16-bit codes: what came in, if that is what the cache holds and append accepts it.
  template <DType kInput>
  __device__ __forceinline__ void copy() {
    bool same = kType == kInput;
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
#pragma unroll
      for (int k = 0; k < kManyTokens; ++k) same &= !has(h) || is_accepted<kInput>(raw[h][k]);
    }
    same = __all_sync(~0u, same);
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      if (!has(h)) break;
      if (same) {
#pragma unroll
        for (int k = 0; k < kManyTokens; ++k) {
          const uint4 x = raw[h][k];
          if (writes(h) >> k & 1) *reinterpret_cast<uint4*>(to[k] + h * 32 * kBits) = x;
        }
      } else {
        each_token(h, [&](const float(&x)[kChunk], int k) {
          if (writes(h) >> k & 1) extent_of<true>(p, x);
          return codec::Params{};
        });
      }
    }
  }

  template <bool kBFloat16>
  __device__ __forceinline__ void quantise() {
    codec::Range range[kPieces];
    measure<kBFloat16, true>(range);
    bool accepted = true;
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      if (!has(h)) break;
      accepted &= range[h].hi <= codec::kMaxInput && (!kAsymmetric || -range[h].lo <= codec::kMaxInput);
    }
    const bool all_accepted = __all_sync(~0u, accepted);
    if (!all_accepted) {
      if (!accepted && own.codes != nullptr) set_status(p, kStatusNonFinite);
      measure<kBFloat16, false>(range);
    }
    codec::Params found[kPieces];
    const bool within = find_params(range, found) && all_accepted;
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      if (has(h)) encode<kBFloat16>(h, found[h], within);
    }
  }

  /// The extents of the groups of both halves. `kNan`: as of Ranges.
  template <bool kBFloat16, bool kNan>
  __device__ __forceinline__ void measure(codec::Range (&range)[kPieces]) const {
    const bool whole = part.part.groups == 1;
    Ranges of[kPieces];
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      if (!has(h)) break;
      of[h].template measure<kBFloat16, kNan>(raw[h], true);
      if (h > 0 && whole) of[0].template include<kBFloat16, kNan>(of[h]);
    }
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      if (h > 0 && whole) {
        range[h] = range[0];
      } else if (has(h)) {
        range[h] = of[h].template range<kBFloat16, kNan>(lane, part.group_log2);
      }
    }
  }

  /// Finds and stores the params of the groups of the lane's chunks, those of its token. Where eight lanes or
  /// more share a scale, lanes 0 to 3 of eight do so for the first half, the others for the second one. True:
  /// no value needs a limit.
  __device__ __forceinline__ bool find_params(const codec::Range (&range)[kPieces],
                                              codec::Params (&found)[kPieces]) const {
    static_assert(kPieces == 2);
    const bool shares = has(1) && part.group_log2 >= 3, upper = lane & 4;
    const int finders = shares ? 8 : 4;  // lanes of a group that store params
    bool within = true;
#pragma unroll 1
    for (int pass = 0; pass < (has(1) && !shares ? 2 : 1); ++pass) {
      const bool second = shares ? upper : pass == 1;
      const codec::Range mine{second ? range[1].lo : range[0].lo, second ? range[1].hi : range[0].hi};
      const DType type = part.part.format.scale_dtype;
      const codec::Params params = record_params<kType, kAsymmetric>(type, mine);
      within &= Codes::within(params, mine);
      const int chunk = second ? 32 + lane : lane, in_group = chunk & ((1 << part.group_log2) - 1) & 31;
      if (own.codes != nullptr && in_group < finders && chunk < chunks) {
        const int group = chunk >> part.group_log2;
        store_params<kAsymmetric>(type, part.part, params, own.scales + group * part.part.param_group);
      }
      if (!second) found[0] = params;
      if (second || pass == 0) found[1] = params;
    }
    if (shares) {
      const codec::Params mine = found[1];
      codec::Params other;
      other.inverse = __shfl_xor_sync(~0u, mine.inverse, 4);
      if (kAsymmetric) other.min = __shfl_xor_sync(~0u, mine.min, 4);
      found[0] = upper ? other : mine, found[1] = upper ? mine : other;
    }
    return __all_sync(~0u, within);
  }

  /// `within`: no value needs a limit.
  template <bool kBFloat16>
  __device__ __forceinline__ void encode(int h, const codec::Params& found, bool within) {
    const auto params_of = [&](int token) {  // found by one of four lanes
      const int from = Ranges::token_of(token);
      codec::Params of;
      of.inverse = __shfl_sync(~0u, found.inverse, from, 4);
      if (kAsymmetric) of.min = __shfl_sync(~0u, found.min, from, 4);
      return of;
    };
    if (kType == DType::kFloat8E4M3 || within) {
#pragma unroll
      for (int k = 0; k < kManyTokens; ++k) {
        float x[kChunk];
        unpack(raw[h][k], kBFloat16, x);
        Codes codes;
        codes.template encode<true>(params_of(k), x);
        if (writes(h) >> k & 1) store_codes(codes, to[k] + h * 32 * kBits);
      }
    } else {
      each_token(h, [&](const float(&)[kChunk], int k) { return params_of(k); });
    }
  }

  /// Codes of half h one token after another, in the least code. `params_of(x, k)`: those of token k.
  template <class ParamsOf>
  __device__ __forceinline__ void each_token(int h, const ParamsOf& params_of) {
#pragma unroll 1
    for (int k = 0; k < kManyTokens; ++k) {
      float x[kChunk];
      unpack(raw[h][0], part.input_type == DType::kBFloat16, x);
      ChunkCodes<Codec, kType, false> codes;
      codes.encode(params_of(x, k), x);
      if (writes(h) >> k & 1) store_codes(codes, to[0] + h * 32 * kBits);
      std::uint8_t* const done = to[0];
#pragma unroll
      for (int next = 0; next + 1 < kManyTokens; ++next) {
        raw[h][next] = raw[h][next + 1], to[next] = to[next + 1];
      }
      to[kManyTokens - 1] = done;
    }
  }
};

}  // namespace halftone::cuda
