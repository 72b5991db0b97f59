// A record of a latent cache: where it is, the params of its groups, and its rotary dims.
#pragma once

#include "cuda/append/codes.h"
#include "cuda/append/row.h"
#include "cuda/append/slots.h"
#include "cuda/append/store.h"
#include "format/head_dim.h"

namespace halftone::cuda {

inline constexpr int kPieces = (kMaxSpanDims / kChunk + 31) / 32;  // chunks of the latent that a lane has
inline constexpr int kRotarySegment = 3;  // log2 of the lanes of a token's rotary dims
static_assert(kRopeDims.back() <= kChunk << kRotarySegment);

/// Its codes and its params. Records of a page follow each other, tiles or not, and so do params apart.
struct RecordPlace {
  std::uint8_t* codes = nullptr;  // of the latent; null: the token is skipped
  std::uint8_t* scales = nullptr;

  RecordPlace() = default;
  __device__ __forceinline__ RecordPlace(const AppendParams& p, std::int64_t slot) {
    if (slot < 0) return;
    const page::Part& part = p.parts[0].part;
    const auto within = static_cast<unsigned>(slot) & ((1U << p.page_log2) - 1);
    std::uint8_t* const page = p.pages + (slot >> p.page_log2) * p.page_stride;
    codes = page + part.data_offset + std::uint64_t{within} * static_cast<unsigned>(part.row_bytes);
    scales = page + part.param_offset + std::uint64_t{within} * static_cast<unsigned>(part.param_token);
  }
};

/// `pointer`, which is to global memory, of another lane.
__device__ __forceinline__ std::uint8_t* shuffled(std::uint8_t* pointer, int from) {
  const std::size_t global = __shfl_sync(~0u, __cvta_generic_to_global(pointer), from);
  return static_cast<std::uint8_t*>(
      __cvta_global_to_generic(global));  // stores need not find out where it is
}

/// codec::params_of() of codes of `kType`.
template <DType kType, bool kAsymmetric>
__device__ __forceinline__ codec::Params record_params(DType scale_dtype, const codec::Range& range) {
  KvFormat format;
  format.dtype = kType;
  format.asymmetric = kAsymmetric;
  format.scale_dtype = scale_dtype;
  return codec::params_of(format, range);
}

/// `scale`: where it goes.
template <bool kAsymmetric>
__device__ __forceinline__ void store_params(const page::Part& part, const codec::Params& params,
                                             std::uint8_t* scale) {
  const DType type = part.format.scale_dtype;
  if (type == DType::kFloat16) {
    *reinterpret_cast<std::uint16_t*>(scale) = codec::f16_from_f32(params.scale);
    if (kAsymmetric)
      *reinterpret_cast<std::uint16_t*>(scale + part.min_away) = codec::f16_from_f32(params.min);
  } else if (!kAsymmetric && type == DType::kFloat8E8M0) {
    *scale = codec::e8m0_from_f32(params.scale);
  } else {
    *reinterpret_cast<float*>(scale) = params.scale;
    if (kAsymmetric) *reinterpret_cast<float*>(scale + part.min_away) = params.min;
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

/// The rotary dims of a warp's tokens, a segment of lanes each; `codes`: those of the lane's record, or null.
template <bool kEarly>
__device__ __forceinline__ void append_rotary(const AppendParams& p, std::int64_t token, std::uint8_t* codes,
                                              const uint4& raw) {
  const AppendPart& rotary = p.parts[1];
  RowLane lane(rotary.part.dim, kRotarySegment, threadIdx.x % 32);
  lane.live &= codes != nullptr;
  std::uint8_t* const to =
      codes + (rotary.part.data_offset - p.parts[0].part.data_offset) + lane.chunk * kChunk * 2;
  if (kEarly && p.pairing == RopePairing::kNone && rotary.input_type == DType::kBFloat16 &&
      is_accepted<DType::kBFloat16>(raw)) {
    if (lane.live) *reinterpret_cast<uint4*>(to) = raw;
    return;
  }
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
  ChunkCodes<codec::Codec<DType::kBFloat16>, DType::kBFloat16, false> values;
  values.encode({}, x);
  store_codes(values, to);
}

}  // namespace halftone::cuda
