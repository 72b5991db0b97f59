// One row of an append, a token of a KV head, from global memory to codes in registers. A lane holds 8
// consecutive dims (a chunk), a row fills 8, 16 or 32 lanes (a segment). Every step is the one that
// src/cpu/append.cc takes, so that both backends write the same bytes.
#pragma once

#include <cuda_fp16.h>

#include "cuda/params.h"
#include "format/codec.h"
#include "format/hadamard.h"
#include "format/part.h"
#include "format/rope.h"

namespace halftone::cuda {

inline constexpr std::int32_t kStatusBadPage = 1;
inline constexpr std::int32_t kStatusNonFinite = 2;
inline constexpr int kChunk = 8;  // dims of a lane

__device__ __forceinline__ void set_status(const AppendParams& p, std::int32_t bit) {
  if (p.status != nullptr) atomicOr(p.status, bit);
}

/// log2 of the lanes that a row of `dim` fills, idle ones included.
__host__ __device__ inline int segment_log2(int dim) { return dim <= 64 ? 3 : dim <= 128 ? 4 : 5; }

/// A lane's place in its row.
struct RowLane {
  int chunk;          // dims from 8 * chunk on
  int segment;        // lanes of the row
  int segment_first;  // lane of chunk 0
  bool live;          // false: beyond the row's dims
};

__device__ __forceinline__ float half_of(std::uint32_t word, bool high, bool bf16) {
  if (bf16) return __uint_as_float(high ? word & 0xffff0000u : word << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? word >> 16 : word & 0xffffu)));
}

__device__ __forceinline__ float load_input(DType type, const void* input, std::int64_t at) {
  if (type == DType::kFloat32) return __ldg(static_cast<const float*>(input) + at);
  return half_of(__ldg(static_cast<const std::uint16_t*>(input) + at), false, type == DType::kBFloat16);
}

/// True if a chunk is one 16-byte load that can be issued ahead of its use.
__device__ __forceinline__ bool loads_early(const AppendPart& part) {
  return part.aligned && part.input_type != DType::kFloat32;
}

__device__ __forceinline__ std::int64_t input_offset(const AppendPart& part, std::int64_t token, int head) {
  return token * part.token_stride + head * part.head_stride;
}

/// The raw chunk of a 16-bit, aligned row.
__device__ __forceinline__ uint4 load_raw(const AppendPart& part, std::int64_t row, int chunk) {
  return __ldg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(part.input) + row) + chunk);
}

/// The chunk at element offset `row` as f32; `raw` holds it if loads_early().
__device__ __forceinline__ void unpack(const AppendPart& part, const uint4& raw, std::int64_t row, int chunk,
                                       float (&x)[kChunk]) {
  if (loads_early(part)) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    const bool bf16 = part.input_type == DType::kBFloat16;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = half_of(words[i / 2], i % 2, bf16);
  } else if (part.aligned) {
    const float4* at =
        reinterpret_cast<const float4*>(static_cast<const float*>(part.input) + row) + 2 * chunk;
    const float4 low = __ldg(at), high = __ldg(at + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
#pragma unroll 1
    for (int i = 0; i < kChunk; ++i) {
#pragma unroll
      for (int j = 0; j + 1 < kChunk; ++j) x[j] = x[j + 1];
      x[kChunk - 1] = load_input(part.input_type, part.input, row + chunk * kChunk + i);
    }
  }
}

/// `kCount` entries of a rotary table; `aligned` to 16 bytes or not.
template <int kCount>
__device__ __forceinline__ void load_angles(const float* at, bool aligned, float (&out)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 x = aligned ? __ldg(reinterpret_cast<const float4*>(at + i))
                             : float4{__ldg(at + i), __ldg(at + i + 1), __ldg(at + i + 2), __ldg(at + i + 3)};
    out[i] = x.x, out[i + 1] = x.y, out[i + 2] = x.z, out[i + 3] = x.w;
  }
}

/// rope::rotate() of a row in the table's row `position`; -1 leaves it as it is. All lanes take part. `row`:
/// element offset of the input, where dims are read whose partner lies across lanes at no fixed distance.
__device__ __forceinline__ void rope_row(const AppendParams& p, const AppendPart& part, const RowLane& lane,
                                         std::int64_t row, std::int64_t position, float (&x)[kChunk]) {
  const int half = p.rope_half, first = lane.chunk * kChunk;
  const float *cos_row = p.cos + position * half, *sin_row = p.sin + position * half;
  if (p.pairing == RopePairing::kInterleaved && half % 4 == 0) {
    if (position < 0 || first >= 2 * half) return;
    float cos[kChunk / 2], sin[kChunk / 2];
    load_angles(cos_row + first / 2, p.rope_aligned, cos);
    load_angles(sin_row + first / 2, p.rope_aligned, sin);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const rope::Rotated r = rope::rotate_pair(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
      x[2 * i] = r.first;
      x[2 * i + 1] = r.second;
    }
  } else if (half % kChunk == 0) {
    const bool second = first >= half, rotary = first < 2 * half;
    const int away = half / kChunk;
    const int from = lane.segment_first + lane.chunk + (rotary ? second ? -away : away : 0);
    float cos[kChunk] = {}, sin[kChunk] = {};
    const bool rotates = rotary && position >= 0;
    if (rotates) {
      load_angles(cos_row + first - (second ? half : 0), p.rope_aligned, cos);
      load_angles(sin_row + first - (second ? half : 0), p.rope_aligned, sin);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float other = __shfl_sync(~0u, x[i], from);
      const float a = codec::ht_mul(x[i], cos[i]), b = codec::ht_mul(other, sin[i]);
      const float rotated = second ? codec::ht_add(a, b) : codec::ht_sub(a, b);
      x[i] = rotates ? rotated : x[i];
    }
  } else if (position >= 0) {
#pragma unroll 1
    for (int i = 0; i < kChunk; ++i) {
      const int d = first + i;
      const bool interleaved = p.pairing == RopePairing::kInterleaved;
      float value = x[0];
      if (d < 2 * half) {
        const int angle = interleaved ? d / 2 : d % half;
        const rope::Pair pair = rope::pair_of(p.pairing, angle, half);
        const bool is_first = d == pair.first;
        const float other =
            load_input(part.input_type, part.input, row + (is_first ? pair.second : pair.first));
        const rope::Rotated r = rope::rotate_pair(is_first ? value : other, is_first ? other : value,
                                                  __ldg(cos_row + angle), __ldg(sin_row + angle));
        value = is_first ? r.first : r.second;
      }
#pragma unroll
      for (int j = 0; j + 1 < kChunk; ++j) x[j] = x[j + 1];
      x[kChunk - 1] = value;
    }
  }
}

