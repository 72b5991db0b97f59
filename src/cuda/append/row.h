// A row of an append, a token of a KV head: which lanes have it, how it is loaded, and its RoPE. A lane holds
// 8 consecutive dims (a chunk) of a row, or of both halves of a wide one, a row fills 8, 16 or 32 lanes (a
// segment). Every step is the one that src/cpu/append.cc takes, so that both backends write the same bytes.
#pragma once

#include <cuda_fp16.h>

#include "cuda/append/params.h"
#include "cuda/device/ptx.h"
#include "cuda/device/values.h"
#include "format/codec.h"
#include "format/part.h"
#include "format/rope.h"
#include "format/status.h"

namespace halftone::cuda {

/// The beginning of every kernel of append. The next kernel of the stream may begin with it, if it knows what
/// it may read then, or else when all before this one has ended.
__device__ __forceinline__ void begin_append(const AppendParams& p) {
  if (p.next_knows) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
}

__device__ __forceinline__ void set_status(const AppendParams& p, std::int32_t bit) {
  if (p.status != nullptr) set_bits(p.status, bit);
}

/// Sets the status if the caller's scale and min are such that nothing can be stored with them.
__device__ __forceinline__ void check_given(const AppendParams& p, const codec::Params& params, bool wanted) {
  if (wanted && !codec::is_static_scale(params.scale, params.min)) set_status(p, kStatusBadScale);
}

/// Sets the status for a value beyond part.largest or none.
__device__ __forceinline__ void report_value(const AppendParams& p, float largest) {
  set_status(p, largest <= codec::kMaxInput ? kStatusLargeV : kStatusNonFinite);
}

/// A lane's place in its row.
struct RowLane {
  int chunk;          // dims from 8 * chunk on
  int segment_first;  // lane of chunk 0
  bool live;          // false: beyond the row's dims

  __device__ __forceinline__ explicit RowLane(const AppendPart& part)
      : RowLane(part.part.dim, part.segment_log2, threadIdx.x % 32) {}
  __device__ __forceinline__ RowLane(int dim, int segment_log2, int in_warp) {
    chunk = in_warp & ((1 << segment_log2) - 1);
    segment_first = in_warp - chunk;
    live = chunk < dim / kChunk;
  }
};

__device__ __forceinline__ float load_input(DType type, const void* input, std::int64_t at) {
  if (type == DType::kFloat32) return __ldg(static_cast<const float*>(input) + at);
  return half_of(__ldg(static_cast<const std::uint16_t*>(input) + at), false, type == DType::kBFloat16);
}

/// What rows may be: the fewer cases, the shorter the code.
enum class RowKind : std::uint8_t {
  kAny,
  kWhole,  // has_whole_chunks() holds
  kPlain,  // is_plain() holds
};

__device__ __forceinline__ std::int64_t input_offset(const AppendPart& part, std::int64_t token, int head) {
  return token * part.token_stride + head * part.head_stride;
}

/// A chunk of 16-bit values as f32.
__device__ __forceinline__ void unpack(const uint4& raw, bool bf16, float (&x)[kChunk]) {
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = half_of(words[i / 2], i % 2, bf16);
}

inline constexpr std::uint32_t kLargestBf16 = (127 + 100) << 7;  // codec::kMaxInput
inline constexpr std::uint32_t kLargestF16 = 0x7bff;             // the largest finite one
static_assert(codec::kMaxInput == 0x1p100f);

/// True for 16-bit values that need no look at each.
template <DType kType>
__device__ __forceinline__ bool is_accepted(const uint4& values) {
  constexpr std::uint32_t kBits = kType == DType::kBFloat16 ? kLargestBf16 : kLargestF16;
  constexpr std::uint32_t kSigns = 0x80008000u;
  const std::uint32_t largest = __vmaxu2(__vmaxu2(values.x & ~kSigns, values.y & ~kSigns),
                                         __vmaxu2(values.z & ~kSigns, values.w & ~kSigns));
  return (largest & 0xffffu) <= kBits && largest >> 16 <= kBits;
}

/// The chunk at element offset `row` as f32, of an input that does not load early.
__device__ __forceinline__ void load_late(const AppendPart& part, std::int64_t row, int chunk,
                                          float (&x)[kChunk]) {
  if (part.aligned) {
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

/// Value `x` of dim `d` as rope::rotate() leaves it, its partner read from the input. `row`: element offset
/// of the input.
__device__ __forceinline__ float rope_dim(const AppendParams& p, const AppendPart& part, std::int64_t row,
                                          std::int64_t position, int d, float x) {
  const int half = p.rope_half;
  if (d >= 2 * half) return x;
  const int angle = p.pairing == RopePairing::kInterleaved ? d / 2 : d % half;
  const rope::Pair pair = rope::pair_of(p.pairing, angle, half);
  const bool is_first = d == pair.first;
  const float other = load_input(part.input_type, part.input, row + (is_first ? pair.second : pair.first));
  const std::int64_t at = position * half + angle;
  const rope::Rotated r =
      rope::rotate_pair(is_first ? x : other, is_first ? other : x, __ldg(p.cos + at), __ldg(p.sin + at));
  return is_first ? r.first : r.second;
}

/// rope::rotate() of a row in the table's row `position`; -1 leaves it as it is. All lanes take part. `row`:
/// element offset of the input, where dims are read whose partner lies across lanes at no fixed distance, or
/// `kWide`, in the other half.
template <bool kWide = false>
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
  } else if (!kWide && half % kChunk == 0) {
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
      const float value = rope_dim(p, part, row, position, first + i, x[0]);
#pragma unroll
      for (int j = 0; j + 1 < kChunk; ++j) x[j] = x[j + 1];
      x[kChunk - 1] = value;
    }
  }
}

