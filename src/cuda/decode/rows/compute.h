// A compute warpgroup: the logits, P and O of all rows over a piece of 64 tokens.
#pragma once

#include <cfloat>

#include "cuda/attention/logits.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/device/reduce.h"
#include "cuda/device/wgmma.h"

namespace halftone::cuda {

template <DecodeConfig C>
struct RowsTeam {
  using Traits = DecodeRowsTraits<C>;
  using Shared = typename Traits::Shared;
  using Queries = typename Traits::Queries;
  static constexpr int kS = Traits::kPieceTokens / 2, kO = Traits::kDim / 2;  // registers of a lane
  static constexpr int kSteps = Traits::kDim / 16;                            // of Q K^T
  static constexpr int kTiles = C.piece_tiles;
  using Probabilities = std::uint32_t[kTiles][4];
  static constexpr float kNone = -FLT_MAX;  // finite, so that masked logits give P = 0

  const AttentionParams& p;
  Shared& s;
  const unsigned thread;  // of the compute warps
  float o[kO];
  float max[2], sum[2];           // of rows g and g + 8; of the lane's columns
  std::uint32_t rows[kSteps][4];  // of the item's Q, which spares shared memory their reads

  __device__ int lane() const { return thread % 32; }
  __device__ int warp() const { return thread / 32 % 4; }
  __device__ int team() const { return thread / 128; }
  /// Of the lane, the first of two rows, 8 apart.
  __device__ int first_row() const { return warp() * 16 + lane() / 4; }

  __device__ void begin(const Queries& queries) {
    const int row = warp() * 16 + lane() % 16;
    const std::uint32_t from = shared_address(queries.parts[0]) + row * 128;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_matrices(from + i / 4 * Traits::kHalfBytes + ((i % 4 * 2 + lane() / 16) ^ row % 8) * 16, rows[i]);
    }
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = kNone, sum[r] = 0.0f;
  }

  /// x = Q K^T, kBoth: of what f16 leaves of Q, too. O is complete afterwards, too.
  template <bool kBoth>
  __device__ void multiply(int stage, const Queries& queries, float (&x)[kS]) {
    const std::uint64_t k = swizzled_matrix(shared_address(s.keys[stage]));
    const std::uint64_t rest = swizzled_matrix(shared_address(queries.parts[1]));
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int place = i / 4 * (Traits::kHalfBytes / 16) + i % 4 * 2;
      if (i == 0) {
        wgmma_first<DType::kFloat16>(x, rows[i], k + place);
      } else {
        wgmma_add<DType::kFloat16>(x, rows[i], k + place);
      }
      if constexpr (kBoth) wgmma_add<DType::kFloat16>(x, rest + place, k + place);
    }
    wgmma_commit();
    wgmma_wait();
    pin(x), pin(o);
  }

  /// Products times K's scales, which of 4 bits few pieces have.
  __device__ void scale(int stage, float (&x)[kS]) const {
    if constexpr (Traits::Tile::kScaledLogits) {
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) scale(stage, i, x);
    } else if constexpr (Traits::Tile::kFourBits) {
      const std::uint16_t scaled = *reinterpret_cast<const std::uint16_t*>(s.keys_scaled[stage]);
      if (scaled == 0) return;
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) {
        if (scaled >> (i / (kS / 8) * 8) & 1) scale(stage, i, x);
      }
    }
  }
  /// Of tokens 8 i to 8 i + 7.
  __device__ void scale(int stage, int i, float (&x)[kS]) const {
    const float2 scale = *reinterpret_cast<const float2*>(&s.key_scales[stage][8 * i + lane() % 4 * 2]);
    x[4 * i] *= scale.x, x[4 * i + 1] *= scale.y, x[4 * i + 2] *= scale.x, x[4 * i + 3] *= scale.y;
  }

  /// Scaled products become base-2 logits, with softcap, ALiBi and mask. Tiles that are not in `live` have no
  /// keys.
  __device__ void modify(const Queries& queries, int token, int end, std::uint32_t live,
                         float (&x)[kS]) const {
    const int row = first_row(), key = token + lane() % 4 * 2;
    const auto position = [&](int r) { return queries.position[row + 8 * r]; };
    cap_logits<RowsAsM>(
        p, Softcap(p), [&](int r) { return queries.factor[row + 8 * r]; }, x);
    if (p.alibi_slopes != nullptr) {
      bias_logits<RowsAsM>(
          position, [&](int r) { return queries.slope[row + 8 * r]; }, key, x);
    }
    mask_unseen<RowsAsM>(p, position, key, end, x);
    mask_missing<RowsAsM>(live, x);
  }

  /// P of a piece and its sums. Logits are x times `factor`.
  __device__ void exponentiate(const float (&x)[kS], const float (&factor)[2], Probabilities& prob,
                               float (&partial)[2]) const {
    partial[0] = partial[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) {
      const int r = i % 2;
      const float first = exp2_approx(fmaf(x[2 * i], factor[r], -max[r]));
      const float second = exp2_approx(fmaf(x[2 * i + 1], factor[r], -max[r]));
      partial[r] += first + second;
      prob[i / 4][i % 4] = pack_f16x2(first, second);
    }
  }
  static __device__ bool exceeds(float partial) { return !(partial <= Traits::kLargestSum); }

  /// Raises the maxima of the rows whose P are too large, and of no others, so that a row never depends on
  /// the rows beside it. O must be complete.
  __device__ void raise(const float (&x)[kS], const float (&factor)[2], const float (&partial)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t lanes = __ballot_sync(~0u, exceeds(partial[r]));
      float top = kMinus;
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) top = fmaxf(top, fmaxf(x[4 * i + 2 * r], x[4 * i + 2 * r + 1]));
      top = largest_of_lanes<1, 4>(top);
      const float raised = fmaf(top, factor[r], -static_cast<float>(Traits::kFirstLog2));
      if (!(lanes >> (lane() & ~3) & 0xf) || !(raised > max[r])) continue;
      const float weight = exp2_approx(max[r] - raised);
      max[r] = raised;
      sum[r] *= weight;