/// hadamard::rotate() with its stages in the same order.
__device__ __forceinline__ void rotate_row(int dim, float (&x)[kChunk]) {
  const int block = hadamard::block_size(dim), lane = threadIdx.x;
#pragma unroll
  for (int h = 1; h < kChunk; h *= 2) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = codec::ht_add(a, b);
      x[i + h] = codec::ht_sub(a, b);
    }
  }
#pragma unroll 1
  for (int h = 1; h * kChunk < block; h *= 2) {
    const float sign = lane & h ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {  // a + b and a - b: a product with +-1 is exact
      x[i] = codec::ht_fma(x[i], sign, __shfl_xor_sync(~0u, x[i], h));
    }
  }
  const float factor = hadamard::factor(block);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = codec::ht_mul(x[i], factor);
}

/// A row as the codec gets it. `wanted`: the token is written, so what is wrong with it sets the status.
__device__ __forceinline__ void load_row(const AppendParams& p, const AppendPart& part, const RowLane& lane,
                                         const uint4& raw, std::int64_t token, int head, bool wanted,
                                         float (&x)[kChunk]) {
  const std::int64_t row = input_offset(part, token, head);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = 0.0f;
  if (wanted && lane.live) {
    unpack(part, raw, row, lane.chunk, x);
    bool bad = false;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) bad |= !(codec::ht_abs(x[i]) <= codec::kMaxInput);
    if (bad) set_status(p, kStatusNonFinite);
  }
  if (part.part.which == KvPart::kK && p.pairing != RopePairing::kNone) {
    std::int64_t position = wanted ? p.positions[token] : -1;
    if (wanted && (position < 0 || position >= p.rope_rows)) {
      set_status(p, kStatusBadPage);
      position = -1;
    }
    rope_row(p, part, lane, row, lane.live ? position : -1, x);
  }
  if (part.part.rotated) rotate_row(part.part.dim, x);
}

/// Extent of the row's groups of `lanes` lanes; NaN, which has set the status, does not count.
template <bool kAbsolute>
__device__ __forceinline__ codec::Range group_range(const RowLane& lane, const float (&x)[kChunk],
                                                    int lanes) {
  codec::Range r;
  if (kAbsolute) {
    r.lo = r.hi = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) r.hi = fmaxf(r.hi, fabsf(x[i]));  // idle lanes hold 0
  } else if (lane.live) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) r.lo = fminf(r.lo, x[i]), r.hi = fmaxf(r.hi, x[i]);
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    if (i >= lanes) break;
    if (!kAbsolute) r.lo = fminf(r.lo, __shfl_xor_sync(~0u, r.lo, i));
    r.hi = fmaxf(r.hi, __shfl_xor_sync(~0u, r.hi, i));
  }
  return r;
}

/// The codes of a chunk, packed in the order of dims: 4, 2 or 1 words.
template <class Codec, DType kType>
struct ChunkCodes {
  static constexpr int kBits = dtype_bits(kType);
  std::uint32_t words[kBits / 4];

  __device__ __forceinline__ void encode(const codec::Params& params, const float (&x)[kChunk]) {
    if constexpr (kType == DType::kFloat8E4M3) {
      encode_e4m3(params, x);
    } else {
      std::uint32_t code[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) code[i] = Codec::encode(params, x[i]);
      pack(code);
    }
  }

 private:
  /// Codec::encode(), two values at a time.
  __device__ __forceinline__ void encode_e4m3(const codec::Params& params, const float (&x)[kChunk]) {
    std::uint16_t pairs[kChunk / 2];
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
          : "=h"(pairs[i])
          : "f"(codec::ht_mul(x[2 * i + 1], params.inverse)), "f"(codec::ht_mul(x[2 * i], params.inverse)));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = pairs[2 * i] | std::uint32_t{pairs[2 * i + 1]} << 16;
  }

  __device__ __forceinline__ void pack(const std::uint32_t (&code)[kChunk]) {
    if constexpr (kBits == 16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __byte_perm(code[2 * i], code[2 * i + 1], 0x5410);
    } else if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] = __byte_perm(__byte_perm(code[4 * i], code[4 * i + 1], 0x0040),
                               __byte_perm(code[4 * i + 2], code[4 * i + 3], 0x0040), 0x5410);
      }
    } else {
      words[0] = code[kChunk - 1];
#pragma unroll
      for (int i = kChunk - 2; i >= 0; --i) words[0] = words[0] << 4 | code[i];
    }
  }
};

}  // namespace halftone::cuda
