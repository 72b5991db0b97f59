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
  __device__ float mix(float before, float own) const { return mix(before, own, first, second); }
  static __device__ float mix(float before, float own, float first, float second) {
    return fmaf(own, second, before * first);
  }
};

/// 64 adjacent dims of a row from the partial slots of its unit, by a warp: both of its halves have them all.
struct RowPiece : Row<64, 16> {
  static constexpr int kDims = 64;

  /// One after the other, to the bit as the items of a worker are folded.
  __device__ void fold(const Parts& parts, int lane) {
    constexpr int kAtOnce = 4;
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
    constexpr int kAtOnce = 8;
    const int half = lane / kLanes;
    const float* values = parts.values + half * parts.value_stride + dim(0, lane);
#pragma unroll 1
    for (int base = 0; base < parts.count; base += 32) {
      const int count = min(parts.count - base, 32);
      const float own = lane < count ? parts.states[(base + lane) * parts.state_stride].x : kMinus;
      float weight = 0.0f;
#pragma unroll 1
      for (int first = 0; first < count; first += 2 * kAtOnce) {
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          v[i] = {};
          if (first + half + 2 * i < count) v[i] = *reinterpret_cast<const float4*>(values);
          values += 2 * parts.value_stride;
        }
        if (first == 0) {
          const PartWeights<32> weights({own, 1.0f}, max, sum);
          weight = weights.own;
          const float before = weights.before;
          x[0] = {x[0].x * before, x[0].y * before, x[0].z * before, x[0].w * before};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float w = __shfl_sync(~0u, weight, first + half + 2 * i);  // of no part: 0
          x[0].x = fmaf(v[i].x, w, x[0].x), x[0].y = fmaf(v[i].y, w, x[0].y);
          x[0].z = fmaf(v[i].z, w, x[0].z), x[0].w = fmaf(v[i].w, w, x[0].w);
        }
      }
    }
    float* const mine = &x[0].x;
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[i] += __shfl_xor_sync(~0u, mine[i], kLanes);
  }
};

}  // namespace halftone::cuda
