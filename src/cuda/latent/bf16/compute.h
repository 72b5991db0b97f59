// A compute warpgroup: S and P of every other step, and O += P V of all steps, half of the dims. While one
// exponentiates, the other one multiplies. What keeps them apart is an order that differs: the first one adds
// the other's step to O before its own S, the second one after it, while it exponentiates.
#pragma once

#include "cuda/device/cluster.h"
#include "cuda/device/reduce.h"
#include "cuda/latent/bf16/scores.h"
#include "cuda/latent/wide/end.h"

namespace halftone::cuda::bf16 {

struct ComputeTraits {
  using Shared = bf16::Shared;
  static constexpr int kFirstThread = 0, kBarrier = kOutputBarrier;
  static constexpr bool kNatural = true;
};

template <LatentBf16Config C>
struct Compute : wide::OutputEnd<ComputeTraits> {
  const LatentBf16Params& params;
  using Sums = float[2 * kHalf];    // O as one product takes it
  float offset[2];                  // of rows g and g + 8: what O is relative to
  float own_offset[2], own_sum[2];  // what the sum of the lane's probabilities is relative to
  // The steps that need no mask: all rows see all their tokens, as far as those are there.
  std::uint32_t plain_first, plain_steps;
  QueryFragments fragments;

  /// From the first token of a box on: what rows do not see of it must be finite. Of a pair the block brings
  /// every other half of an item's steps.
  __device__ void append(int index) const {
    static_assert(32 * kAppenders == kComputeThreads);
    append_items<LatentCodes::kBf16, true>(params.step.append, s.queue, s.appended, index, thread / 32,
                                           params.box_tokens, [&](const DeviceItem&, int position) {
                                             constexpr int kOwn = kBlockTokens / C.blocks;
                                             return C.blocks == 1 || position % kBlockTokens / kOwn == rank;
                                           });
  }

  __device__ Sums& sums() { return reinterpret_cast<Sums&>(o); }

  __device__ void begin(const DeviceItem& item, std::uint32_t step) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) o[0][i] = o[1][i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = own_offset[r] = kEmpty, own_sum[r] = 0.0f;
    if constexpr (C.listed) return;
    const int token = first_token<C>(item.work);
    const KeyRange seen = wide::seen_by_own(p, item, rank, wide::end_of(item.work));
    const int skipped = (max(seen.begin, token) - token + kBlockTokens - 1) / kBlockTokens;
    plain_first = step + skipped;
    plain_steps = max((max(seen.end, token) - token) / kBlockTokens - skipped, 0);
  }

