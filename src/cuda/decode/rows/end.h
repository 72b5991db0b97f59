// The end of an item: the two warpgroups' states are merged, partial states folded and stored, the output
// written. States stay in the layout in which wgmma leaves them, in the slots of the workspace, too.
#pragma once

#include "cuda/attention/output.h"
#include "cuda/attention/states.h"
#include "cuda/decode/rows/compute.h"
#include "cuda/device/reduce.h"

namespace halftone::cuda {

/// Half of a lane's rows: row g of the warp's 16 in one warpgroup, row g + 8 in the other, over the four
/// lanes of a quad: dims 8 j + 2t, 2t + 1.
template <int kDim>
struct RowShare {
  static constexpr int kQuads = kDim / 16;
  float4 x[kQuads];
  float max, sum;

  /// this = merge(this, other), or, with `before`, merge(other, this).
  __device__ void add(const RowShare& other, bool before = false) {
    const MergedStates both = before ? MergedStates(other.max, max) : MergedStates(max, other.max);
    max = both.max;
    sum = before ? both.mix(other.sum, sum) : both.mix(sum, other.sum);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) x[i] = before ? both.mix(other.x[i], x[i]) : both.mix(x[i], other.x[i]);
  }
};

template <DecodeConfig C>
struct RowsEnd {
  using Traits = DecodeRowsTraits<C>;
  using Share = RowShare<Traits::kDim>;
  static constexpr int kWarps = 4 * Traits::kTeams;
  const AttentionParams& p;
  typename Traits::Shared& s;
  const DeviceItem& item;
  typename Traits::Queries& queries;  // whose matrices nobody reads any more, once all have come here

  const int thread;

  __device__ int lane() const { return thread % 32; }
  /// Of the block's compute warps; also the class of its rows.
  __device__ int warp() const { return thread / 32; }
  /// Of the item.
  __device__ int row() const { return warp() % 4 * 16 + warp() / 4 * 8 + lane() / 4; }

  /// Gives the other warpgroup its rows and takes one's own: the state of the first one's pieces, then that
  /// of the second one's.
  __device__ void exchange(const RowsTeam<C>& team, Share& share) const {
    const int own = team.team(), of_team = thread % 128;
    float max[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = team.max[r] == RowsTeam<C>::kNone ? kMinus : team.max[r];
      sum[r] = sum_of_lanes<1, 4>(team.sum[r]);
    }
    const auto put = [&](int r) {  // row g + 8 r
#pragma unroll
      for (int i = 0; i < Share::kQuads; ++i) {
        const float* o = team.o + 8 * i + 2 * r;
        queries.exchange[own][i][of_team] = {o[0], o[1], o[4], o[5]};
      }
      s.exchange_state[own][of_team] = {max[r], sum[r]};
    };
    const auto keep = [&](int r) {
#pragma unroll
      for (int i = 0; i < Share::kQuads; ++i) {
        const float* o = team.o + 8 * i + 2 * r;
        share.x[i] = {o[0], o[1], o[4], o[5]};
      }
      share.max = max[r], share.sum = sum[r];
    };
    hardware_barrier_wait<kCompute, Traits::kComputeThreads>();  // no product reads Q any more
    if (own == 0) {
      put(1), keep(0);
    } else {
      put(0), keep(1);
    }
    hardware_barrier_wait<kCompute, Traits::kComputeThreads>();
    Share other;
#pragma unroll
    for (int i = 0; i < Share::kQuads; ++i) other.x[i] = queries.exchange[1 - own][i][of_team];
    const float2 state = s.exchange_state[1 - own][of_team];
    other.max = state.x, other.sum = state.y;
    share.add(other, own == 1);
    if (p.v.static_scale == nullptr) return;
    const float v_scale = queries.value_scale;
#pragma unroll
    for (int i = 0; i < Share::kQuads; ++i) {
      share.x[i].x *= v_scale, share.x[i].y *= v_scale, share.x[i].z *= v_scale, share.x[i].w *= v_scale;
    }
  }

