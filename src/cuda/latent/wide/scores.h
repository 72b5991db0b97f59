// The warpgroup that computes logits and probabilities: S = Q K^T of a step, its softmax, and P where the
// rope part of the step's tokens was. O's sums are relative to a reference of their own where tokens have
// lost a power of two: their P gets it back.
#pragma once

#include <climits>

#include "cuda/attention/logits.h"
#include "cuda/device/reduce.h"
#include "cuda/latent/wide/queries.h"

namespace halftone::cuda::wide {

template <LatentWideConfig C>
struct Scores {
  static constexpr int kS = kBlockTokens / 2;  // registers of a lane
  // P is f16: it begins near the top of its range, whose lower end is near. Only a logit so much larger that
  // P would leave the range raises what it is relative to, so that most steps need no rescaling.
  static constexpr float kFirstLog2 = 7.0f, kLargestLog2 = 15.0f;
  static constexpr float kEmpty = -3.402823466e38f;  // finite, so that masked logits give P = 0
  using Logits = float[kS];

  const AttentionParams& p;
  Shared& s;
  int rank;
  Queries<C> queries;
  float offset[2], reference[2], sum[2];  // of rows g and g + 8; sum: of the lane's columns
  bool apart;                             // of the item: reference is not offset

  __device__ int warp() const { return queries.warp(); }
  __device__ int lane() const { return queries.lane(); }

  __device__ void begin() {
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = reference[r] = kEmpty, sum[r] = 0.0f;
    apart = false;
  }

  static constexpr bool kF16Rope = C.q_dtype == DType::kFloat16 && !kRotaryV<C>;

  template <bool kFirst>
  __device__ void multiply_rope(std::uint64_t rope, Logits& x) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (kFirst && step == 0) {
        wgmma_first<C.q_dtype>(x, queries.rope[0], rope);
      } else {
        wgmma_add<C.q_dtype>(x, queries.rope[step], rope + step * 2);
      }
    }
  }
  template <bool kFirst>
  __device__ void multiply_latent(std::uint64_t k, std::uint64_t q, Logits& x) const {
    constexpr DType kType = kProducts;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t b = k + (Queries<C>::kLastColumn * (kGroupColumnBytes / 16) + step * 2);
      if (kFirst && step == 0) {
        wgmma_first<kType>(x, queries.last[0], b);
      } else {
        wgmma_add<kType>(x, queries.last[step], b);
      }
    }
