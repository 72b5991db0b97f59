// Quantise and write new tokens: a warp per (token, KV head), lane l of it holding dims l, l + 32, ...
// Every step is the one that src/cpu/append.cc takes, so that both backends write the same bytes.
#pragma once

#include "cuda/params.h"
#include "format/codec.h"
#include "format/hadamard.h"
#include "format/part.h"
#include "format/rope.h"

namespace halftone::cuda {

inline constexpr int kAppendWarps = 8;
inline constexpr int kMaxBlocks = 8;  // of 32 dims: head_dim 256
inline constexpr std::int32_t kStatusBadPage = 1;
inline constexpr std::int32_t kStatusNonFinite = 2;

template <DType kType>
__device__ inline float load_input(const void* p, std::int64_t at) {
  if constexpr (kType == DType::kFloat32) return static_cast<const float*>(p)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(p)[at];
  return kType == DType::kFloat16 ? codec::f32_from_f16(bits) : codec::f32_from_bf16(bits);
}

__device__ inline float load_input(DType type, const void* p, std::int64_t at) {
  switch (type) {
    case DType::kFloat32:
      return load_input<DType::kFloat32>(p, at);
    case DType::kFloat16:
      return load_input<DType::kFloat16>(p, at);
    default:
      return load_input<DType::kBFloat16>(p, at);
  }
}

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
    if (p.status != nullptr) atomicOr(p.status, kStatusBadPage);
    return -1;
  }
  return page << p.page_log2 | offset;
}

/// A row over a warp: x[b] is dim 32 b + lane.
struct WarpRow {
  float x[kMaxBlocks];
};

__device__ inline void rope_row(const AppendParams& p, WarpRow& row, std::int64_t token, float* scratch,
                                int lane) {
  const int half = p.rope_half;
  const std::int64_t position = p.positions[token];
  if (position < 0 || position >= p.rope_rows) {
    if (p.status != nullptr && lane == 0) atomicOr(p.status, kStatusBadPage);
    return;
  }
  __syncwarp();
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) scratch[b * 32 + lane] = row.x[b];
  __syncwarp();
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    const int d = b * 32 + lane;
    if (d >= 2 * half) continue;
    const bool interleaved = p.pairing == RopePairing::kInterleaved;
    const int i = interleaved ? d / 2 : d % half;
    const rope::Pair pair = rope::pair_of(p.pairing, i, half);
    const rope::Rotated r = rope::rotate_pair(scratch[pair.first], scratch[pair.second],
                                              p.cos[position * half + i], p.sin[position * half + i]);
    row.x[b] = d == pair.first ? r.first : r.second;
  }
}

/// hadamard::rotate() with its stages in the same order.
__device__ inline void rotate_warp_row(WarpRow& row, int dim, int lane) {
  const int block = hadamard::block_size(dim);
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {
    if (h >= block) break;
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b) {
      const float other = __shfl_xor_sync(~0u, row.x[b], h);
      row.x[b] = lane & h ? codec::ht_sub(other, row.x[b]) : codec::ht_add(row.x[b], other);
    }
  }
#pragma unroll
  for (int h = 1; h < kMaxBlocks; h *= 2) {
    if (h * 32 >= block) break;
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b) {
      if (b & h) continue;
      const float first = row.x[b], second = row.x[b + h];
      row.x[b] = codec::ht_add(first, second);
      row.x[b + h] = codec::ht_sub(first, second);
    }
  }
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) row.x[b] = codec::ht_mul(row.x[b], hadamard::factor(block));
}

/// Reads, checks and transforms one row of K or V.
__device__ inline WarpRow load_row(const AppendParams& p, const AppendPart& part, std::int64_t token,
                                   int head, float* scratch, int lane) {
  WarpRow row;
  const std::int64_t at = token * part.token_stride + head * part.head_stride + lane;
  bool bad = false;
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    row.x[b] = b * 32 + lane < part.part.dim ? load_input(part.input_type, part.input, at + b * 32) : 0.0f;
    bad |= !(codec::ht_abs(row.x[b]) <= codec::kMaxInput);
  }
  if (__any_sync(~0u, bad) && lane == 0 && p.status != nullptr) atomicOr(p.status, kStatusNonFinite);
  if (part.part.which == KvPart::kK && p.pairing != RopePairing::kNone)
    rope_row(p, row, token, scratch, lane);
  if (part.part.rotated) rotate_warp_row(row, part.part.dim, lane);
  return row;
}

__device__ inline codec::Range warp_range(codec::Range range) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    codec::Range other;
    other.lo = __shfl_xor_sync(~0u, range.lo, i);
    other.hi = __shfl_xor_sync(~0u, range.hi, i);
    range.include(other);
  }
  return range;
}

/// Range over blocks [first, first + count) of the row's live dims.
__device__ inline codec::Range row_range(const WarpRow& row, int dim, int first, int count, int lane) {
  codec::Range range;
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (b >= first && b < first + count && b * 32 + lane < dim) range.include(row.x[b]);
  }
  return warp_range(range);
}

__device__ inline void store_param(DType type, std::uint8_t* at, float value) {
  if (type == DType::kFloat16) {
    *reinterpret_cast<std::uint16_t*>(at) = codec::f16_from_f32(value);
  } else {
    *reinterpret_cast<float*>(at) = value;
  }
}

