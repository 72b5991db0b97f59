// Sums of P V of E4M3 in fp32: the tensor cores keep few bits of them, so that what has been added up moves
// from time to time.
#pragma once

#include "cuda/prefill/compute.h"
#include "cuda/prefill/params.h"

namespace halftone::cuda {

/// Of a warp: a thread's own values of O, four together, some in shared memory and the others in
/// PrefillParams::promoted. What has moved stays relative to the offsets of the first time, so that rows
/// which are raised or lowered need not look at it, until an offset is so much larger that what moves, raised
/// to be relative to the first, might no longer be finite.
template <PrefillConfig C>
struct PromotedSums {
  using Traits = PrefillTraits<C>;
  static constexpr int kFours = Consumer<C>::kO / 4;
  static constexpr int kFree = C.promoted_near, kNear = near_sums(C);
  static_assert(kNear <= kFours);
  static constexpr float kMostUp = 60.0f;  // log2, of an offset since the first time
  const PrefillParams& params;
  Consumer<C>& c;
  int item;  // its number

  __device__ float4& near(int i) const {
    const std::uint32_t thread = thread_index();
    if (i < kFree) return c.s.promoted[i][thread];
    // Chunks of the place that codes of Q leave: in them each warp has its own rows', those that share rows a
    // part of these.
    constexpr int kRows = 16 * Traits::kRowBytes, kBytes = kRows / C.shares, kFoursOfChunk = kBytes / 512;
    const int chunk = code_chunks(C) + (i - kFree) / kFoursOfChunk;
    std::uint8_t* const place =
        c.s.q[item % Traits::kQueryBuffers][thread / (128 * C.shares)] + chunk * 4 * kRows;
    return reinterpret_cast<float4*>(place + thread / 32 % (4 * C.shares) *
                                                 kBytes)[(i - kFree) % kFoursOfChunk * 32 + thread % 32];
  }
  /// Of number kNear. Worked out anew: registers are few.
  __device__ float4* far() const {
    const std::uint32_t thread = thread_index();
    const std::int64_t warpgroup = std::int64_t{block_index()} * C.warpgroups + thread / 128;
    return params.promoted + warpgroup * ((kFours - kNear) * 128) + thread % 128;
  }
  __device__ float& first_offset(int r) const { return c.s.promoted_offset[c.own_row() + 8 * r]; }

  static __device__ float4 times(const float4& x, const float (&scale)[2]) {
    return {x.x * scale[0], x.y * scale[0], x.z * scale[1], x.w * scale[1]};
  }
  static __device__ float4 sum(const float4& x, const float4& y, const float (&scale)[2]) {
    return {fmaf(y.x, scale[0], x.x), fmaf(y.y, scale[0], x.y), fmaf(y.z, scale[1], x.z),
            fmaf(y.w, scale[1], x.w)};
  }
  __device__ float4 four(int i) const { return {c.o[4 * i], c.o[4 * i + 1], c.o[4 * i + 2], c.o[4 * i + 3]}; }
  __device__ void set_four(int i, const float4& x) const {
    c.o[4 * i] = x.x, c.o[4 * i + 1] = x.y, c.o[4 * i + 2] = x.z, c.o[4 * i + 3] = x.w;
  }

  /// Makes what has moved relative to offsets that are larger.
  __device__ void lower(const float (&scale)[2]) const {
#pragma unroll 1
    for (int i = 0; i < kNear; ++i) near(i) = times(near(i), scale);
    float4* sums = far();
#pragma unroll 1
    for (int i = kNear; i < kFours; ++i, sums += 128) *sums = times(__ldcg(sums), scale);
  }

  /// Adds O. The next product begins it anew (Consumer::begin_output()): zeros in its registers would have to
  /// wait until these are stored. `more`: some of it has moved before.
  __device__ void add(bool more) {
    float up[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) up[r] = more ? c.softmax.offset[r] - first_offset(r) : 0.0f;
    const bool anew = !more || __any_sync(~0u, up[0] > kMostUp || up[1] > kMostUp);
    if (anew && c.thread % 4 == 0)
      first_offset(0) = c.softmax.offset[0], first_offset(1) = c.softmax.offset[1];
    if (anew && more) lower({exp2_approx(-up[0]), exp2_approx(-up[1])});
    const float scale[2] = {anew ? 1.0f : exp2_approx(up[0]), anew ? 1.0f : exp2_approx(up[1])};
    float4* const others = far() - 128 * kNear;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (i < kNear) {
        near(i) = sum(more ? near(i) : float4{}, four(i), scale);
      } else {
        add_or_set(others + 128 * i, times(four(i), scale), more);
      }
    }
    __syncwarp();
  }
  /// O becomes all of it.
  __device__ void collect() {
    const float scale[2] = {exp2_approx(first_offset(0) - c.softmax.offset[0]),
                            exp2_approx(first_offset(1) - c.softmax.offset[1])};
    const float4* const others = far() - 128 * kNear;
    const volatile bool& some = c.s.own[thread_index() / 32].promoted[item % Traits::kItems];
    constexpr int kAtOnce = 8;
    static_assert(kFours % kAtOnce == 0);
#pragma unroll
    for (int first = 0; first < kFours; first += kAtOnce) {
      if (!some) break;  // there are: but without a branch ptxas brings more at once than registers hold
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        set_four(i, sum(four(i), i < kNear ? near(i) : __ldcg(others + 128 * i), scale));
      }
    }
    fence_async_shared();  // O or the next queries come to where sums were
    __syncwarp();
  }
};

}  // namespace halftone::cuda
