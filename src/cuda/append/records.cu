// Append to a latent cache: a warp has a token, or four of many, and loads their rows before it knows their
// slots. Every step is the one that src/cpu/append.cc takes.

#include "cuda/append/params.h"
#include "cuda/append/row.h"
#include "cuda/append/slots.h"
#include "cuda/append/store.h"
#include "cuda/device/launch.h"
#include "format/codec.h"
#include "format/head_dim.h"

namespace halftone::cuda {
namespace {

constexpr int kPieces = (kMaxSpanDims / kChunk + 31) / 32;  // chunks of the latent that a lane has
constexpr int kRotarySegment = 3;                           // log2 of the lanes of a token's rotary dims
constexpr int kManyTokens = 4;                              // of a warp
constexpr int kTableLine = 32;  // entries of the block table that L2 reads at once
static_assert(kRopeDims.back() <= kChunk << kRotarySegment && kManyTokens << kRotarySegment <= 32);

__device__ __forceinline__ void store_param(DType dtype, std::uint8_t* at, float value) {
  if (dtype == DType::kFloat16) {
    *reinterpret_cast<std::uint16_t*>(at) = codec::f16_from_f32(value);
  } else if (dtype == DType::kFloat8E8M0) {
    *at = codec::e8m0_from_f32(value);
  } else {
    *reinterpret_cast<float*>(at) = value;
  }
}

/// A chunk of an input that loads early, before it is needed.
__device__ __forceinline__ uint4 load_early(const AppendPart& part, std::int64_t token, int chunk) {
  return __ldg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(part.input) +
                                              token * part.token_stride + chunk * kChunk));
}
/// `kEarly`: `raw` has it.
template <bool kEarly>
__device__ __forceinline__ void to_floats(const AppendPart& part, const uint4& raw, std::int64_t token,
                                          int chunk, float (&x)[kChunk]) {
  if constexpr (kEarly) {
    unpack(raw, part.input_type == DType::kBFloat16, x);
  } else if (loads_early(part)) {
    unpack(load_early(part, token, chunk), part.input_type == DType::kBFloat16, x);
  } else {
    load_late(part, token * part.token_stride, chunk, x);
  }
}

/// The extent of a chunk, of magnitudes if `kAbsolute`. A NaN, which sets the status, does not count, nor
/// does a value beyond what append accepts change that.
template <bool kAbsolute>
__device__ __forceinline__ codec::Range extent_of(const AppendParams& p, const float (&x)[kChunk]) {
  const auto extent = [&](const auto& larger) {
    codec::Range r{kAbsolute ? 0.0f : x[0], kAbsolute ? fabsf(x[0]) : x[0]};
#pragma unroll
    for (int i = 1; i < kChunk; ++i) {
      if (!kAbsolute) r.lo = fminf(r.lo, x[i]);
      r.hi = larger(r.hi, kAbsolute ? fabsf(x[i]) : x[i]);
    }
    return r;
  };
  codec::Range r = extent([](float a, float b) { return max_or_nan(a, b); });
  if (!(r.hi <= codec::kMaxInput && (kAbsolute || r.lo >= -codec::kMaxInput))) {
    set_status(p, kStatusNonFinite);
    r = extent([](float a, float b) { return fmaxf(a, b); });
  }
  return r;
}

/// Where a token's record is: its tile, which `before` others of the page precede, and its place there.
struct RecordPlace {
  std::uint8_t* tile;
  int before, place;

  __device__ __forceinline__ RecordPlace(const AppendParams& p, std::int64_t slot)
      : tile(tile_of(p, slot)),
        before(static_cast<int>(slot & ((1 << p.page_log2) - 1)) / kTileTokens),
        place(static_cast<int>(slot % kTileTokens)) {}
  __device__ __forceinline__ std::uint8_t* codes(const page::Part& part) const {
    return tile + part.data_offset + std::int64_t{place} * part.row_bytes;
  }
};

/// The latent of a token, by a whole warp.
template <class Codes, bool kAsymmetric, bool kEarly>
__device__ __forceinline__ void append_latent(const AppendParams& p, std::int64_t token,
                                              const RecordPlace& to, const uint4 (&raw)[kPieces]) {
  const AppendPart& latent = p.parts[0];
  const page::Part& part = latent.part;
  const int lane = threadIdx.x % 32, chunks = part.dim / kChunk;
  float x[kPieces][kChunk];
  codec::Range range[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int chunk = i * 32 + lane;
    if (!kAsymmetric) range[i].lo = range[i].hi = 0.0f;
    if (chunk >= chunks) continue;
    to_floats<kEarly>(latent, raw[i], token, chunk, x[i]);
    range[i] = extent_of<!kAsymmetric>(p, x[i]);
  }
  const bool whole = part.groups == 1;  // one scale for all
  if constexpr (Codes::kBits != 16) {
    const auto add = [](codec::Range& r, float lo, float hi) {
      if (kAsymmetric) r.lo = fminf(r.lo, lo);
      r.hi = fmaxf(r.hi, hi);
    };
    if (whole) {
#pragma unroll
      for (int i = 1; i < kPieces; ++i) add(range[0], range[i].lo, range[i].hi);
#pragma unroll
      for (int i = 1; i < kPieces; ++i) range[i] = range[0];
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      if (i >= latent.group_log2) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        add(range[j], kAsymmetric ? __shfl_xor_sync(~0u, range[j].lo, 1 << i) : 0.0f,
            __shfl_xor_sync(~0u, range[j].hi, 1 << i));
      }
    }
  }
  std::uint8_t* const codes_at = to.codes(part);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk >= chunks) continue;
    codec::Params params;
    if constexpr (Codes::kBits != 16) {
      params = codec::params_of(part.format, range[i]);
      const int group = chunk >> latent.group_log2;
      if (whole ? chunk == 0 : chunk == group << latent.group_log2) {
        const DType type = part.format.scale_dtype;
        store_param(type, to.tile + part.scale_offset(to.before, to.place, group), params.scale);
        if (kAsymmetric) store_param(type, to.tile + part.min_offset(to.place, group), params.min);
      }
    }
    Codes codes;
    codes.encode(params, x[i]);
    store_codes(codes, codes_at + chunk * Codes::kBits);
  }
}

