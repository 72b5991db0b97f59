// Parts of cut units, but for splits at absolute positions: in f16, so that half the bytes go through memory.
// A part's row is the mean of V, of each half of the dims times a power of two, and its LSE.
#pragma once

#include "cuda/attention/output.h"
#include "cuda/attention/states.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

struct PartState {
  float lse;             // base 2; kMinus: no key
  std::uint32_t powers;  // 16 bits of each half

  __device__ int power(int half) const { return static_cast<std::int16_t>(powers >> 16 * half); }
};
static_assert(sizeof(PartState) == sizeof(float2));

/// In the slots of the workspace, which have room for fp32.
struct PartSlots {
  Slots<kLatentDims> slots;

  __device__ PartState* state(int slot, int row) const {
    return reinterpret_cast<PartState*>(slots.state(slot, row));
  }
  __device__ std::uint16_t* values(int slot, int row) const {
    return reinterpret_cast<std::uint16_t*>(slots.values(slot, row));
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

/// Half of the dims of a row over the lanes of a warp, 8 each.
struct HalfRow {
  float x[8] = {};
  float max = kMinus, sum = 0.0f;

  /// Of a unit's parts from `slot` on.
  __device__ void merge(const AttentionParams& p, int slot, int parts, int row, int half, int lane) {
    constexpr int kAtOnce = 16;
    const PartSlots slots{{p}};
    const std::int64_t stride = std::int64_t{p.schedule.params.row_block} * kLatentDims * 2;  // to the next
#pragma unroll 1
    for (int base = 0; base < parts; base += 32) {
      const int count = min(parts - base, 32);
      const std::uint16_t* const values =
          slots.values(slot + base, row) + half * (kLatentDims / 2) + lane * 8;
      const PartState own = lane < count ? *slots.state(slot + base + lane, row) : PartState{kMinus, 0};
      uint4 v[kAtOnce];
      load(values, stride, count, v);
      const PartWeights weights(own.lse, max, sum);
#pragma unroll
      for (float& y : x) y *= weights.before;
      const float factor = weights.own * power_of_two(own.power(half));
      add(v, factor, 0);
#pragma unroll 1
      for (int first = kAtOnce; first < count; first += kAtOnce) {
        load(values + first * stride, stride, count - first, v);
        add(v, factor, first);
      }
    }
  }

  /// To the caller's tensors.
  __device__ void write(const AttentionParams& p, const RowPlace& place, int half, int lane) const {
    const RowEnd end = row_end(p, place.head, max, sum, true);
    const std::int64_t at = out_element(p, place) + half * (kLatentDims / 2) + lane * 8;
    if (p.out_type == DType::kFloat32) {
      float2* const to = reinterpret_cast<float2*>(static_cast<float*>(p.out) + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = {x[2 * i] * end.scale, x[2 * i + 1] * end.scale};
    } else {
      std::uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = x[2 * i] * end.scale, b = x[2 * i + 1] * end.scale;
        w[i] = pack_16bit(p.out_type, a, b);
      }
      std::uint16_t* const to = static_cast<std::uint16_t*>(p.out) + at;
      store_sixteen(to, w, (reinterpret_cast<std::uintptr_t>(to) & 15) == 0);
    }
    if (half == 0 && lane == 0) write_lse(p, place, end.lse);
  }

 private:
  template <int kAtOnce>
  static __device__ void load(const std::uint16_t* values, std::int64_t stride, int count,
                              uint4 (&v)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = {};
      if (i < count) v[i] = *reinterpret_cast<const uint4*>(values + i * stride);
    }
  }
  template <int kAtOnce>
  __device__ void add(const uint4 (&v)[kAtOnce], float factor, int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float w = __shfl_sync(~0u, factor, min(first + i, 31));  // of no part: 0, or of v = 0
      const std::uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 y = unpack_f16x2(words[k]);
        x[2 * k] = fmaf(y.x, w, x[2 * k]);
        x[2 * k + 1] = fmaf(y.y, w, x[2 * k + 1]);
      }
    }
  }
};

}  // namespace halftone::cuda::wide