/// Quantises a row and writes its codes and params into its tile. With `fixed`, all groups use `params`.
template <class Codec, DType kType>
__device__ inline void write_row(const page::Part& part, const WarpRow& row, bool fixed, codec::Params params,
                                 int token, std::uint8_t* tile, int lane) {
  const int blocks = (part.dim + 31) / 32;
  const int width = part.groups > 1 ? blocks / part.groups : blocks;  // blocks of a group
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (b >= blocks) break;
    if (part.groups > 0 && b % width == 0) {
      if (!fixed) params = codec::params_of(part.format, row_range(row, part.dim, b, width, lane));
      if (lane == 0) {
        store_param(part.format.scale_dtype, tile + part.scale_offset(token, b / width), params.scale);
        if (part.format.asymmetric) {
          store_param(part.format.scale_dtype, tile + part.min_offset(token, b / width), params.min);
        }
      }
    }
    const int d = b * 32 + lane;
    const auto code = Codec::encode(params, row.x[b]);
    std::uint8_t* data = tile + part.data_offset;
    if constexpr (kType == DType::kInt4) {
      const std::uint32_t odd = __shfl_down_sync(~0u, static_cast<std::uint32_t>(code), 1);
      if (lane % 2 == 0 && d < part.dim) {
        data[part.place(token, d).byte] = static_cast<std::uint8_t>(code | odd << 4);
      }
    } else if constexpr (sizeof(code) == 2) {
      if (d < part.dim) reinterpret_cast<std::uint16_t*>(data)[token * part.dim + d] = code;
    } else {
      if (d < part.dim) data[part.place(token, d).byte] = code;
    }
  }
}

__device__ inline codec::Params static_params_of(const AppendPart& part, int head) {
  const std::int64_t at = head * part.static_stride;
  return codec::static_params(part.static_scale[at], part.static_min != nullptr ? part.static_min[at] : 0.0f);
}

__device__ inline std::uint8_t* tile_of(const AppendParams& p, std::int64_t slot, int head) {
  const int offset = static_cast<int>(slot & ((1 << p.page_log2) - 1));
  return p.pages + (slot >> p.page_log2) * p.page_stride + page::tile_offset(p.layout, head, offset);
}

struct AppendShared {
  float scratch[kAppendWarps][kMaxBlocks * 32];  // a row each
  float low[kAppendWarps], high[kAppendWarps];   // the range of a warp's heads
};

/// Appends to K or V: blockIdx.x walks tokens, warps walk KV heads.
template <class Codec, DType kType>
__device__ inline void append_part(const AppendParams& p, const AppendPart& part, AppendShared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool per_token = part.part.format.granularity == Granularity::kToken;
  for (std::int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const std::int64_t slot = slot_of(p, token);
    if (slot < 0) continue;
    const int place = static_cast<int>(slot % kTileTokens);
    codec::Params shared;
    if (per_token) {
      codec::Range range;
      for (int head = warp; head < p.kv_heads; head += kAppendWarps) {
        const WarpRow row = load_row(p, part, token, head, s.scratch[warp], lane);
        range.include(row_range(row, part.part.dim, 0, kMaxBlocks, lane));
      }
      __syncthreads();  // the previous token's readers are done
      if (lane == 0) s.low[warp] = range.lo, s.high[warp] = range.hi;
      __syncthreads();
      codec::Range all;
      for (int w = 0; w < kAppendWarps; ++w) {
        codec::Range one;
        one.lo = s.low[w], one.hi = s.high[w];
        all.include(one);
      }
      shared = codec::params_of(part.part.format, all);
    }
    for (int head = warp; head < p.kv_heads; head += kAppendWarps) {
      const WarpRow row = load_row(p, part, token, head, s.scratch[warp], lane);
      if (part.part.format.static_scale()) shared = static_params_of(part, head);
      const bool fixed = per_token || part.part.format.static_scale() || sizeof(typename Codec::Code) == 2;
      write_row<Codec, kType>(part.part, row, fixed, shared, place, tile_of(p, slot, head), lane);
    }
  }
}

/// Calls append_part with the codec of the part's format.
__device__ inline void append_any(const AppendParams& p, const AppendPart& part, AppendShared& s) {
  const bool asymmetric = part.part.format.asymmetric;
  switch (part.part.format.dtype) {
    case DType::kFloat16:
      return append_part<codec::Codec<DType::kFloat16>, DType::kFloat16>(p, part, s);
    case DType::kFloat8E4M3:
      return append_part<codec::Codec<DType::kFloat8E4M3>, DType::kFloat8E4M3>(p, part, s);
    case DType::kInt8:
      return asymmetric ? append_part<codec::Codec<DType::kInt8, true>, DType::kInt8>(p, part, s)
                        : append_part<codec::Codec<DType::kInt8>, DType::kInt8>(p, part, s);
    case DType::kInt4:
      return asymmetric ? append_part<codec::Codec<DType::kInt4, true>, DType::kInt4>(p, part, s)
                        : append_part<codec::Codec<DType::kInt4>, DType::kInt4>(p, part, s);
    default:
      return append_part<codec::Codec<DType::kBFloat16>, DType::kBFloat16>(p, part, s);
  }
}

}  // namespace halftone::cuda