#pragma unroll
    for (int step = 0; step < 4 * kQueryColumns; ++step) {
      const int column = step / 4, along = step % 4 * 2;
      wgmma_add<kType>(x, q + (column * (kColumnBytes / 16) + along),
                       k + (column * (kGroupColumnBytes / 16) + along));
    }
  }
  /// Whether a step has tokens that have lost a power of two; and which, of the lane's columns 8 j + 2 t + e.
  __device__ bool apart_tokens(int third) const {
    return (s.notes[third][0].apart | s.notes[third][1].apart) != 0;
  }
  __device__ int exponent(int third, int j, int e) const {
    return s.notes[third][j / 4].exponent[j % 4 * 8 + lane() % 4 * 2 + e];
  }
  /// Products of tokens that have lost a power of two get it back.
  __device__ void restore(Logits& x, int third) const {
#pragma unroll
    for (int i = 0; i < kS; i += 4) {
      float(&four)[4] = reinterpret_cast<float(&)[4]>(x[i]);
      pin(four);  // four at a time: few registers are free
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        four[e] *= power_of_two(exponent(third, i / 4, e % 2));
      }
      pin(four);
    }
  }

  __device__ void multiply(const StepPlace& at, Logits& x, bool tokens_apart) const {
    const std::uint64_t rope = swizzled_matrix(uniform(shared_address(s.rope[at.third()])));
    const std::uint64_t k = swizzled_matrix(uniform(shared_address(s.kv[at.stage()])), 16, kGroupBytes);
    const std::uint64_t q = swizzled_matrix(uniform(shared_address(s.q)));
    wgmma_begin();
    if constexpr (kRotaryV<C>) {
      multiply_latent<true>(k, q, x);
    } else if constexpr (kF16Rope) {  // f16 rope parts cannot lose the powers of two
      multiply_latent<true>(k, q, x);
      wgmma_commit();
      wgmma_wait<0>();
      pin(x);
      if (tokens_apart) restore(x, at.third());
      wgmma_begin();
      multiply_rope<false>(rope, x);
    } else {
      multiply_rope<true>(rope, x);
      multiply_latent<false>(k, q, x);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
  }

  /// Products become logits.
  __device__ void cap(Logits& x) const {
    const Softcap softcap(p);
#pragma unroll
    for (int i = 0; i < kS; i += 4) {
      float(&four)[4] = reinterpret_cast<float(&)[4]>(x[i]);
      pin(four);
      cap_logits<RowsAsM>(
          p, softcap, [&](int row) { return queries.factor[row]; }, four);
      pin(four);
    }
  }
  __device__ void mask_skipped(Logits& x, int third) const {
    // Bits of the lane's columns 8 j + 2 t + e, of the lower j and of the upper ones.
    const int t = lane() % 4, first = kSingle<C> ? t / 2 * 8 + t % 2 * 2 : 2 * t;
    const std::uint32_t live[2] = {s.notes[third][0].live >> first, s.notes[third][1].live >> first};
#pragma unroll
    for (int i = 0; i < kS; ++i) {
      const int j = i / 4 % 4, bit = (kSingle<C> ? j % 2 * 16 + j / 2 * 4 : j * 8) + i % 2;
      if (!(live[i / 16] >> bit & 1)) x[i] = kMinus;
    }
  }

  /// Whether a logit asks for a larger offset, of any row of the warp; then the lane's largest ones.
  __device__ bool exceeds(const Logits& x, const float (&factor)[2], const float (&to)[2],
                          float (&most)[2]) const {
    most[0] = x[0], most[1] = x[2];
#pragma unroll
    for (int i = 0; i < kS; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], x[i]);
    return __any_sync(~0u, fmaf(most[0], factor[0], -to[0]) > kLargestLog2 ||
                               fmaf(most[1], factor[1], -to[1]) > kLargestLog2);
  }
  /// Raises offsets of rows of which that is so, to integers. `rescale`: what sums relative to them are
  /// multiplied by, a power of two or 0.
  __device__ void raise(const float (&factor)[2], float (&most)[2], float (&to)[2],
                        float (&rescale)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = largest_of_lanes<1, 4>(most[r]);
      rescale[r] = 1.0f;
      if (fmaf(most[r], factor[r], -to[r]) > kLargestLog2) {
        const float raised = ceilf(fmaf(most[r], factor[r], -kFirstLog2));
        rescale[r] = exp2_approx(to[r] - raised);  // 0 of an empty row, whose sums are 0
        to[r] = raised;
      }
    }
  }
  /// Tells the warps that have the rows of O.
  __device__ void publish_rescale(int parity, bool raised, const float (&rescale)[2]) const {
    if (lane() == 0) s.raised[parity][warp()] = raised;
    if (raised && lane() % 4 == 0) {
      s.rescale[parity][warp() * 16 + lane() / 4] = biased_exponent(rescale[0]);
      s.rescale[parity][warp() * 16 + lane() / 4 + 8] = biased_exponent(rescale[1]);
    }
  }
  /// P of half of the tokens, where O takes it up while the other half is still to come. `counts`: adds it
  /// up.
  __device__ void publish_half(Logits& x, const float (&factor)[2], const float (&to)[2], bool counts,
                               int half, const StepPlace& at) {
    const std::uint32_t rows = shared_address(s.rope[at.third()]) + (warp() * 16 + lane() % 16) * 128;
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) {
      float& y = x[kS / 2 * half + i];
      y = exp2_approx(fmaf(y, factor[i / 2 % 2], -to[i / 2 % 2]));
      if (counts) sum[i / 2 % 2] += y;
    }
    if (kPassesRopes<C> && half == 0) {  // the other block has what P takes the place of
      barrier_wait(shared_address(&s.rope_copied[at.stage()]), at.parity());
    }
