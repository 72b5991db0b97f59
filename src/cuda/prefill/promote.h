// Products of E4M3 are added up by the tensor cores with some 13 bits. So O moves on, to sums in fp32, before
// what a tile adds is lost to it.
#pragma once

#include "cuda/prefill/compute.h"
#include "cuda/prefill/params.h"

namespace halftone::cuda {

/// Of a warp: a thread's own values of O, in PrefillParams::promoted. What has moved stays relative to the
/// offsets of the first time, so that rows which are raised or lowered need not look at it, until an offset
/// is so much larger that what moves, raised to be relative to the first, might no longer be finite.
template <PrefillConfig C>
struct PromotedSums {
  static constexpr int kFours = Consumer<C>::kO / 4;
  static constexpr float kMostUp = 60.0f;  // log2, of an offset since the first time
  const PrefillParams& params;
  Consumer<C>& c;

  /// Worked out anew: registers are few.
  __device__ float4* own() const {
    const std::uint32_t thread = thread_index();
    const std::int64_t warpgroup = std::int64_t{block_index()} * C.warpgroups + thread / 128;
    return params.promoted + warpgroup * (kFours * 128) + thread % 128;
  }
  __device__ float& first_offset(int r) const { return c.s.promoted_offset[c.first_row() + 8 * r]; }

  /// O becomes 0. `more`: some of it has moved before.
  __device__ void add(bool more) {
    float up[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) up[r] = more ? c.softmax.offset[r] - first_offset(r) : 0.0f;
    const bool anew = !more || __any_sync(~0u, up[0] > kMostUp || up[1] > kMostUp);
    if (anew && c.thread % 4 == 0)
      first_offset(0) = c.softmax.offset[0], first_offset(1) = c.softmax.offset[1];
    // Anew, what has moved is lowered; else what moves is raised.
    const float scale[2] = {exp2_approx(anew ? -up[0] : up[0]), exp2_approx(anew ? -up[1] : up[1])};
    float4* to = own();
#pragma unroll
    for (int i = 0; i < kFours; ++i, to += 128) {
      float(&four)[4] = reinterpret_cast<float(&)[4]>(c.o[4 * i]);
      pin(four);  // one after the other: registers are few
      if (!anew) {
        add_to(to, {four[0] * scale[0], four[1] * scale[0], four[2] * scale[1], four[3] * scale[1]});
      } else {
        const float4 part = more ? __ldcg(to) : float4{};
        *to = {part.x * scale[0] + four[0], part.y * scale[0] + four[1], part.z * scale[1] + four[2],
               part.w * scale[1] + four[3]};
      }
      four[0] = four[1] = four[2] = four[3] = 0.0f;
      pin(four);
    }
    __syncwarp();
  }
  /// O becomes the sum of all tiles.
  __device__ void collect() {
    const float scale[2] = {exp2_approx(first_offset(0) - c.softmax.offset[0]),
                            exp2_approx(first_offset(1) - c.softmax.offset[1])};
    const float4* from = own();
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 part = __ldcg(from + 128 * i);
      c.o[4 * i] += part.x * scale[0], c.o[4 * i + 1] += part.y * scale[0];
      c.o[4 * i + 2] += part.z * scale[1], c.o[4 * i + 3] += part.w * scale[1];
    }
  }
};

}  // namespace halftone::cuda
