// The products and the softmax of a warpgroup's piece: S^T = K Q^T, O^T += V^T P^T with wgmma, the cache as
// operand A in registers, Q and P as operand B in shared memory.
#pragma once

#include "cuda/attention/logits.h"
#include "cuda/decode/wgmma/state.h"
#include "cuda/device/reduce.h"

namespace halftone::cuda {

/// Begins x = raw products of the tile's tokens g, g + 8 (x[4 n], x[4 n + 1] and the two after) with columns
/// 8 n + 2t, 2t + 1.
template <DecodeConfig C>
__device__ inline void Team<C>::begin_scores(const Queries& queries, const std::uint8_t* tile, KFragments& a,
                                             float (&x)[kSums]) const {
  if constexpr (kWholeRows) {
    const std::uint64_t q = b_matrix<kColumns>(shared_address(queries.fragments));
    K k;
    k.load(tile, lane());
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      k.fragment(i / 2, i % 2, 0, a[i]);
      pin(a[i]);
    }
    wgmma_begin();
    wgmma_first<kType>(x, a[0], q);
#pragma unroll
    for (int i = 1; i < kSteps; ++i) wgmma_add<kType>(x, a[i], q + i * kNext);
    wgmma_commit();
  }
}

/// Completes them. `low_part`: Q has one, needs_low_part().
template <DecodeConfig C>
__device__ inline void Team<C>::end_scores(const AttentionParams& p, const Queries& queries,
                                           const std::uint8_t* tile, bool low_part, KFragments& a,
                                           float (&x)[kSums]) const {
  using Side = Part<C.k>;
  const std::uint8_t* scales = tile + p.cache.k_param_offset;
  const std::uint8_t* mins = scales + kTileTokens * kGroups * 2;
  const std::uint64_t q = b_matrix<kColumns>(shared_address(queries.fragments)), q_low = q + kSteps * kNext;
  if constexpr (!kWholeRows) {
    const std::uint64_t sums = b_matrix<kColumns>(shared_address(queries.group_sums));
    K k;
    k.load(tile, lane());
    add_groups<true>(k, scales, q, sums, x);
    if (low_part) {
      k.load(tile, lane());  // again, to save registers
      add_groups<false>(k, scales, q_low, sums, x);
    }
    return;
  } else {
    wgmma_wait();
    pin(x);
    if (low_part) {
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) wgmma_add<kType>(x, a[i], q_low + i * kNext);
      wgmma_commit();
      wgmma_wait();
      pin(x);
    }
  }
  if constexpr (C.k.mode == ScaleMode::kToken) {
    const float low = Side::load(scales, g()), high = Side::load(scales, g() + 8);
#pragma unroll
    for (int i = 0; i < kSums; ++i) x[i] *= i % 4 < 2 ? low : high;
    const float min_low = Side::load(mins, g()) * 0x1p-24f, min_high = Side::load(mins, g() + 8) * 0x1p-24f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      x[i] = fmaf(i % 4 < 2 ? min_low : min_high, queries.totals[i / 4 * 8 + 2 * t() + i % 2], x[i]);
    }
  }
}

/// x += the products of each group of K times its scale; kFirst: x = these and the mins' share.
template <DecodeConfig C>
template <bool kFirst>
__device__ inline void Team<C>::add_groups(K& k, const std::uint8_t* scales, std::uint64_t q,
                                           std::uint64_t sums, float (&x)[kSums]) const {
  using Side = Part<C.k>;
  constexpr int kStepsOfGroup = kSteps / kGroups;
  constexpr int kSets = kStepsOfGroup == 2 ? 2 : 1;  // groups in a batch: registers decide
#pragma unroll
  for (int first = 0; first < kGroups; first += kSets) {
    const bool with_mins = kFirst && first == 0;
    std::uint32_t a[kSets * kStepsOfGroup][4], mins[4] = {};
#pragma unroll
    for (int i = 0; i < kSets * kStepsOfGroup; ++i) {
      const int step = first * kStepsOfGroup + i;
      k.fragment(step / 2, step % 2, 0, a[i]);
      pin(a[i]);
    }
    if (with_mins) {  // lane t has those of group t, which meet both parts of its sum
      const std::uint8_t* plane = scales + kTileTokens * kGroups * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t twice = Side::load_twice(plane, (g() + 8 * i) * kGroups + min(t(), kGroups - 1));
        mins[i] = t() < kGroups ? twice : 0u;
      }
      pin(mins);
    }
    float dot[kSets][kSums];
    wgmma_begin();
    if (with_mins) wgmma_first<kType>(x, mins, sums);
#pragma unroll
    for (int i = 0; i < kSets * kStepsOfGroup; ++i) {
      const std::uint64_t b = q + (first * kStepsOfGroup + i) * kNext;
      if (i % kStepsOfGroup == 0) {
        wgmma_first<kType>(dot[i / kStepsOfGroup], a[i], b);
      } else {
        wgmma_add<kType>(dot[i / kStepsOfGroup], a[i], b);
      }
    }
    wgmma_commit();
    wgmma_wait();
    if (with_mins) pin(x);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      pin(dot[set]);
      const float low = Side::load(scales, g() * kGroups + first + set) * 0x1p24f;
      const float high = Side::load(scales, (g() + 8) * kGroups + first + set) * 0x1p24f;
#pragma unroll
      for (int i = 0; i < kSums; ++i) x[i] = fmaf(i % 4 < 2 ? low : high, dot[set][i], x[i]);
    }
    pin(x);
  }
}

