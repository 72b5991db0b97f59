// A warpgroup that computes: 64 packed rows of an item against its keys, from the last tile to the first.
// While O takes up one tile's P and V, the next tile's Q K^T is on its way.
#pragma once

#include "cuda/attention/logits.h"
#include "cuda/device/wgmma.h"
#include "cuda/prefill/load.h"

namespace halftone::cuda {

/// The state of a lane's rows g and g + 8: base-2 logits minus `offset` are the exponents of P. Only a logit
/// so much larger that P would leave the range in which its type and O keep their precision raises the
/// offset, so that most tiles need no rescaling.
template <PrefillConfig C>
struct RunningSoftmax {
  // P of f16 begins near the top of its range, whose lower end is near.
  static constexpr float kFirstLog2 = C.dtype == DType::kFloat16 ? 7.0f : 0.0f;
  static constexpr float kLargestLog2 = kFirstLog2 + 8.0f;
  static constexpr float kEmpty = -3.402823466e38f;  // finite, so that masked logits give P = 0
  float offset[2] = {kEmpty, kEmpty};
  float sum[2] = {0.0f, 0.0f};  // of the lane's columns

  __device__ bool empty(int r) const { return offset[r] == kEmpty; }
};

template <PrefillConfig C>
struct Consumer {
  using Traits = PrefillTraits<C>;
  using Item = typename Traits::Item;
  static constexpr int kS = C.kv_tile / 2, kO = C.head_dim / 2;  // registers of a lane
  static constexpr int kTiles = C.kv_tile / kTileTokens;
  using Logits = float[kS];
  using Probabilities = std::uint32_t[kTiles][4];

  const AttentionParams& p;
  typename Traits::Shared& s;
  int thread;  // of the warpgroup's 128; read anew now and then, to free its register
  float o[kO];
  RunningSoftmax<C> softmax;

  __device__ void locate() { thread = thread_index(); }
  __device__ int group() const { return thread / 128; }
  __device__ int warp() const { return thread / 32 % 4; }
  __device__ int lane() const { return thread % 32; }
  /// Of the lane, the first of two packed rows, 8 apart.
  __device__ int first_row() const { return thread / 32 * 16 + thread % 32 / 4; }

  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] = 0.0f;
    softmax = {};
  }

  /// S = Q K^T of a stage.
  __device__ void begin_scores(int stage, Logits& x) const {
    const std::uint64_t q = swizzled_matrix(uniform(shared_address(s.q[group()])));
    const std::uint64_t k = swizzled_matrix(uniform(shared_address(s.k[stage])));
#pragma unroll
    for (int step = 0; step < C.head_dim / 16; ++step) {
      const int chunk = step / 4, within = step % 4 * 2;
      const std::uint64_t a = q + (chunk * (64 * 128 / 16) + within);
      const std::uint64_t b = k + (chunk * (C.kv_tile * 128 / 16) + within);
      if (step == 0) {
        wgmma_first<C.dtype>(x, a, b);
      } else {
        wgmma_add<C.dtype>(x, a, b);
      }
    }
    wgmma_commit();
  }
  /// O += P V of a stage.
  __device__ void begin_output(int stage, const Probabilities& prob) {
    const std::uint64_t v = swizzled_matrix(uniform(shared_address(s.v[stage])), C.kv_tile * 128);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) wgmma_add<C.dtype, C.dtype, true>(o, prob[i], v + i * (16 * 128 / 16));
    wgmma_commit();
  }

  /// Products become base-2 logits, capped and biased: four at a time, since few registers are free.
  __device__ void cap_and_bias(Logits& x, const Item& item, int token) const {
    const Softcap cap(p);
    const int row = first_row();
#pragma unroll
    for (int i = 0; i < kS / 4; ++i) {
      float(&four)[4] = reinterpret_cast<float(&)[4]>(x[4 * i]);
      pin(four);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        four[e] *= p.scale_log2;
        if (p.softcap > 0.0f) four[e] = cap(four[e]);
        const int away = item.position[row + e / 2 * 8] - (token + 8 * i + thread % 4 * 2 + e % 2);
        if (p.alibi_slopes != nullptr) four[e] -= item.slope[row + e / 2 * 8] * abs(away);
      }
      pin(four);
    }
  }
  __device__ void mask(Logits& x, const Item& item, int token, std::uint32_t live) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const VisibleKeys seen(p, item.position[first_row() + 8 * r], item.item.work.kv_end);
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool has = live >> (i / 2) & 1 && seen.has(token + 8 * i + thread % 4 * 2 + e);
          if (!has) x[4 * i + 2 * r + e] = kMinus;
        }
      }
    }
  }

  /// Whether a logit of the tile asks for a larger offset, of any row of the warp; then the largest ones.
  __device__ bool exceeds(const Logits& x, float factor, float (&most)[2]) const {
    most[0] = x[0], most[1] = x[2];
#pragma unroll
    for (int i = 0; i < kS; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], x[i]);
    constexpr float kLargest = RunningSoftmax<C>::kLargestLog2;
    return __any_sync(~0u, fmaf(most[0], factor, -softmax.offset[0]) > kLargest ||
                               fmaf(most[1], factor, -softmax.offset[1]) > kLargest);
  }
  /// Raises the offsets of rows of which that is so, by the largest of the lane's logits.
  __device__ void raise(float factor, float (&most)[2]) {
    using Softmax = RunningSoftmax<C>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
      float rescale = 1.0f;
      if (fmaf(most[r], factor, -softmax.offset[r]) > Softmax::kLargestLog2) {
        const float offset = fmaf(most[r], factor, -Softmax::kFirstLog2);
        rescale = exp2_approx(softmax.offset[r] - offset);  // 0 of an empty row, whose O is 0
        softmax.offset[r] = offset;
        softmax.sum[r] *= rescale;
      }
      if (thread % 4 == 0) s.rescale[first_row() + 8 * r] = rescale;
    }
    __syncwarp();
  }
  /// What O takes part in of that, once it is complete.
  __device__ void rescale_output() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float rescale = s.rescale[first_row() + 8 * r];
#pragma unroll
      for (int i = 0; i < kO / 2; ++i) o[i / 2 * 4 + 2 * r + i % 2] *= rescale;
    }
    __syncwarp();
  }
  /// P, not yet rounded.
  __device__ void exponentiate(Logits& x, float factor) {
#pragma unroll
    for (int i = 0; i < kS; ++i) {
      const int r = i / 2 % 2;
      x[i] = exp2_approx(fmaf(x[i], factor, -softmax.offset[r]));
      softmax.sum[r] += x[i];
    }
  }
  __device__ static void round(const Logits& x, Probabilities& prob) {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) {
      prob[i / 4][i % 4] = C.dtype == DType::kBFloat16 ? pack_bf16x2(x[2 * i], x[2 * i + 1])
                                                       : pack_f16x2(x[2 * i], x[2 * i + 1]);
    }
  }
  /// Zeroes V of tokens that the request does not have: P is 0 there, but 0 times what lies there may be NaN.
  __device__ void clear_dead(int stage, int alive) {
    uint4* rows = reinterpret_cast<uint4*>(s.v[stage]);
#pragma unroll 1
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
#pragma unroll 1
      for (int i = max(alive, 0) * 8 + thread % 128; i < C.kv_tile * 8; i += 128) {
        rows[chunk * (C.kv_tile * 8) + i] = uint4{};
      }
    }
    fence_async_shared();
    team_barrier(group());
  }

  __device__ void release(std::uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&barrier));
  }
};

}  // namespace halftone::cuda
