// Parts of cut units, but for splits at absolute positions: in f16, so that half the bytes go through memory.
// A part's row is the mean of V, of each half of the dims times a power of two, and its LSE.
#pragma once

#include "cuda/attention/output.h"
#include "cuda/attention/states.h"
#include "cuda/device/reduce.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

struct alignas(8) PartState {
  float lse;             // base 2; kMinus: no key
  std::uint32_t powers;  // 16 bits of each half

  __device__ int power(int half) const { return static_cast<std::int16_t>(powers >> 16 * half); }
};
static_assert(sizeof(PartState) == sizeof(float2));

/// In the slots of the workspace, which have room for fp32. Values lie in pieces of 32 dims of 8 rows, 16
/// bytes a lane, as the lanes of a warp hold them: neither who stores nor who merges trades them.
struct PartSlots {
  static constexpr int kLanePieces = kLatentDims / 32;  // of 8 rows
  Slots<kLatentDims> slots;

  __device__ PartState* state(int slot, int row) const {
    return reinterpret_cast<PartState*>(slots.state(slot, row));
  }
  /// Of the rows from `first_row` on.
  __device__ uint4* piece(int slot, int first_row, int index, int lane) const {
    return reinterpret_cast<uint4*>(slots.values(slot, first_row)) + 32 * index + lane;
  }
};

/// The power of two without which a part's numbers, of which `most` is the largest, use f16's range.
__device__ inline int power_for(float most) {
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
  return most == 0.0f ? 0 : max(-100, min(100, exponent - 14));
}

/// 16 bytes, `aligned` or at a multiple of 8. Written out, since the compiler makes single words of the two.
__device__ inline void store_sixteen(void* at, const std::uint32_t (&w)[4], bool aligned) {
  if (aligned) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                 "r"(w[3])
                 : "memory");
  } else {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(w[0]), "r"(w[1]) : "memory");
    asm volatile("st.global.v2.b32 [%0+8], {%1, %2};" ::"l"(at), "r"(w[2]), "r"(w[3]) : "memory");
  }
}

/// A piece of a unit's parts: of lane (g, t) 8 dims of row g.
struct MergedPiece {
  float x[8] = {};
  float max = kMinus, sum = 0.0f;  // of the row

  /// `half`: of the dims, `from`: of the first slot, `row`: the lane's.
  __device__ void merge(const PartSlots& slots, int slot, int parts, int row, int half, const uint4* from,
                        int lane) {
    constexpr int kAtOnce = 16, kOwn = kAtOnce / 4;  // parts whose states a lane has
    const std::int64_t stride =                      // to the next part
        std::int64_t{slots.slots.p.schedule.params.row_block} * kLatentDims * sizeof(float) / sizeof(uint4);
#pragma unroll 1
    for (int base = 0; base < parts; base += kAtOnce, from += kAtOnce * stride) {
      const int count = min(parts - base, kAtOnce);
      PartState own[kOwn];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int part = 4 * k + lane % 4;
        own[k] = part < count ? *slots.state(slot + base + part, row) : PartState{kMinus, 0};
      }
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) v[i] = i < count ? from[i * stride] : uint4{};
      float top = kMinus, total = 0.0f, factor[kOwn];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) top = fmaxf(top, own[k].lse);
      top = fmaxf(largest_of_lanes<1, 4>(top), max);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const float weight = weight_log2(own[k].lse, top);
        total += weight;
        factor[k] = weight * power_of_two(own[k].power(half));
      }
      const float before = weight_log2(max, top);
      sum = fmaf(sum, before, sum_of_lanes<1, 4>(total));
      max = top;
#pragma unroll
      for (float& y : x) y *= before;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float w = __shfl_sync(~0u, factor[i / 4], (lane & ~3) + i % 4);
        const std::uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 y = unpack_f16x2(words[k]);
          x[2 * k] = fmaf(y.x, w, x[2 * k]);
          x[2 * k + 1] = fmaf(y.y, w, x[2 * k + 1]);
        }
      }
    }
  }
};

}  // namespace halftone::cuda::wide
