// Append to a latent cache: a CTA has one token, a warp of it one group of the latent that shares a scale
// (all of it, if it has none or one), the last warp the rotary dims. Every step is the one that
// src/cpu/append.cc takes.

#include <algorithm>

#include "cuda/append/params.h"
#include "cuda/append/row.h"
#include "cuda/append/slots.h"
#include "cuda/device/launch.h"
#include "format/codec.h"
#include "format/head_dim.h"
#include "format/rope.h"

namespace halftone::cuda {
namespace {

constexpr int kPairs = kMaxSpanDims / 64;  // of dims, that a lane may hold
constexpr int kMaxWarps = kMaxSpanDims / 32 + 1;

/// Dims (d, d + 1) of a token's rotary dims after the embedding; `row` is the element offset of dim 0.
__device__ __forceinline__ void rope_pair(const AppendParams& p, const AppendPart& part, std::int64_t row,
                                          std::int64_t position, int d, float (&x)[2]) {
  const int half = p.rope_half;
  float rotated[2] = {x[0], x[1]};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (d + j >= 2 * half) continue;
    const int angle = p.pairing == RopePairing::kInterleaved ? (d + j) / 2 : (d + j) % half;
    const rope::Pair pair = rope::pair_of(p.pairing, angle, half);
    const bool is_first = d + j == pair.first;
    const float other = load_input(part.input_type, part.input, row + (is_first ? pair.second : pair.first));
    const rope::Rotated r =
        rope::rotate_pair(is_first ? x[j] : other, is_first ? other : x[j],
                          __ldg(p.cos + position * half + angle), __ldg(p.sin + position * half + angle));
    rotated[j] = is_first ? r.first : r.second;
  }
  x[0] = rotated[0];
  x[1] = rotated[1];
}

__device__ __forceinline__ void store_param(DType dtype, std::uint8_t* at, float value) {
  if (dtype == DType::kFloat16) {
    *reinterpret_cast<std::uint16_t*>(at) = codec::f16_from_f32(value);
  } else if (dtype == DType::kFloat8E8M0) {
    *at = codec::e8m0_from_f32(value);
  } else {
    *reinterpret_cast<float*>(at) = value;
  }
}

/// Writes `width` dims of token `token`, the group `group` of a span, by a whole warp. `kMost`: pairs of dims
/// that a lane holds at most. `place`: the token's place in the tile, which `before` others of its page
/// precede.
template <class Codec, int kMost, bool kRope>
__device__ __forceinline__ void append_group(const AppendParams& p, const AppendPart& part,
                                             std::int64_t token, int group, int width, std::uint8_t* tile,
                                             int before, int place) {
  using Code = typename Codec::Code;
  const int lane = threadIdx.x % 32;
  const std::int64_t row = token * part.token_stride + group * width;
  float x[kMost][2];
  codec::Range range;
  bool good = true;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int d = 2 * (i * 32 + lane);
    x[i][0] = x[i][1] = 0;
    if (d >= width) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[i][j] = load_input(part.input_type, part.input, row + d + j);
      good = good && codec::ht_abs(x[i][j]) <= codec::kMaxInput;
      range.include(x[i][j]);
    }
  }
  if (!good) set_status(p, kStatusNonFinite);
  if constexpr (kRope) {
    if (p.pairing != RopePairing::kNone) {
      const std::int64_t position = __ldg(p.positions + token);
      const bool exists = position >= 0 && position < p.rope_rows;
      if (!exists) set_status(p, kStatusBadPage);
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int d = 2 * (i * 32 + lane);
        if (exists && d < width) rope_pair(p, part, row, position, d, x[i]);
      }
    }
  }
  codec::Params params;
  if (part.part.groups > 0) {
#pragma unroll
    for (int away = 16; away > 0; away /= 2) {
      codec::Range other;
      other.lo = __shfl_xor_sync(~0u, range.lo, away);
      other.hi = __shfl_xor_sync(~0u, range.hi, away);
      range.include(other);
    }
    params = codec::params_of(part.part.format, range);
    if (lane == 0) {
      const DType dtype = part.part.format.scale_dtype;
      store_param(dtype, tile + part.part.scale_offset(before, place, group), params.scale);
      if (part.part.format.asymmetric)
        store_param(dtype, tile + part.part.min_offset(place, group), params.min);
    }
  }
  const int bits = dtype_bits(part.part.format.dtype);
  std::uint8_t* codes =
      tile + part.part.data_offset + std::int64_t{place} * part.part.row_bytes + group * width * bits / 8;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int d = 2 * (i * 32 + lane);
    if (d >= width) continue;
    const Code low = Codec::encode(params, x[i][0]), high = Codec::encode(params, x[i][1]);
    if constexpr (sizeof(Code) == 2) {
      *reinterpret_cast<std::uint32_t*>(codes + 2 * d) = low | std::uint32_t{high} << 16;
    } else if (bits == 8) {
      *reinterpret_cast<std::uint16_t*>(codes + d) = static_cast<std::uint16_t>(low | high << 8);
    } else {
      codes[d / 2] = static_cast<std::uint8_t>(low | high << 4);
    }
  }
}

/// blockIdx.x: token.
template <class Codec>
__global__ void __launch_bounds__(kMaxWarps * 32)
    append_records(const __grid_constant__ AppendParams p, const int groups) {
  begin_append(p);
  const std::int64_t token = blockIdx.x, slot = slot_of<warp_request_of>(p, token);
  if (slot < 0) return;
  std::uint8_t* tile = tile_of(p, slot);
  const int before = static_cast<int>(slot & ((1 << p.page_log2) - 1)) / kTileTokens;
  const int place = static_cast<int>(slot % kTileTokens), group = static_cast<int>(threadIdx.x / 32);
  const AppendPart &latent = p.parts[0], &rotary = p.parts[1];
  if (group < groups) {
    append_group<Codec, kPairs, false>(p, latent, token, group, latent.part.dim / groups, tile, before,
                                       place);
  } else {
    constexpr int kRotaryPairs = (kRopeDims.back() + 63) / 64;
    append_group<codec::Codec<DType::kBFloat16>, kRotaryPairs, true>(p, rotary, token, 0, rotary.part.dim,
                                                                     tile, before, place);
  }
}

}  // namespace

int launch_append_records(const AppendParams& params, void* stream) {
  if (params.tokens == 0) return cudaSuccess;
  const page::Part& latent = params.parts[0].part;
  const int groups = std::max(latent.groups, 1);
  const void* kernel = codec::with_codec(latent.format, [](auto codec) {
    return reinterpret_cast<const void*>(&append_records<decltype(codec)>);
  });
  const void* arguments[] = {&params, &groups};
  return launch_early(kernel, dim3(static_cast<unsigned>(params.tokens)),
                      dim3(static_cast<unsigned>(groups + 1) * 32), arguments, stream);
}

}  // namespace halftone::cuda