#pragma unroll
    for (int j = 4 * half; j < 4 * half + 4; j += 2) {
      const float* y = x + 4 * j;
      store_matrices(rows + ((j + lane() / 16) ^ lane() % 8) * 16, pack_f16x2(y[0], y[1]),
                     pack_f16x2(y[2], y[3]), pack_f16x2(y[4], y[5]), pack_f16x2(y[6], y[7]));
    }
    fence_async_shared();
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&s.p_full[at.step % 2][half]));
  }
  __device__ void publish(Logits& x, const float (&factor)[2], const float (&to)[2], bool counts,
                          const StepPlace& at) {
    publish_half(x, factor, to, counts, 0, at);
    publish_half(x, factor, to, counts, 1, at);
  }

  __device__ void soften(Logits& x, const float (&factor)[2], const StepPlace& at) {
    float most[2], rescale[2];
    const bool raised = exceeds(x, factor, offset, most);
    if (raised) {
      raise(factor, most, offset, rescale);
      sum[0] *= rescale[0], sum[1] *= rescale[1];
    }
    publish_rescale(at.step % 2, raised, rescale);
    publish(x, factor, offset, true, at);
  }
  /// The same with tokens that have lost a power of two, of this or an earlier step: x are logits.
  __device__ void soften_apart(Logits& x, const StepPlace& at) {
    const int third = at.third();
    constexpr float kOne[2] = {1.0f, 1.0f};
    if (!apart) reference[0] = offset[0], reference[1] = offset[1];
    apart = true;
    float most[2], rescale[2];
    if (exceeds(x, kOne, offset, most)) {
      raise(kOne, most, offset, rescale);
      sum[0] *= rescale[0], sum[1] *= rescale[1];
    }
#pragma unroll
    for (int i = 0; i < kS; i += 4) {
      float(&four)[4] = reinterpret_cast<float(&)[4]>(x[i]);
      pin(four);  // four at a time: few registers are free
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[e / 2] += exp2_approx(four[e] - offset[e / 2]);
        four[e] += static_cast<float>(exponent(third, i / 4, e % 2));
      }
      pin(four);
    }
    const bool raised = exceeds(x, kOne, reference, most);
    if (raised) raise(kOne, most, reference, rescale);
    publish_rescale(at.step % 2, raised, rescale);
    publish(x, kOne, reference, false, at);
  }

  /// Where O ends up relative to, of all rows.
  __device__ void publish_state(int index) {
    barrier_wait(shared_address(&s.state_empty), index % 2 ^ 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = sum_of_lanes<1, 4>(sum[r]);
      if (lane() % 4 == 0) {
        const bool empty = offset[r] == kEmpty;
        s.state[warp() * 16 + lane() / 4 + 8 * r] = {empty ? kMinus : offset[r], sum[r],
                                                     apart ? reference[r] : offset[r]};
      }
    }
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&s.state_full));
  }

  __device__ const DeviceItem& item(int index) const {
    return s.queue.items[index % unsigned{Queue::kCapacity}];
  }

  /// The step's rope parts are complete here: the copy of the other block's half has ended, and there P may
  /// take the place of what it read.
  __device__ void tell_copied(const StepPlace& at) const {
    if (queries.thread == 0) {
      cluster_arrive(cluster_address(shared_address(&s.rope_copied[at.stage()]), rank ^ 1));
    }
  }

  __device__ void run() {
    StepPlace at;
    queries.locate();
    if (!s.queue.has(0)) return;
    queries.request(item(0));
#pragma unroll 1
    for (int index = 0;; ++index) {
      queries.complete(item(index), index);
      team_barrier(kScoreTeam);
      begin();
      bool first = true;
#pragma unroll 1
      for (int left = steps_of(item(index).work); left > 0; --left, ++at.step) {
        queries.locate();
        const int third = at.third();
        Logits x;
        barrier_wait(shared_address(&s.kv_full[at.stage()]), at.parity());
        if (kPassesRopes<C>) tell_copied(at);
        // Read before the products, beside which shared memory answers late.
        const bool tokens_apart = apart_tokens(third);
        const bool all_live = (s.notes[third][0].live & s.notes[third][1].live) == ~0u;
        multiply(at, x, tokens_apart);
        team_barrier(kScoreTeam);  // all warps have read Q, of the last step, and the rope part
        queries.locate();
        if (first && __shfl_sync(~0u, s.queue.count, 0) > index + 1) {
          __threadfence_block();
          queries.prefetch(item(index + 1));
        }
        first = false;
        if (left == 1 && s.queue.has(index + 1)) queries.request(item(index + 1));
        const bool any_apart = apart || tokens_apart;
        const bool modified = any_apart || p.softcap > 0.0f || p.scale_log2 <= 0.0f;
        if (!kF16Rope && tokens_apart) restore(x, third);
        if (modified) cap(x);
        if (!all_live) mask_skipped(x, third);
        if (p.listed.list.indices == nullptr) {
          const planning::WorkItem& work = item(index).work;
          const int token = work.kv_begin + (steps_of(work) - left) * kBlockTokens;
          const KeyRange seen = seen_by_own(p, item(index), rank, INT_MAX);
          if (!seen.has(token, kBlockTokens)) {
            mask_unseen_by_own(p, item(index), rank, token, warp(), lane(), x);
          }
        }
        if (any_apart) {
          soften_apart(x, at);
        } else {
          const float factor[2] = {modified ? 1.0f : queries.factor[0], modified ? 1.0f : queries.factor[1]};
          soften(x, factor, at);
        }
      }
      publish_state(index);
      if (!s.queue.has(index + 1)) break;
    }
  }
};

}  // namespace halftone::cuda::wide
