// A record of a latent cache: where it is, the params of its groups, and its rotary dims.
#pragma once

#include "cuda/append/codes.h"
#include "cuda/append/row.h"
#include "cuda/append/slots.h"
#include "cuda/append/store.h"
#include "cuda/attention/latent_records.h"
#include "cuda/device/ptx.h"
#include "format/codec.h"
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

/// What code knows of the records that it writes. `kEarlyInputs`: that inputs load early.
template <bool kEarlyInputs>
struct AnyRecord {
  static constexpr bool kEarly = kEarlyInputs;
  static constexpr bool kLeastCode = false;

  static __device__ __forceinline__ bool one_scale(const page::Part& part) { return part.groups == 1; }
  static __device__ __forceinline__ int group_log2(const AppendPart& latent) { return latent.group_log2; }
  static __device__ __forceinline__ DType scale_dtype(const page::Part& part) {
    return part.format.scale_dtype;
  }
  static __device__ __forceinline__ int chunks(const page::Part& part) { return part.dim / kChunk; }
};

/// Everything of their latents, for the least code. Of bf16 scales and their groups are not asked for.
template <LatentCodes kCodes>
struct KnownRecord {
  using Record = LatentRecord<kCodes>;
  static constexpr bool kEarly = true, kLeastCode = true;
  static constexpr int kGroupLog2 = Record::kGroupDims == 128 ? 4 : 3;
  static_assert(kChunk << kGroupLog2 == Record::kGroupDims);

  static __device__ constexpr bool one_scale(const page::Part&) { return false; }
  static __device__ constexpr int group_log2(const AppendPart&) { return kGroupLog2; }
  static __device__ constexpr DType scale_dtype(const page::Part&) { return Record::kScaleType; }
  static __device__ constexpr int chunks(const page::Part&) { return Record::kLatent / kChunk; }
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

/// `scale`: where it goes, of type `type`.
template <bool kAsymmetric>
__device__ __forceinline__ void store_params(DType type, const page::Part& part, const codec::Params& params,
                                             std::uint8_t* scale) {
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
template <class Known>
__device__ __forceinline__ void append_rotary(const AppendParams& p, std::int64_t token, std::uint8_t* codes,
                                              const uint4& raw) {
  const AppendPart& rotary = p.parts[1];
  RowLane lane(rotary.part.dim, kRotarySegment, thread_index() % 32);
  lane.live &= codes != nullptr;
  std::uint8_t* const to =
      codes + (rotary.part.data_offset - p.parts[0].part.data_offset) + lane.chunk * kChunk * 2;
  if (Known::kEarly && p.pairing == RopePairing::kNone && rotary.input_type == DType::kBFloat16 &&
      is_accepted<DType::kBFloat16>(raw)) {
    if (lane.live) *reinterpret_cast<uint4*>(to) = raw;
    return;
  }
  float x[kChunk] = {};
  std::int64_t position = -1;
  if (lane.live) {
    to_floats<Known::kEarly>(rotary, raw, token, lane.chunk, x);
    extent_of<true>(p, x);
    if (p.pairing != RopePairing::kNone) {
      position = __ldg(p.positions + token);
      if (position < 0 || position >= p.rope_rows) {
        set_status(p, kStatusBadPage);
        position = -1;
      }
    }
  }
  if (p.pairing != RopePairing::kNone) {
    if constexpr (Known::kLeastCode) {
      rope_whole_row(p, lane, position, x);
    } else {
      rope_row(p, rotary, lane, token * rotary.token_stride, position, x);
    }
  }
  if (!lane.live) return;
  ChunkCodes<codec::Codec<DType::kBFloat16>, DType::kBFloat16, false> values;
  values.encode({}, x);
  store_codes(values, to);
}

/// A token's input that loads early: the lane's chunks.
struct RawRecord {
  uint4 latent[kPieces], rotary{};

  __device__ __forceinline__ void load(const AppendParams& p, std::int64_t token, int lane) {
    const int chunks = p.parts[0].part.dim / kChunk;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      latent[i] = load_early(p.parts[0], token, min(i * 32 + lane, chunks - 1));
    }
    if (lane < p.parts[1].part.dim / kChunk) rotary = load_early(p.parts[1], token, lane);
  }
};

/// The latent of a token, by a whole warp. Lanes beyond the row have its last chunk again, which changes no
/// extent.
template <DType kType, bool kAsymmetric, class Known>
struct LatentRow {
  using Codes = ChunkCodes<codec::Codec<kType, kAsymmetric>, kType, false>;
  const AppendParams& p;
  std::int64_t token;
  const RecordPlace& to;
  const AppendPart& latent = p.parts[0];
  const page::Part& part = latent.part;
  int chunk = static_cast<int>(thread_index() % 32);  // of the first piece

  __device__ __forceinline__ void load(const uint4& raw, int piece, float (&x)[kChunk],
                                       codec::Range& range) const {
    to_floats<Known::kEarly>(latent, raw, token, min(piece * 32 + chunk, Known::chunks(part) - 1), x);
    range = extent_of<!kAsymmetric>(p, x);
  }
  __device__ __forceinline__ void store(const float (&x)[kChunk], int piece,
                                        const codec::Range& range) const {
    const int own = piece * 32 + chunk;
    if (own >= Known::chunks(part)) return;
    codec::Params params;
    if constexpr (Codes::kBits != 16) {
      const DType type = Known::scale_dtype(part);
      params = record_params<kType, kAsymmetric>(type, range);
      const int log2 = Known::group_log2(latent), group = own >> log2;
      if (Known::one_scale(part) ? own == 0 : own == group << log2) {
        store_params<kAsymmetric>(type, part, params, to.scales + group * part.param_group);
      }
    }
    Codes codes;
    codes.encode(params, x);
    store_codes(codes, to.codes + own * Codes::kBits);
  }

  __device__ __forceinline__ void append(const uint4 (&raw)[kPieces]) const {
    if constexpr (Known::kLeastCode) {
      static_assert(kPieces == 2);
      uint4 values = raw[0];
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i, values = raw[1]) {
        float x[kChunk];
        codec::Range range[1];
        load(values, i, x, range[0]);
        if constexpr (Codes::kBits != 16) join_groups<!kAsymmetric>(Known::group_log2(latent), range);
        store(x, i, range[0]);
      }
    } else {
      float x[kPieces][kChunk];
      codec::Range range[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) load(raw[i], i, x[i], range[i]);
      if constexpr (Codes::kBits != 16) {
        if (Known::one_scale(part)) {
#pragma unroll
          for (int i = 1; i < kPieces; ++i) {
            if (kAsymmetric) range[0].lo = fminf(range[0].lo, range[i].lo);
            range[0].hi = fmaxf(range[0].hi, range[i].hi);
          }
#pragma unroll
          for (int i = 1; i < kPieces; ++i) range[i] = range[0];
        }
        join_groups<!kAsymmetric>(Known::group_log2(latent), range);
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) store(x[i], i, range[i]);
    }
  }
};

/// A token, by a whole warp.
template <DType kType, bool kAsymmetric, class Known>
__device__ __forceinline__ void append_record(const AppendParams& p, std::int64_t token,
                                              const RecordPlace& to, const RawRecord& raw) {
  LatentRow<kType, kAsymmetric, Known>{p, token, to}.append(raw.latent);
  const bool has = thread_index() % 32 >> kRotarySegment == 0;
  append_rotary<Known>(p, token, has ? to.codes : nullptr, raw.rotary);
}

}  // namespace halftone::cuda
