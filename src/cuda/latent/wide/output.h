// The warpgroups that add up O, 256 dims of all rows each, and end an item: O and the LSE to the caller's
// tensors or, of a part of a cut unit, to its slot. With splits at absolute positions the last part to arrive
// merges all; else the parts share the rows (SharedMerge), and none has to wait for another.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/device/cluster.h"
#include "cuda/device/wgmma.h"
#include "cuda/latent/few/merge.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

/// A barrier among both warpgroups.
__device__ inline void output_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kOutputBarrier), "n"(kOutputThreads) : "memory");
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

template <LatentWideConfig C>
struct Output {
  static constexpr int kHalf = 64;  // registers of 128 dims of a lane
  const AttentionParams& params;
  Shared& s;
  int rank;
  const AttentionParams& p = params;
  const Slots<kLatentDims> slots{p};
  unsigned thread;  // of both warpgroups; read anew now and then, to free its register
  float o[2][kHalf];

  __device__ void locate() { thread = thread_index() - 256; }
  __device__ int half() const { return int(thread / 128); }  // of O's dims
  __device__ int warp() const { return int(thread / 32 % 4); }
  __device__ int lane() const { return int(thread % 32); }

  __device__ const DeviceItem& item(int index) const { return s.queue.items[index % ItemQueue::kCapacity]; }
  __device__ int row(int r) const { return warp() * 16 + lane() / 4 + 8 * r; }

