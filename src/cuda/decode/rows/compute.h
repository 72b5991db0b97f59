// A compute warpgroup: the logits, P and O of all rows over a piece of 64 tokens.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/attention/logits.h"
#include "cuda/decode/rows/traits.h"
#include "cuda/decode/side.h"
#include "cuda/device/wgmma.h"

namespace halftone::cuda {

template <DecodeConfig C>
struct RowsTeam {
  using Traits = DecodeRowsTraits<C>;
  using Shared = typename Traits::Shared;
  using Queries = typename Traits::Queries;
  static constexpr int kS = Traits::kPieceTokens / 2, kO = Traits::kDim / 2;  // registers of a lane
  static constexpr int kSteps = Traits::kDim / 32;                            // of Q K^T
  static constexpr int kTiles = C.piece_tiles;
  using Probabilities = std::uint32_t[kTiles][4];
  static constexpr float kNone = -FLT_MAX;  // finite, so that masked logits give P = 0

  const AttentionParams& p;
  Shared& s;
  const unsigned thread;  // of the compute warps
  float o[kO];
  float max[2], sum[2];  // of rows g and g + 8; of the lane's columns

  __device__ int lane() const { return thread % 32; }
  __device__ int warp() const { return thread / 32 % 4; }
  __device__ int team() const { return thread / 128; }
  /// Of the lane, the first of two rows, 8 apart.
  __device__ int first_row() const { return warp() * 16 + lane() / 4; }

  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = kNone, sum[r] = 0.0f;
  }

  /// K of a piece, whose rows of 64 bytes are swizzled over 8 rows: the 32 bytes of step i.
  static __device__ std::uint64_t keys(std::uint64_t k, int i) {
    return k + (i / 2 * (Traits::kKeyBytes / 2 / 16) + i % 2 * 2);
  }
  static __device__ std::uint64_t key_matrix(std::uint32_t place) {
    constexpr std::uint64_t kSwizzle64 = 2, kEightRows = 512 / 16;
    return kSwizzle64 << 62 | kEightRows << 32 | (place & 0x3ffffu) >> 4;
  }

  /// x = a digit of Q times K.
  template <DType kType, int kDigit>
  __device__ void multiply(const Queries& queries, std::uint64_t k, std::int32_t (&x)[kS]) const {
    const std::uint64_t q = swizzled_matrix(shared_address(queries.digits[kDigit]));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i == 0) {
        wgmma_first<kType, DType::kInt8>(x, q, keys(k, i));
      } else {
        wgmma_add<kType, DType::kInt8>(x, q + 2 * i, keys(k, i));
      }
    }
  }

  /// Products of a piece. O is complete afterwards, too.
  __device__ void scores(int stage, const Queries& queries, float (&x)[kS]) {
    const std::uint64_t k = key_matrix(shared_address(s.k[stage]));
    std::int32_t high[kS], low[kS];
    wgmma_begin();
    multiply<DType::kInt8, 0>(queries, k, high);
    multiply<DType::kUInt8, 1>(queries, k, low);
    wgmma_commit();
    wgmma_wait();
    pin(high), pin(low), pin(o);
#pragma unroll
    for (int i = 0; i < kS; ++i) x[i] = static_cast<float>(high[i] * 256 + low[i]);
  }

  /// Products times K's scales.
  __device__ void scale(int stage, float (&x)[kS]) const {
    if constexpr (Traits::kScaledK) {
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) {
        const std::uint8_t* plane = s.v[stage][i / 2] + kTileTokens * Traits::kDim;
        const std::uint32_t pair = Part<C.k>::load_pair(plane, lane() % 4 * 2 + i % 2 * 8);
        const float2 scale = __half22float2(reinterpret_cast<const __half2&>(pair));
        x[4 * i] *= scale.x, x[4 * i + 1] *= scale.y, x[4 * i + 2] *= scale.x, x[4 * i + 3] *= scale.y;
      }
    }
  }

  /// Scaled products become base-2 logits, with softcap, ALiBi and mask. Tiles that are not in `live` have no
  /// keys.
  __device__ void modify(const Queries& queries, int token, int end, std::uint32_t live,
                         float (&x)[kS]) const {
    const int row = first_row(), column = lane() % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = queries.factor[row + 8 * r];
      const int position = queries.position[row + 8 * r];
      const VisibleKeys visible(p, position, end);
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) x[4 * i + 2 * r + e] *= factor;
      }
      if (p.softcap > 0.0f) {
        const Softcap softcap(p);
#pragma unroll
        for (int i = 0; i < kS / 4; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) x[4 * i + 2 * r + e] = softcap(x[4 * i + 2 * r + e]);
        }
      }
      if (p.alibi_slopes != nullptr) {
        const float slope = queries.slope[row + 8 * r];
#pragma unroll
        for (int i = 0; i < kS / 4; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            x[4 * i + 2 * r + e] -= slope * abs(position - (token + 8 * i + column + e));
        }
      }
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool has = live >> (i / 2) & 1 && visible.has(token + 8 * i + column + e);
          if (!has) x[4 * i + 2 * r + e] = kMinus;
        }
      }
    }
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
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
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
    const std::uint64_t v = swizzled_matrix(shared_address(s.values[stage]), Traits::kPieceTokens * 128);
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
    const bool modified = p.softcap > 0.0f || p.alibi_slopes != nullptr;
    const KeyRange unmasked{::max(queries.position[::max(rows, 1) - 1] - p.window_left, item.work.kv_begin),
                            min(item.work.kv_end, queries.position[0] + p.causal_right + 1)};
    constexpr std::uint32_t kAll = (1u << kTiles) - 1;
#pragma unroll 1
    for (int i = team(); i < range.count; i += Traits::kTeams) {
      // Descriptors follow from these, and live in uniform registers.
      const unsigned uniforms = uniform((first + i) * 2 + (&queries != s.queries)), piece = uniforms / 2;
      const Queries& operands = s.queries[uniforms % 2];
      const int token = range.first + i * Traits::kPieceTokens;
      const PiecePlace<Traits::kStages> from(piece);
      const PiecePlace<Traits::kValueStages> to(piece);
      barrier_wait(shared_address(&s.full[from.stage]), from.parity);
      const std::uint32_t live = s.live[from.stage];
      float x[kS];
      scores(from.stage, operands, x);
      if (!idle) scale(from.stage, x);
      arrive(s.empty[from.stage]);
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
      barrier_wait(shared_address(&s.values_full[to.stage]), to.parity);
      accumulate(to.stage, prob);
    }
    wgmma_wait();
    pin(o);
    const int last = (range.count - 1 - team()) / Traits::kTeams * Traits::kTeams + team();
    if (range.count > team()) arrive(s.values_empty[(first + last) % Traits::kValueStages]);
  }
};

}  // namespace halftone::cuda