  /// What the warpgroup has read of a step's V goes back, in all blocks that bring it.
  __device__ void release_half(int stage) const {
    __syncwarp();
    const std::uint32_t own = shared_address(&s.kv_empty[stage][half()]);
    if (lane() == 0) barrier_arrive(own);
    if (kSharesTokens<C> && lane() == 1) cluster_arrive(cluster_address(own, rank ^ 1));
  }
  /// O becomes relative to what P of a stage is relative to. None of its products is under way.
  __device__ void follow(int stage) {
    const float to[2] = {s.offset[stage][row(0)], s.offset[stage][row(1)]};
    follow(to);
  }
  __device__ void follow(const float (&to)[2]) {
    if (!__any_sync(~0u, to[0] != offset[0] || to[1] != offset[1])) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = exp2_approx(offset[r] - to[r]);  // 0 of an empty row, whose sums are 0
      offset[r] = to[r];
#pragma unroll
      for (int i = 0; i < kHalf / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) o[0][4 * i + 2 * r + e] *= factor, o[1][4 * i + 2 * r + e] *= factor;
      }
    }
  }
  __device__ std::uint64_t values(int stage) const {
    return swizzled_matrix(uniform(shared_address(s.kv[stage].half[half()])), kGroupColumnBytes, kGroupBytes);
  }
  static constexpr int kTileBytes = kTileTokens / kGroupTokens * kGroupBytes;  // of half of V

  /// Begins O += P V of the other warpgroup's step.
  __device__ void begin_other(const StepPlace& at) {
    const int stage = at.stage();
    barrier_wait(shared_address(&s.p_full[stage]), at.parity());
    follow(stage);
    const std::uint64_t prob = swizzled_matrix(uniform(shared_address(s.kv[stage].rope)));
    const std::uint64_t v = values(stage);
    pin(sums());
    wgmma_begin();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      wgmma_add<C.dtype, C.dtype, true>(sums(), prob + 2 * tile, v + tile * (kTileBytes / 16));
    }
    wgmma_commit();
  }
  __device__ void end_products(int stage) {
    wgmma_wait<0>();
    pin(sums());
    release_half(stage);
  }
  __device__ void add_own(int stage, const float (&to)[2], const Probabilities& prob) {
    follow(to);
    const std::uint64_t v = values(stage);
    pin(sums());
    wgmma_begin();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      wgmma_add<C.dtype, C.dtype, true>(sums(), prob[tile], v + tile * (kTileBytes / 16));
    }
    wgmma_commit();
    end_products(stage);
  }

  /// Zeroes V of tokens that the item does not have: P is 0 there, but 0 times what lies there may be NaN.
  __device__ void clear_behind(int stage, int alive) const {
    constexpr int kPieces = kRopeColumn * 8;  // of a token, 16 bytes each
#pragma unroll 1
    for (int i = alive * kPieces + static_cast<int>(thread % 128); i < kBlockTokens * kPieces; i += 128) {
      const int token = i / kPieces, column = i % kPieces / 8;
      const int place = column_in_stage(column) + token / kGroupTokens * kGroupBytes;
      auto* const bytes = reinterpret_cast<std::uint8_t*>(&s.kv[stage]);
      *reinterpret_cast<uint4*>(bytes + place + token % kGroupTokens * 128 + i % 8 * 16) = uint4{};
    }
  }

  /// Masks what is not there, or some row does not see. Whether V has been cleared for that.
  __device__ bool mask(const DeviceItem& item, const StepPlace& at, const uint2& live, Logits& x) {
    if constexpr (C.listed) {  // V of tokens that are skipped is zero
      if ((live.x & live.y) != ~0u) mask_skipped(x, live, lane());
      return false;
    }
    if (live.x == (1u << kTiles) - 1 && at.step - plain_first < plain_steps) return false;
    mask_missing<RowsAsM>(live.x, x);
    const int token = first_token<C>(item.work) + static_cast<int>(at.step - at.first) * kBlockTokens;
    wide::mask_unseen_by_own(p, item, rank, token, warp(), lane(), x);
    const int alive = wide::end_of(item.work) - token;
    if (alive >= kBlockTokens) return false;
    clear_behind(at.stage(), max(alive, 0));
    return true;
  }

  /// A step of the warpgroup's own and, unless it begins the item, the other one's before it.
  __device__ void take(const DeviceItem& item, const StepPlace& at, bool last_own) {
    const bool begins = at.step == at.first;
    if (!begins && half() == 0) {
      begin_other(at.before());
      end_products(at.before().stage());
    }
    if (begins || half() == 0) {
      take<false>(item, at, last_own);
    } else {
      take<true>(item, at, last_own);
    }
  }
  /// kOther: the other one's step is added while this one is exponentiated.
  template <bool kOther>
  __device__ void take(const DeviceItem& item, const StepPlace& at, bool last_own) {
    const int stage = at.stage();
    Logits x;
    const uint2 live = multiply<C>(s, at, fragments, x);
    if (last_own) release(s.q_empty);
    team_barrier(half());  // all warps have read the rope part
    locate();
    if constexpr (kOther) begin_other(at.before());
    const bool modified = p.softcap > 0.0f || p.scale_log2 <= 0.0f;
    if (modified) cap(p, x);
    const bool cleared = mask(item, at, live, x);
    const float factor = modified ? 1.0f : p.scale_log2;
    float to[2] = {offset[0], offset[1]};
    raise(x, factor, to);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own_sum[r] *= exp2_approx(own_offset[r] - to[r]);
      own_offset[r] = to[r];
      if (lane() % 4 == 0) s.offset[stage][row(r)] = to[r];
    }
    Probabilities prob;
    exponentiate(x, factor, to, own_sum, shared_address(s.kv[stage].rope) + (warp() * 16 + lane() % 16) * 128,
                 lane(), prob);
    fence_async_shared();
    if (cleared) team_barrier(half());  // what other warps have zeroed is V, too
    release(s.p_full[stage]);
    if constexpr (kOther) end_products(stage ^ 1);
    add_own(stage, to, prob);
  }

  /// The state of the rows, whose sums both warpgroups have a share of.
  __device__ void merge_sums(wide::RowState (&state)[2]) {
    locate();
    OwnSum(&sums)[kStages][kRows] = s.sums[s.item_index[thread / 32] % 2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own_sum[r] = sum_of_lanes<1, 4>(own_sum[r]);
      if (lane() % 4 == 0) sums[half()][row(r)] = {own_offset[r], own_sum[r]};
    }
    output_barrier();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const OwnSum a = sums[0][row(r)], b = sums[1][row(r)];
      const bool empty = offset[r] == kEmpty;
      // In an order that does not matter: which warpgroup has which step is an accident.
      const float sum = __fadd_rn(__fmul_rn(a.sum, exp2_approx(a.offset - offset[r])),
                                  __fmul_rn(b.sum, exp2_approx(b.offset - offset[r])));
      const float max = empty ? kMinus : offset[r];
      state[r] = {max, empty ? 0.0f : sum, max};
    }
  }

  __device__ void run() {
    StepPlace at;
    locate();
    if constexpr (!C.listed) settle_lengths<kComputeThreads>(params.step, p.schedule, thread);
    int index = 0;
#pragma unroll 1
    for (; s.queue.has(index); ++index) {
      __syncwarp();
      s.item_index[thread / 32] = index;
      __syncwarp();
      if constexpr (!C.listed) {
        if (params.step.appends) append(index);
      }
      const DeviceItem* const now = &item(index);
      begin(*now, at.step);
      barrier_wait(shared_address(&s.q_full), index % 2);
      at.first = at.step;
      load_query_fragments(s, warp(), lane(), fragments);
      const std::uint32_t end = at.step + steps_of<C>(now->work);
      // Without a step of its own the warpgroup needs no queries.
      if (end - at.step == 1 && at.stage() != half()) release(s.q_empty);
#pragma unroll 1
      for (; at.step < end; ++at.step) {
        if (at.stage() == half()) take(*now, at, at.step + kStages >= end);
      }
      if ((end - 1) % kStages != static_cast<std::uint32_t>(half())) {
        begin_other({end - 1, at.first});
        end_products((end - 1) % kStages);
      }
      s.next_step[thread / 32] = end;
      wide::RowState state[2];
      merge_sums(state);
      finish(item(s.item_index[thread / 32]), state);
      locate();
      index = s.item_index[thread / 32];
      at.step = s.next_step[thread / 32];
      if (thread == 0) s.queue.current = index;  // the other warpgroup may be an item behind
    }
  }
};

}  // namespace halftone::cuda::bf16