/// The same where has_whole_angles() holds, in the least code: a dim at a time, whose angles share a sector
/// with its neighbours'.
__device__ __forceinline__ void rope_whole_row(const AppendParams& p, const RowLane& lane,
                                               std::int64_t position, float (&x)[kChunk]) {
  const int half = p.rope_half, first = lane.chunk * kChunk;
  const bool interleaved = p.pairing == RopePairing::kInterleaved, upper = first >= half;
  const bool rotates = first < 2 * half && position >= 0;
  const int away = interleaved || first >= 2 * half ? 0 : upper ? -(half >> 3) : half >> 3;
  const int angles = interleaved ? first / 2 : upper ? first - half : first;
  const std::int64_t begin = rotates ? position * half + angles : 0;
  float even = 0.0f;  // the dim before, as it was
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    const std::int64_t angle = begin + (interleaved ? i / 2 : i);
    const float cos = __ldg(p.cos + angle), sin = __ldg(p.sin + angle);
    const float value = x[0], partner = __shfl_sync(~0u, value, lane.segment_first + lane.chunk + away);
    const bool second = interleaved ? i % 2 == 1 : upper;
    const float other = !interleaved ? partner : second ? even : x[1];
    const float a = codec::ht_mul(value, cos), b = codec::ht_mul(other, sin);
    const float rotated = second ? codec::ht_add(a, b) : codec::ht_sub(a, b);
    even = value;
#pragma unroll
    for (int j = 0; j + 1 < kChunk; ++j) x[j] = x[j + 1];
    x[kChunk - 1] = rotates ? rotated : value;
  }
}

/// Extents of chunks, of magnitudes if `kAbsolute`, become those of their groups of 1 << `chunks_log2` lanes.
template <bool kAbsolute, int kChunks>
__device__ __forceinline__ void join_groups(int chunks_log2, codec::Range (&r)[kChunks]) {
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    if (i >= chunks_log2) break;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (!kAbsolute) r[k].lo = fminf(r[k].lo, __shfl_xor_sync(~0u, r[k].lo, 1 << i));
      r[k].hi = fmaxf(r[k].hi, __shfl_xor_sync(~0u, r[k].hi, 1 << i));
    }
  }
}

/// The larger of two values; NaN if one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace halftone::cuda
