// How the parts of a cut unit are merged.
#pragma once

#include "cuda/attention/states.h"

namespace halftone::cuda {

/// Two states, LSEs in base 2 with rows that are means: what the rows are multiplied with, and the LSE of
/// both. With absolute splits every merge is a chain of these, wherever the parts come from.
struct Fold {
  float first, second, lse;
  __device__ Fold(float before, float own) {
    const float top = fmaxf(before, own), a = weight_log2(before, top), b = weight_log2(own, top);
    const float sum = a + b;
    first = top == kMinus ? 0.0f : a / sum, second = top == kMinus ? 0.0f : b / sum;
    lse = top == kMinus ? kMinus : top + log2f(sum);
  }
  __device__ float mix(float before, float own) const { return fmaf(own, second, before * first); }
};

/// 64 adjacent dims of a row from the partial slots of its unit, by a warp: both of its halves have them all.
struct RowPiece : Row<64, 16> {
  static constexpr int kDims = 64;

  /// One after the other, to the bit as the items of a worker are folded.
  __device__ void fold(const Parts& parts, int lane) {
    constexpr int kAtOnce = 8;
    max = kMinus;
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kAtOnce) {
      Chunk<kAtOnce> chunk;
      chunk.load(parts, first, lane);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= parts.count) break;
        if (first + i == 0) {
          max = chunk.state[i].x, x[0] = chunk.x[i][0];
          continue;
        }
        const Fold by(max, chunk.state[i].x);
        float4& a = x[0];
        const float4& b = chunk.x[i][0];
        a = {by.mix(a.x, b.x), by.mix(a.y, b.y), by.mix(a.z, b.z), by.mix(a.w, b.w)};
        max = by.lse;
      }
    }
    sum = max == kMinus ? 0.0f : 1.0f;
  }

  /// With the weights of 32 parts worked out side by side; half a warp adds up every other one.
  __device__ void weigh(const Parts& parts, int lane) {
    const int half = lane / kLanes;
#pragma unroll 1
    for (int base = 0; base < parts.count; base += 32) {
      const int count = min(parts.count - base, 32);
      const float* values = parts.values + base * parts.value_stride + dim(0, lane);
      const float own = lane < count ? parts.states[(base + lane) * parts.state_stride].x : kMinus;
      float4 v[kAtOnce];
      load(values, parts.value_stride, half, count, v);
      const PartWeights<32> weights({own, 1.0f}, max, sum);
      const float weight = weights.own, before = weights.before;
      x[0] = {x[0].x * before, x[0].y * before, x[0].z * before, x[0].w * before};
      add(v, weight, half);
#pragma unroll 1
      for (int first = half + 2 * kAtOnce; first - half < count; first += 2 * kAtOnce) {
        load(values, parts.value_stride, first, count, v);
        add(v, weight, first);
      }
    }
    float* const mine = &x[0].x;
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[i] += __shfl_xor_sync(~0u, mine[i], kLanes);
  }

 private:
  static constexpr int kAtOnce = 8;

  static __device__ void load(const float* values, int stride, int first, int count, float4 (&v)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = {};
      if (first + 2 * i < count) v[i] = *reinterpret_cast<const float4*>(values + (first + 2 * i) * stride);
    }
  }
  __device__ void add(const float4 (&v)[kAtOnce], float weight, int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float w = __shfl_sync(~0u, weight, min(first + 2 * i, 31));  // of no part: 0, or of v = 0
      x[0].x = fmaf(v[i].x, w, x[0].x), x[0].y = fmaf(v[i].y, w, x[0].y);
      x[0].z = fmaf(v[i].z, w, x[0].z), x[0].w = fmaf(v[i].w, w, x[0].w);
    }
  }
};

}  // namespace halftone::cuda