/// The rotary dims of a warp's tokens, a segment of lanes each; `slot`: that of the lane's, or -1.
template <bool kEarly>
__device__ __forceinline__ void append_rotary(const AppendParams& p, std::int64_t token, std::int64_t slot,
                                              const uint4& raw) {
  const AppendPart& rotary = p.parts[1];
  RowLane lane(rotary.part.dim, kRotarySegment, threadIdx.x % 32);
  lane.live &= slot >= 0;
  float x[kChunk] = {};
  std::int64_t position = -1;
  if (lane.live) {
    to_floats<kEarly>(rotary, raw, token, lane.chunk, x);
    extent_of<true>(p, x);
    if (p.pairing != RopePairing::kNone) {
      position = __ldg(p.positions + token);
      if (position < 0 || position >= p.rope_rows) {
        set_status(p, kStatusBadPage);
        position = -1;
      }
    }
  }
  if (p.pairing != RopePairing::kNone) rope_row(p, rotary, lane, token * rotary.token_stride, position, x);
  if (!lane.live) return;
  ChunkCodes<codec::Codec<DType::kBFloat16>, DType::kBFloat16, false> codes;
  codes.encode({}, x);
  store_codes(codes, RecordPlace(p, slot).codes(rotary.part) + lane.chunk * codes.kBits);
}

/// `kTokens`: of a warp. `kEarly`: all of the input loads early.
template <class Codes, bool kAsymmetric, int kTokens, bool kEarly>
__global__ void __launch_bounds__(128) append_records(const __grid_constant__ AppendParams p) {
  begin_append(p);
  const int lane = threadIdx.x % 32, chunks = p.parts[0].part.dim / kChunk;
  const std::int64_t first = (std::int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32) * kTokens;
  if (first >= p.tokens) return;
  const int segment = lane >> kRotarySegment, chunk = lane & ((1 << kRotarySegment) - 1);
  const bool rotary_lane = segment < kTokens && first + segment < p.tokens;
  uint4 latent[kTokens][kPieces], rotary{};
  if constexpr (kEarly) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const bool exists = first + t < p.tokens && i * 32 + lane < chunks;
        latent[t][i] = exists ? load_early(p.parts[0], first + t, i * 32 + lane) : uint4{};
      }
    }
    if (rotary_lane && chunk < p.parts[1].part.dim / kChunk) {
      rotary = load_early(p.parts[1], first + segment, chunk);
    }
  }
  std::int64_t slot;
  if constexpr (kTokens == 1) {
    if (p.cu_seqlens != nullptr && first < p.batch) {  // in a decode step a request has its token's number
      if (lane == 0) prefetch_to_l2(p.lengths + first);
      if (lane * kTableLine < p.table_width && p.table_width <= 32 * kTableLine) {
        prefetch_to_l2(p.block_table + first * p.table_stride + lane * kTableLine);
      }
    }
    slot = slot_of<warp_request_of>(p, first);
  } else {
    slot = slot_of<request_of>(p, first + lane % kTokens);
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const std::int64_t own = __shfl_sync(~0u, slot, t);
    if (own < 0) continue;
    append_latent<Codes, kAsymmetric, kEarly>(p, first + t, RecordPlace(p, own), latent[t]);
  }
  const std::int64_t own = __shfl_sync(~0u, slot, segment % kTokens);
  append_rotary<kEarly>(p, first + segment, rotary_lane ? own : -1, rotary);
}

}  // namespace

int launch_append_records(const AppendParams& params, void* stream) {
  constexpr std::int64_t kFew = 2048;  // tokens whose warps are all under way at once
  if (params.tokens == 0) return cudaSuccess;
  const bool early = loads_early(params.parts[0]) && loads_early(params.parts[1]);
  const bool few = params.tokens <= kFew || !early;
  const void* kernel = codec::with_codec(
      params.parts[0].part.format,
      [&]<DType kType, bool kAsymmetric>(codec::Codec<kType, kAsymmetric> codec) {
        using Codes = ChunkCodes<decltype(codec), kType, false>;
        return reinterpret_cast<const void*>(!few    ? &append_records<Codes, kAsymmetric, kManyTokens, true>
                                             : early ? &append_records<Codes, kAsymmetric, 1, true>
                                                     : &append_records<Codes, kAsymmetric, 1, false>);
      });
  const int threads = params.tokens <= kFew ? 32 : 128, tokens = threads / 32 * (few ? 1 : kManyTokens);
  const void* arguments[] = {&params};
  return launch_early(kernel, dim3(static_cast<unsigned>((params.tokens + tokens - 1) / tokens)),
                      dim3(static_cast<unsigned>(threads)), arguments, stream);
}

}  // namespace halftone::cuda
