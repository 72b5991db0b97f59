// The warpgroups that add up O, 256 dims of all rows each.
#pragma once

#include "cuda/device/cluster.h"
#include "cuda/device/wgmma.h"
#include "cuda/latent/wide/end.h"

namespace halftone::cuda::wide {

struct OutputTraits {
  using Shared = wide::Shared;
  static constexpr int kFirstThread = 256, kBarrier = kOutputBarrier;
  static constexpr bool kNatural = false;
};

template <LatentWideConfig C>
struct Output : OutputEnd<OutputTraits> {
  const StepParams& step;

  /// Of a pair the block has every other half of an item's steps.
  __device__ void append(int index) const {
    static_assert(OutputTraits::kFirstThread + 32 * kAppenders == kThreads);
    const int own_warp = (thread_index() - OutputTraits::kFirstThread) / 32;  // read anew: registers are dear
    append_items<C.codes, true>(
        step.append, s.queue, s.appended, index, own_warp, 1, [&](const DeviceItem& x, int position) {
          return C.blocks == 1 || (position - x.work.kv_begin) / kRoundTokens % 2 == rank;
        });
  }
  /// In a cluster each block fills half of the slices, of both.
  __device__ void release_slice(int stage, int slice) const {
    __syncwarp();
    std::uint32_t own = shared_address(&s.kv_empty[stage][slice]);
    asm volatile("" : "+r"(own));  // no sooner: registers are dear
    if (lane() != 0) return;
    if constexpr (C.blocks == 2) {
      cluster_arrive(cluster_address(own, slice / (kSlices / 2)));
    } else {
      barrier_arrive(own);
    }
  }
  __device__ void release_ropes(int buffer) const {
    __syncwarp();
    std::uint32_t own = shared_address(&s.rope_empty[buffer]);
    asm volatile("" : "+r"(own));
    if (lane() == 0) barrier_arrive(own);
    if (C.blocks == 2 && lane() == 1) cluster_arrive(cluster_address(own, rank ^ 1));
  }

  /// O += P V of a step.
  __device__ void add(const StepPlace& at) {
    locate();
    const int parity = at.step % 2, stage = at.stage();
    const std::uint32_t full = shared_address(s.p_full[parity]);
    barrier_wait(full, at.step / 2 % 2);
    if (s.raised[parity][warp()]) {
      const float rescale[2] = {power_of_biased(s.rescale[parity][row(0)]),
                                power_of_biased(s.rescale[parity][row(1)])};
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        o[0][i] *= rescale[i / 2 % 2];
        o[1][i] *= rescale[i / 2 % 2];
      }
    }
    const std::uint64_t prob = swizzled_matrix(uniform(shared_address(s.rope[at.third()])));
    const std::uint64_t v =
        swizzled_matrix(uniform(shared_address(s.kv[stage]) + kColumns / 2 * half() * kGroupColumnBytes),
                        kGroupColumnBytes, kGroupBytes);
    constexpr DType kType = kProducts;
    wgmma_begin();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice == kSlices / 2) {
        barrier_wait(full + 8, at.step / 2 % 2);
        wgmma_begin();
      }
      const std::uint64_t a = prob + slice * 2, b = v + slice * (kSliceBytes / 16);
      wgmma_add<kType, kType, true>(o[0], a, b);
      wgmma_add<kType, kType, true>(o[1], a, b + 2 * (kGroupColumnBytes / 16));
      wgmma_commit();
    }
    wgmma_wait<3>();
    release_slice(stage, 0);
    wgmma_wait<2>();
    release_slice(stage, 1);
    wgmma_wait<1>();
    release_slice(stage, 2);
    wgmma_wait<0>();
    release_slice(stage, 3);
    release_ropes(at.third());
    pin(o[0]);
    pin(o[1]);
  }

  __device__ void end(const DeviceItem& done) {
    locate();
    barrier_wait(shared_address(&s.state_full), s.item_index[thread / 32] % 2);
    RowState state[2] = {s.state[row(0)], s.state[row(1)]};
    release(s.state_empty);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (state[r].reference == state[r].max || state[r].max == kMinus) continue;
      const float factor = exp2_approx(state[r].reference - state[r].max);
#pragma unroll
      for (int i = 0; i < kHalf / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) o[0][4 * i + 2 * r + e] *= factor, o[1][4 * i + 2 * r + e] *= factor;
      }
    }
    finish(done, state);
  }

  __device__ void run() {
    StepPlace at;
    settle_lengths<32 * kAppenders>(step, p.schedule, thread_index() - OutputTraits::kFirstThread);
    locate();
    int index = 0;
#pragma unroll 1
    for (; s.queue.has(index); ++index) {
      __syncwarp();
      s.item_index[thread / 32] = index;
      __syncwarp();
      if (step.appends) {
        append(index);
        locate();
        index = s.item_index[thread / 32];
      }
#pragma unroll
      for (int i = 0; i < kHalf; ++i) o[0][i] = o[1][i] = 0.0f;
#pragma unroll 1
      for (int left = steps_of(item(index).work); left > 0; --left, ++at.step) add(at);
      index = s.item_index[thread / 32];
      end(item(index));
      index = s.item_index[thread / 32];
      if (thread == 0) s.queue.current = index;  // the other warpgroup may be an item behind
    }
  }
};

}  // namespace halftone::cuda::wide
