// Rows of O and the LSE, from a merged state to the caller's tensors.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"
#include "cuda/device/values.h"

namespace halftone::cuda {

/// What a row of O is multiplied with, and its LSE (natural).
struct RowEnd {
  float scale, lse;
};

/// Of a row whose state is (max, sum), with the sink of `head` if the row exists. One that sees no key: zeros
/// and -inf.
__device__ inline RowEnd row_end(const AttentionParams& p, int head, float max, float sum, bool exists) {
  RowEnd end{0.0f, kMinus};
  if (max != kMinus || sum != 0.0f) {
    float top = max, total = sum, weight = 1.0f;
    if (p.sinks != nullptr && exists) {
      const float sink = p.sinks[head] * kLog2e;
      top = fmaxf(max, sink);
      weight = exp2_approx(max - top);
      total = sum * weight + exp2_approx(sink - top);
    }
    end.scale = weight / total;
    end.lse = (top + log2f(total)) * kLn2;
  }
  return end;
}

/// Element of O at which a row begins.
__device__ inline std::int64_t out_element(const AttentionParams& p, const RowPlace& place) {
  return place.token * p.out_token_stride + place.head * p.out_head_stride;
}

/// The LSE of a row, where it is wanted.
__device__ inline void write_lse(const AttentionParams& p, const RowPlace& place, float lse) {
  if (p.lse != nullptr) p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = lse;
}

/// What the offset of K adds to every logit of a row (base 2), which its state lacks: q . offset. By `kLanes`
/// neighbours; all lanes of the warp take part.
template <int kLanes>
__device__ inline float offset_logit(const AttentionParams& p, const RowPlace& place, int lane, bool exists) {
  if (p.channels.offset == nullptr) return 0.0f;
  const int dim = p.parts[0].dim;
  float sum = 0.0f;
  if (exists) {
    const std::int64_t q = place.token * p.q_token_stride + place.head * p.q_head_stride;
    const float* const offset = p.channels.offset + place.head / p.schedule.params.group * dim;
#pragma unroll 1
    for (int d = lane % kLanes; d < dim; d += kLanes) {
      sum += load_value(p.q_type, p.q, q + d) * offset[d];
    }
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  return sum * p.scale_log2;
}

/// row_end() of a state that lacks offset_logit(), which `kLanes` neighbours work out.
template <int kLanes>
__device__ inline RowEnd row_end_with_offset(const AttentionParams& p, const RowPlace& place, float max,
                                             float sum, int lane, bool exists) {
  const float offset = offset_logit<kLanes>(p, place, lane, exists);  // of a row without keys it may be NaN
  return row_end(p, place.head, max == kMinus ? kMinus : max + offset, sum, exists);
}

/// What is known of O where a row is written.
enum class RowStore {
  kHalves,    ///< bf16 or f16, rows begin at multiples of 8 bytes
  kPairs,     ///< f32, too
  kAnything,  ///< rows may begin anywhere
};

/// Multiplies by `end.scale`, rotates back, and writes O and the LSE of a row.
template <int kDim, RowStore kStore, class Row>
__device__ inline void write_row(const AttentionParams& p, const RowPlace& place, const Row& r,
                                 const RowEnd& end, int lane, bool keep) {
  constexpr int kQuads = Row::kQuads;
  float scale = end.scale;
  float x[kQuads][4];
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    x[j][0] = r.x[j].x, x[j][1] = r.x[j].y, x[j][2] = r.x[j].z, x[j][3] = r.x[j].w;
  }
  if (p.rotate_v) {
    constexpr int kBlock = hadamard::block_size(kDim), kInLanes = 4 * Row::kLanes;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) rotate_lanes < 4, kBlock<kInLanes ? kBlock : kInLanes>(x[j], lane);
#pragma unroll
    for (int h = 1; h * kInLanes < kBlock; h *= 2) {
#pragma unroll
      for (int i = 0; i < 4 * kQuads; ++i) {
        if (i / 4 & h) continue;
        const float a = x[i / 4][i % 4], b = x[i / 4 + h][i % 4];
        x[i / 4][i % 4] = a + b, x[i / 4 + h][i % 4] = a - b;
      }
    }
    scale *= hadamard::factor(kBlock);
  }
  const std::int64_t out = out_element(p, place);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const float a = x[j][0] * scale, b = x[j][1] * scale, c = x[j][2] * scale, d = x[j][3] * scale;
    if (!keep || !Row::has(j, lane)) continue;
    const std::int64_t at = out + Row::dim(j, lane);
    if constexpr (kStore == RowStore::kAnything) {
      store_value(p.out_type, p.out, at, a);
      store_value(p.out_type, p.out, at + 1, b);
      store_value(p.out_type, p.out, at + 2, c);
      store_value(p.out_type, p.out, at + 3, d);
    } else if (kStore == RowStore::kPairs && p.out_type == DType::kFloat32) {
      auto* const to = reinterpret_cast<float2*>(static_cast<float*>(p.out) + at);
      to[0] = {a, b}, to[1] = {c, d};
    } else {
      *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(p.out) + at) = {pack_16bit(p.out_type, a, b),
                                                                            pack_16bit(p.out_type, c, d)};
    }
  }
  if (keep && lane % Row::kLanes == 0) write_lse(p, place, end.lse);
}

/// The same of a state that lacks offset_logit(): divides by the sum (with the sink).
template <int kDim, RowStore kStore, class Row>
__device__ inline void write_row(const AttentionParams& p, const RowPlace& place, const Row& r, int lane,
                                 bool keep) {
  const RowEnd end = row_end_with_offset<Row::kLanes>(p, place, r.max, r.sum, lane, keep);
  write_row<kDim, kStore>(p, place, r, end, lane, keep);
}

}  // namespace halftone::cuda