  __device__ void release(std::uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&barrier));
  }
  /// In a cluster both blocks fill what both have.
  __device__ void release_filled(std::uint64_t& barrier) const {
    __syncwarp();
    const std::uint32_t own = shared_address(&barrier);
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
      const float rescale[2] = {s.rescale[parity][row(0)], s.rescale[parity][row(1)]};
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        o[0][i] *= rescale[i / 2 % 2];
        o[1][i] *= rescale[i / 2 % 2];
      }
    }
    const std::uint64_t prob = swizzled_matrix(uniform(shared_address(s.rope[at.third()])));
    const std::uint64_t v = swizzled_matrix(uniform(shared_address(s.kv[stage][4 * half()])), kColumnBytes);
    constexpr DType kF16 = DType::kFloat16;
    wgmma_begin();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice == kSlices / 2) {
        barrier_wait(full + 8, at.step / 2 % 2);
        wgmma_begin();
      }
      const std::uint64_t a = prob + slice * 2, b = v + slice * (16 * 128 / 16);
      wgmma_add<kF16, kF16, true>(o[0], a, b);
      wgmma_add<kF16, kF16, true>(o[1], a, b + 2 * (kColumnBytes / 16));
      wgmma_commit();
    }
    wgmma_wait<3>();
    release_filled(s.kv_empty[stage][0]);
    wgmma_wait<2>();
    release_filled(s.kv_empty[stage][1]);
    wgmma_wait<1>();
    release_filled(s.kv_empty[stage][2]);
    wgmma_wait<0>();
    release_filled(s.kv_empty[stage][3]);
    release_filled(s.rope_empty[at.third()]);
    pin(o[0]);
    pin(o[1]);
  }

  /// What row r's 4 bytes of 16-bit elements, or 8 of fp32, hold: dims from this one on, of O's registers
  /// o[i][4 j + 2 r + 0..1].
  __device__ int dim(int i, int j) const {
    return 256 * half() + 128 * i + dim_of(j / 8, j % 8) + lane() % 4 * 2;
  }
  __device__ std::uint32_t pack(float a, float b) const {
    return p.out_type == DType::kBFloat16 ? pack_bf16x2(a, b) : pack_f16x2(a, b);
  }

  /// A row to the caller's tensor.
  __device__ void write(int r, std::int64_t at, float scale, bool keep) const {
    if (p.out_type == DType::kFloat32) {
      float* to = static_cast<float*>(p.out) + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (!keep) continue;
          *reinterpret_cast<float2*>(to + dim(i, j)) = {o[i][4 * j + 2 * r] * scale,
                                                        o[i][4 * j + 2 * r + 1] * scale};
        }
      }
      return;
    }
    // The lanes of a row have 4 bytes of each 16: they trade them so that each stores 16 of 64 adjacent
    // bytes.
    std::uint16_t* to = static_cast<std::uint16_t*>(p.out) + at + 256 * half() + lane() % 4 * 8;
    const bool aligned = (reinterpret_cast<std::uintptr_t>(to) & 15) == 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < 8; chunk += 2) {
        std::uint32_t w[4];  // of the 8 dims from 8 e on
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* x = o[i] + 4 * (e % 2 * 8 + chunk + e / 2) + 2 * r;
          w[e] = pack(x[0] * scale, x[1] * scale);
        }
        transpose_quad(w, lane());
        if (!keep) continue;
        std::uint16_t* out = to + 128 * i + 16 * chunk;
        store_sixteen(out, w, aligned);
      }
    }
  }

  /// Merges what the item's slot holds before the rows.
  __device__ void fold(int slot, RowState (&state)[2]) {
    float2 before[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t at = slots.at(slot, kRows * rank + row(r));
      before[r] = slots.states()[at];
      const float merged = fmaxf(before[r].x, state[r].max);
      const float w = weight_log2(before[r].x, merged), own = weight_log2(state[r].max, merged);
      state[r].sum = fmaf(state[r].sum, own, before[r].y * w);
      state[r].max = merged;
      const float* values = p.partial_out + at * kLatentDims;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 x = *reinterpret_cast<const float2*>(values + dim(i, j));
          float(&y)[2] = reinterpret_cast<float(&)[2]>(o[i][4 * j + 2 * r]);
          y[0] = fmaf(y[0], own, x.x * w);
          y[1] = fmaf(y[1], own, x.y * w);
          pin(y);  // few at a time: registers are dear
        }
      }
    }
    output_barrier();  // all have read the slot's states
  }
  __device__ void store_part(int slot, const RowState (&state)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t at = slots.at(slot, kRows * rank + row(r));
      float* values = p.partial_out + at * kLatentDims;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          *reinterpret_cast<float2*>(values + dim(i, j)) = {o[i][4 * j + 2 * r], o[i][4 * j + 2 * r + 1]};
        }
      }
      if (half() == 0 && lane() % 4 == 0) slots.states()[at] = {state[r].max, state[r].sum};
    }
  }

  __device__ void end(const DeviceItem& done, int index) {
    locate();
    barrier_wait(shared_address(&s.state_full), index % 2);
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
    const planning::WorkItem& work = done.work;
    if (work.fold) fold(work.partial, state);
    locate();
    if (work.finish) {
      const int rows = own_rows(work, rank);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool keep = row(r) < rows;
        const RowPlace place = place_of(p, done, kRows * rank + (keep ? row(r) : 0));
        const RowEnd final_state = row_end(p, place.head, state[r].max, state[r].sum, keep);
        write(r, place.token * p.out_token_stride + place.head * p.out_head_stride, final_state.scale, keep);
        if (half() == 0 && keep && lane() % 4 == 0 && p.lse != nullptr) {
          p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = final_state.lse;
        }
      }
      return;
    }
    store_part(work.partial, state);
    if (done.first_slot >= 0) merge_parts(done, index);
  }

  /// The end of a part of a cut unit.
  __device__ void merge_parts(const DeviceItem& cut, int index) const {
    std::int32_t* const counters = p.arrivals + std::int64_t{cut.first_slot} * kArrivalCounters + 2 * rank;
    const bool absolute = p.schedule.params.absolute;
    const int owners = absolute ? 1 : min(cut.parts, SharedMerge::kOwners);
    output_barrier();  // the slot is stored
    if (thread == 0) {
      if (absolute) {
        const bool complete = count_arrival(counters) == cut.arrivals - 1;
        if (complete) *counters = 0;
        s.merges = complete;
      } else {
        const bool last = !s.queue.more && s.queue.count == index + 1;
        s.merges = SharedMerge::arrive(counters, cut.work.partial - cut.first_slot, cut.parts, last);
      }
    }
    output_barrier();
    const int rows = own_rows(cut.work, rank);
#pragma unroll 1
    for (std::uint32_t left = s.merges; left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      merge_rows(cut, rows * owner / owners, rows * (owner + 1) / owners);
    }
    output_barrier();  // all have read what they merge
    if (!absolute && thread == 0) SharedMerge::leave(counters, cut.parts);
  }
  __device__ void merge_rows(const DeviceItem& cut, int first, int last) const {
#pragma unroll 1
    for (int i = first + half() * 4 + warp(); i < last; i += 8) {
      const int row = kRows * rank + i;
      Row<kLatentDims, 32> state;
      state.template add<4>(slots.parts(cut.first_slot, 1, cut.parts, row), lane());
      if (p.out_type == DType::kFloat32) {
        write_row<kLatentDims, true>(p, place_of(p, cut, row), state, lane(), true);
      } else {
        write_row<kLatentDims, false>(p, place_of(p, cut, row), state, lane(), true);
      }
    }
  }

  __device__ void run() {
    StepPlace at;
    locate();
    int index = 0;
#pragma unroll 1
    for (; s.queue.has(index); ++index) {
      __syncwarp();
      s.item_index[thread / 32] = index;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kHalf; ++i) o[0][i] = o[1][i] = 0.0f;
#pragma unroll 1
      for (int left = steps_of(item(index).work); left > 0; --left, ++at.step) add(at);
      index = s.item_index[thread / 32];
      end(item(index), index);
      index = s.item_index[thread / 32];
      if (thread == 0) s.queue.current = index;  // the other warpgroup may be an item behind
    }
  }
};

}  // namespace halftone::cuda::wide