#pragma unroll
      for (int i = 0; i < kO / 4; ++i) o[4 * i + 2 * r] *= weight, o[4 * i + 2 * r + 1] *= weight;
    }
  }
  __device__ void softmax(const float (&x)[kS], const float (&factor)[2], Probabilities& prob) {
    float partial[2];
    exponentiate(x, factor, prob, partial);
    if (__any_sync(~0u, exceeds(partial[0]) || exceeds(partial[1]))) {
      raise(x, factor, partial);
      exponentiate(x, factor, prob, partial);
    }
    sum[0] += partial[0], sum[1] += partial[1];
  }

  /// Begins O += P V.
  __device__ void accumulate(int stage, const Probabilities& prob) {
    const std::uint64_t v = swizzled_matrix(shared_address(s.values[stage]), Traits::kHalfBytes);
    pin(o);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      wgmma_add<DType::kFloat16, DType::kFloat16, true>(o, prob[i], v + i * (kTileTokens * 128 / 16));
    }
    wgmma_commit();
  }

  __device__ void arrive(std::uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&barrier));
  }

  /// The team's pieces of an item, whose first piece is `first` of all that the worker takes.
  __device__ void attend(const DeviceItem& item, const Queries& queries, unsigned first) {
    const PieceRange<Traits::kPieceTokens> range(item.work);
    const int rows = item.work.row_end - item.work.row_begin;
    const bool idle = warp() * 16 >= rows;  // of the warp: none of its rows is there
    const bool modified = caps_or_biases(p);
    KeyRange unmasked =
        seen_by_all(p, queries.position[0], queries.position[::max(rows, 1) - 1], item.work.kv_end);
    unmasked.begin = ::max(unmasked.begin, item.work.kv_begin);
    constexpr std::uint32_t kAll = (1u << kTiles) - 1;
#pragma unroll 1
    for (int i = team(); i < range.count; i += Traits::kTeams) {
      // Descriptors follow from these, and live in uniform registers.
      const unsigned uniforms = uniform((first + i) * 2 + (&queries != s.queries)), piece = uniforms / 2;
      const Queries& operands = s.queries[uniforms % 2];
      const int token = range.first + i * Traits::kPieceTokens;
      const auto keys = RingPlace<Traits::kKeyStages>::of(piece);
      const auto values = RingPlace<Traits::kValueStages>::of(piece);
      barrier_wait(shared_address(&s.keys_full[keys.stage]), keys.parity);
      const std::uint32_t live = s.key_live[keys.stage];
      float x[kS];
      if (needs_low_part<C>(p)) {
        multiply<true>(keys.stage, operands, x);
      } else {
        multiply<false>(keys.stage, operands, x);
      }
      if (!idle) scale(keys.stage, x);
      arrive(s.keys_empty[keys.stage]);
      if (i >= Traits::kTeams) arrive(s.values_empty[(piece - Traits::kTeams) % Traits::kValueStages]);
      Probabilities prob;
      if (idle) {  // products of zeros, which the compiler does not know
#pragma unroll
        for (int j = 0; j < kTiles * 4; ++j) prob[j / 4][j % 4] = __float_as_uint(x[j]);
      } else {
        if (modified || live != kAll || !unmasked.has(token, Traits::kPieceTokens)) {
          modify(queries, token, item.work.kv_end, live, x);
          const float one[2] = {1.0f, 1.0f};
          softmax(x, one, prob);
        } else {
          const float factors[2] = {queries.factor[first_row()], queries.factor[first_row() + 8]};
          softmax(x, factors, prob);
        }
      }
      barrier_wait(shared_address(&s.values_full[values.stage]), values.parity);
      accumulate(values.stage, prob);
    }
    wgmma_wait();
    pin(o);
    const int last = (range.count - 1 - team()) / Traits::kTeams * Traits::kTeams + team();
    if (range.count > team()) arrive(s.values_empty[(first + last) % Traits::kValueStages]);
  }
};

}  // namespace halftone::cuda