  /// A slot holds [warp][quad][lane] float4 and, as everywhere, a state per row.
  __device__ float4* values(int slot) const {
    return reinterpret_cast<float4*>(p.partial_out) +
           (std::int64_t{slot} * kWarps + warp()) * (Share::kQuads * 32) + lane();
  }
  __device__ float2* state(int slot) const {
    return reinterpret_cast<float2*>(p.partial_state_log2) + std::int64_t{slot} * Traits::kRows + row();
  }
  __device__ void load(int slot, Share& share) const {
    const float4* const from = values(slot);
    const float2 both = *state(slot);
#pragma unroll
    for (int i = 0; i < Share::kQuads; ++i) share.x[i] = from[i * 32];
    share.max = both.x, share.sum = both.y;
  }
  __device__ void store(int slot, const Share& share) const {
    float4* const to = values(slot);
#pragma unroll
    for (int i = 0; i < Share::kQuads; ++i) to[i * 32] = share.x[i];
    if (lane() % 4 == 0) *state(slot) = {share.max, share.sum};
  }
  /// Slots in KV order; a few are read together.
  __device__ void merge(const Merge& merge, Share& share) const {
    constexpr int kAtOnce = 3;
    load(merge.first, share);
#pragma unroll 1
    for (int first = 1; first < merge.count; first += kAtOnce) {
      Share part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        load(merge.first + min(first + i, merge.count - 1) * merge.step, part[i]);
        if (first + i >= merge.count) part[i].max = kMinus, part[i].sum = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) share.add(part[i]);
    }
  }

  /// Divides, rotates back and writes.
  __device__ void write(Share& share) const {
    const int rows = item.work.row_end - item.work.row_begin, t = lane() % 4;
    const bool keep = row() < rows;
    const RowPlace place = place_of(p, item, keep ? row() : 0);
    auto [scale, lse] = row_end_with_offset<4>(p, place, share.max, share.sum, lane(), keep);
    if (p.rotate_v) {
      rotate_quad<Traits::kDim>(share.x, t);
      scale *= hadamard::factor(hadamard::block_size(Traits::kDim));
    }
    const bool odd = t & 1;
    std::uint16_t* const to =
        static_cast<std::uint16_t*>(p.out) + out_element(p, place) + (t & 2) * 2 + (odd ? 8 : 0);
#pragma unroll
    for (int i = 0; i < Share::kQuads; ++i) {  // neighbours exchange halves of 16 dims
      const float a = share.x[i].x * scale, b = share.x[i].y * scale;
      const float c = share.x[i].z * scale, d = share.x[i].w * scale;
      const std::uint32_t low = pack_16bit(p.out_type, a, b), high = pack_16bit(p.out_type, c, d);
      const std::uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      if (keep) *reinterpret_cast<uint2*>(to + 16 * i) = odd ? uint2{got, high} : uint2{low, got};
    }
    if (keep && t == 0) write_lse(p, place, lse);
  }

  /// Rotates a row of a quad: dims 16 i + 2t + e and, in z and w, 8 more.
  template <int kDim>
  static __device__ void rotate_quad(float4 (&x)[kDim / 16], int t);

  __device__ void operator()(const RowsTeam<C>& team) const {
    Share share;
    exchange(team, share);
    const planning::WorkItem& work = item.work;
    if (row() - lane() / 4 >= work.row_end - work.row_begin) return;  // the warp has none of the rows
    if (work.fold) {
      Share before;
      load(work.partial, before);
      share.add(before, true);
    }
    Merge next{-1, 0, 0, 0, 0, work.finish ? -1 : work.partial};
    std::uint32_t classes = 1u << warp();
#pragma unroll 1
    while (true) {
      if (next.target < 0) return write(share);
      __syncwarp();  // all lanes have read what the slot held
      store(next.target, share);
      if (item.first_slot < 0) return;
      next = next_merge(item, next, 1, p.schedule.params.absolute);
      classes = last_arrivals(p, next.counter, classes, next.arrivals, lane());
      if (classes == 0) return;
      merge(next, share);
    }
  }
};

template <DecodeConfig C>
template <int kDim>
__device__ inline void RowsEnd<C>::rotate_quad(float4 (&x)[kDim / 16], int t) {
  const auto turn = [](float& a, float& b) {
    const float sum = a + b;
    b = a - b, a = sum;
  };
  static_assert(hadamard::block_size(kDim) == kDim);
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) turn(x[i].x, x[i].y), turn(x[i].z, x[i].w);
#pragma unroll
  for (int h = 1; h < 4; h *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      float* const of[4] = {&x[i].x, &x[i].y, &x[i].z, &x[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float other = __shfl_xor_sync(~0u, *of[e], h);
        *of[e] = t & h ? other - *of[e] : *of[e] + other;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) turn(x[i].x, x[i].z), turn(x[i].y, x[i].w);
#pragma unroll
  for (int h = 1; h < kDim / 16; h *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      if (i & h) continue;
      turn(x[i].x, x[i + h].x), turn(x[i].y, x[i + h].y), turn(x[i].z, x[i + h].z), turn(x[i].w, x[i + h].w);
    }
  }
}

}  // namespace halftone::cuda