/// Raw products to base-2 logits, with softcap, ALiBi and mask, of a tile whose keys begin at `first`.
template <DecodeConfig C>
__device__ inline void Team<C>::modify(const AttentionParams& p, const Queries& queries, int first, int end,
                                       float (&x)[kSums]) const {
  using Layout = KeysAsM<kTiles>;
  const auto column = [&](int row) { return 2 * t() + Layout::offset(row); };
  const auto place = [&](int row) -> const RowPlace& { return queries.places[column(row)]; };
  const auto factor = [&](int row) { return queries.factor[column(row)]; };
  modify_logits<Layout>(p, Softcap(p), factor, place, first + g(), end, x);
}

/// Probabilities of a tile: their sums per column, and P at `place` of shared memory, this lane's part of a B
/// matrix. True if one is beyond kLargest, or two come close. kLogits: x are logits, else raw products.
template <DecodeConfig C>
template <bool kLogits>
__device__ inline bool Team<C>::probabilities(const float* factors, const float (&x)[kSums],
                                              std::uint32_t place, float (&partial)[kTiles][2]) const {
  bool exceeds = false;
#pragma unroll
  for (int pair = 0; pair < kTiles; pair += 2) {
    std::uint32_t words[4];
#pragma unroll
    for (int n = pair; n < pair + 2; ++n) {
      float2 unit{1.0f, 1.0f};
      if constexpr (!kLogits) unit = *reinterpret_cast<const float2*>(&factors[n * 8 + 2 * t()]);
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[i] = exp2_approx(fmaf(x[4 * n + i], i % 2 == 0 ? unit.x : unit.y, -max[n][i % 2]));
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        partial[n][c] = value[c] + value[2 + c];
        exceeds |= partial[n][c] > kLargest;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) words[2 * (n - pair) + i] = pack_f16x2(value[2 * i], value[2 * i + 1]);
    }
    store_transposed(place + pair * 128, words[0], words[1], words[2], words[3]);
  }
  return exceeds;
}

/// Raises the maxima of the columns in which a probability of the piece is beyond kLargest, and of no
/// others, so that a row never depends on the rows beside it.
template <DecodeConfig C>
template <bool kLogits>
__device__ inline void Team<C>::raise(const float* factors, const float (&x)[kSums], Shared& s) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float top[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top[c] = largest_of_lanes<4, 32>(fmaxf(x[4 * n + c], x[4 * n + 2 + c]));
    }
    if (g() == 0) *reinterpret_cast<float2*>(&s.exchange[team()][warp()][n * 8 + 2 * t()]) = {top[0], top[1]};
  }
  team_barrier(team());
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = n * 8 + 2 * t() + c;
      const float unit = kLogits ? 1.0f : factors[column];
      const auto& tops = s.exchange[team()];
      const float top =
          fmaxf(fmaxf(tops[0][column], tops[1][column]), fmaxf(tops[2][column], tops[3][column]));
      // As probabilities() computes it, to the bit.
      if (!(exp2_approx(fmaf(top, unit, -max[n][c])) > kLargest)) continue;
      const float raised = fmaf(top, unit, -static_cast<float>(Traits::kFirstLog2));
      const float weight = exp2_approx(max[n][c] - raised);
      max[n][c] = raised;
      sum[n][c] *= weight;
#pragma unroll
      for (int j = 0; j < 2; ++j) out[j][4 * n + c] *= weight, out[j][4 * n + 2 + c] *= weight;
    }
  }
}

/// V of a piece as operand A.
template <DecodeConfig C>
__device__ inline void Team<C>::make_fragments(const V (&v)[4], VFragments& a) {
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      v[tile].fragment(j, a[tile][j]);
      pin(a[tile][j]);
    }
  }
}

/// Begins O^T += V^T P^T over a piece.
template <DecodeConfig C>
__device__ inline void Team<C>::accumulate(const VFragments& a, const std::uint8_t* prob) {
  const std::uint64_t b = b_matrix<kColumns>(uniform(shared_address(prob)));
  pin(out[0]);
  pin(out[1]);
  wgmma_begin();
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) wgmma_add<kType>(out[j], a[tile][j], b + tile * kNext);
  }
  wgmma_commit();
}

}  // namespace halftone::cuda
