// S^T = K Q^T and the softmax of a block, by the warps of a team.
#pragma once

#include "cuda/latent/few/queries.h"

namespace halftone::cuda {

/// The sums over a warp's dims for its 16 tokens of each block, to where the softmax adds them up. A group of
/// dims has its own accumulators until they are multiplied with the scale: any f32 scale is exact.
template <LatentFewConfig C>
__device__ inline void partial_scores(const AttentionParams& p, typename LatentFewTraits<C>::Shared& s,
                                      const QueryFragments<C>& q, const Step<C>& at) {
  using Traits = LatentFewTraits<C>;
  const auto [team, warp, lane] = ComputeThread();
  const unsigned first_row = Traits::first_row(team);
  constexpr int kTiles = Traits::kRowTiles, kStep = Traits::kStep;
  const unsigned group = warp % Traits::kGroups, g = lane / 4, c = lane % 4;
  const unsigned token = warp / Traits::kGroups * 16 + g;  // and 8 further
  float x[kStep][kTiles][4] = {};
#pragma unroll
  for (int j = 0; j < q.kPieces; ++j) {
    const unsigned place =
        code_place(token, Traits::kRowChunks / Traits::kGroups * group + 4 * j + c, Traits::kRowBytes);
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
      const std::uint8_t* const codes = s.codes[at.stage[b]] + place;
      const uint4 upper = *reinterpret_cast<const uint4*>(codes);
      const uint4 lower = *reinterpret_cast<const uint4*>(codes + 8 * Traits::kRowBytes);
      const std::uint32_t above[] = {upper.x, upper.y, upper.z, upper.w};
      const std::uint32_t below[] = {lower.x, lower.y, lower.z, lower.w};
      if constexpr (Traits::kScaled) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const std::uint32_t a[4] = {e4m3x2_to_f16x2(above[step]), e4m3x2_to_f16x2(below[step]),
                                      e4m3x2_to_f16x2(above[step], true), e4m3x2_to_f16x2(below[step], true)};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) mma_f16(x[b][n], a, q.x[n][j][2 * step], q.x[n][j][2 * step + 1]);
        }
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const std::uint32_t a[4] = {above[2 * step], below[2 * step], above[2 * step + 1],
                                      below[2 * step + 1]};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) mma_bf16(x[b][n], a, q.x[n][j][2 * step], q.x[n][j][2 * step + 1]);
        }
      }
    }
  }
  const unsigned place = rope_place(token, 2 * group + c / 2) + c % 2 * 8;
  const std::uint16_t* const query = &s.rotary[0][first_row + g][16 * group + 4 * c];
#pragma unroll
  for (int b = 0; b < kStep; ++b) {
    float above = 1.0f, below = 1.0f;
    if constexpr (Traits::kScaled) {
      const auto* scales = reinterpret_cast<const float*>(s.scales[at.stage[b]]) + group;
      above = scales[token * Traits::kGroups], below = scales[(token + 8) * Traits::kGroups];
    }
    const std::uint8_t* const rope = s.rope[at.stage[b]] + place;
    const uint2 upper = *reinterpret_cast<const uint2*>(rope);
    const uint2 lower = *reinterpret_cast<const uint2*>(rope + 8 * 2 * Traits::kRope);
    const std::uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      x[b][n][0] *= above, x[b][n][1] *= above, x[b][n][2] *= below, x[b][n][3] *= below;
      const uint2 high = *reinterpret_cast<const uint2*>(query + 8 * n * Traits::kRotaryPitch);
      mma_bf16(x[b][n], a, high.x, high.y);
      if (p.q_type != DType::kBFloat16) {
        const uint2 low =
            *reinterpret_cast<const uint2*>(query + (Traits::kRows + 8 * n) * Traits::kRotaryPitch);
        mma_bf16(x[b][n], a, low.x, low.y);
      }
      float2* sums = &s.exchange[team].sums[b][group][4 * n + c][token];
      sums[0] = {x[b][n][0], x[b][n][1]};
      sums[8] = {x[b][n][2], x[b][n][3]};
    }
  }
}

/// The softmax of a warp's rows, a lane one token of each block of a step.
///
/// P is stored once per group of V's dims, times its scale, in f16 and in units of 2^k of the row and the
/// group; or, where V has no scales, once in bf16. Like a running maximum, the unit follows the largest
/// product: it is raised so that this stands at 2^kFirstLog2 when one passes 2^kLargestLog2, and O with it.
/// So every f32 scale is served, and a token with a large scale and a small probability does not push others
/// out of f16's range. The maximum itself only keeps fp32 in range.
template <LatentFewConfig C>
struct RowSoftmax {
  using Traits = LatentFewTraits<C>;
  using Shared = typename Traits::Shared;
  static constexpr int kRows = Traits::kWarpRows, kGroups = Traits::kScales, kStep = Traits::kStep;
  static constexpr int kFirstLog2 = 8, kLargestLog2 = 15, kUnitLog2 = 126;
  static constexpr float kMaxRise = 8.0f;  // of logits above `max` before it is raised

  float max[kRows], sum[kRows];  // sum: of the lane's tokens
  bool raised;                   // O's factors of the step before are not all 1

  __device__ void begin(Shared& s) {
    const auto [team, warp, lane] = ComputeThread();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      max[i] = kMinus, sum[i] = 0.0f;
      if (lane < kGroups) {
        s.unit[team][warp * kRows + i][lane] = __uint_as_float((127u + kUnitLog2) << 23);
        s.raised[team][lane][warp * kRows + i] = 1.0f;
      }
    }
    raised = false;
    __syncwarp();
  }

  /// From the partial sums of a step to P. `masked`: some row does not see all its tokens.
  __device__ void step(const AttentionParams& p, Shared& s, const Step<C>& at, bool masked) {
    const auto [team, warp, lane] = ComputeThread();
    typename Traits::Exchange& exchange = s.exchange[team];
    const unsigned first = Traits::first_row(team) + warp * kRows;
    float x[kStep][kRows];
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
      add_up(exchange, b, warp, lane, x[b]);
      const int token = at.token + b * Traits::kTokens;
      const bool live = token < at.end && s.live[at.stage[b]] >> lane & 1;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        x[b][i] *= s.factor[first + i];
        if (p.softcap > 0.0f) x[b][i] = s.softcap(x[b][i]);
        if (masked) {
          const VisibleKeys visible(p, s.places[first + i].position, at.end);
          if (!visible.has(token + static_cast<int>(lane))) x[b][i] = kMinus;
        }
        if (!live) x[b][i] = kMinus;
      }
    }
    if (raised) reset(s, team, warp, lane);
    std::uint32_t words[kStep][kWords];
    bool raises = false;
#pragma unroll
    for (int b = 0; b < kStep; ++b) raises |= weigh(s, at.stage[b], team, warp, lane, x[b], words[b]);
    if (__any_sync(~0u, raises)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) raise(s, at, team, warp, lane, i, x);
#pragma unroll
      for (int b = 0; b < kStep; ++b) weigh(s, at.stage[b], team, warp, lane, x[b], words[b]);
    }
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum[i] += probability(x[b][i], i);
      store(exchange, b, warp, lane, words[b]);
    }
  }

 private:
  static constexpr int kWords = (kGroups * kRows + 1) / 2;

  /// V's scales of the lane's token.
  static __device__ void load_scales(const Shared& s, int stage, unsigned lane, float (&scales)[kGroups]) {
    if constexpr (Traits::kScaled) {
      const float4 raw = s.scales[stage][lane];
      scales[0] = raw.x, scales[1] = raw.y, scales[2] = raw.z, scales[3] = raw.w;
    } else {
      scales[0] = 1.0f;
    }
  }

  /// P of the lane's token of a block, two values a word; whether its maximum or a unit is too small.
  __device__ bool weigh(const Shared& s, int stage, unsigned team, unsigned warp, unsigned lane,
                        const float (&x)[kRows], std::uint32_t (&words)[kWords]) const {
    float scales[kGroups], products[2 * kWords];
    load_scales(s, stage, lane, scales);
    bool raises = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 units = *reinterpret_cast<const float4*>(s.unit[team][warp * kRows + i]);
      const float unit[] = {units.x, units.y, units.z, units.w};
      raises |= x[i] > max[i] + kMaxRise;
      const float prob = probability(x[i], i);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        float& product = products[j * kRows + i];
        product = prob * scales[j] * unit[j];
        raises |= fabsf(product) >= float(1 << kLargestLog2);
      }
    }
    if (kGroups * kRows == 1) products[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = Traits::kScaled ? pack_f16x2(products[2 * i], products[2 * i + 1])
                                 : pack_bf16x2(products[2 * i], products[2 * i + 1]);
    }
    return raises;
  }

  __device__ float probability(float x, int i) const {
    return exp2_approx(x - (max[i] == kMinus ? 0.0f : max[i]));
  }

  __device__ static void add_up(const typename Traits::Exchange& exchange, int block, unsigned warp,
                                unsigned lane, float (&x)[kRows]) {
    const auto& sums = exchange.sums[block];
    if constexpr (kRows == 2) {
      const float2 a = sums[0][warp][lane], b = sums[1][warp][lane];
      const float2 c = sums[2][warp][lane], d = sums[3][warp][lane];
      x[0] = (a.x + b.x) + (c.x + d.x);
      x[1] = (a.y + b.y) + (c.y + d.y);
    } else {
      const auto sum = [&](int group) {
        return reinterpret_cast<const float*>(&sums[group][warp / 2][lane])[warp % 2];
      };
      x[0] = (sum(0) + sum(1)) + (sum(2) + sum(3));
    }
  }

  /// The largest of the lanes' values.
  __device__ static float largest(float x) {
    const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
  }

  __device__ void reset(Shared& s, unsigned team, unsigned warp, unsigned lane) {
    if (lane < kGroups) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) s.raised[team][lane][warp * kRows + i] = 1.0f;
    }
    raised = false;
    __syncwarp();
  }

  /// Row i with a maximum and units that hold this step. What another row needs changes no bit of it.
  __device__ void raise(Shared& s, const Step<C>& at, unsigned team, unsigned warp, unsigned lane, int i,
                        const float (&x)[kStep][kRows]) {
    const unsigned row = warp * kRows + i;
    float most_x = x[0][i];
#pragma unroll
    for (int b = 1; b < kStep; ++b) most_x = fmaxf(most_x, x[b][i]);
    const float top = largest(most_x);
    int rise = 0;
    if (top > max[i] + kMaxRise) {
      const float next = rintf(top), by = max[i] == kMinus ? 0.0f : fminf(next - max[i], 1000.0f);
      sum[i] *= exp2_approx(-by);
      rise = static_cast<int>(by);
      max[i] = next;
    }
    float products[kGroups] = {};
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
      float scales[kGroups];
      load_scales(s, at.stage[b], lane, scales);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        products[j] = fmaxf(products[j], fabsf(probability(x[b][i], i) * scales[j]));
      }
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int most = static_cast<int>(__reduce_max_sync(~0u, __float_as_uint(products[j])) >> 23) - 127;
      const int before = static_cast<int>(__float_as_uint(s.unit[team][row][j]) >> 23) - 127 + rise;
      int unit = min(before, kUnitLog2);
      if (most + unit >= kLargestLog2) unit = min(kFirstLog2 - 1 - most, kUnitLog2);
      const float power = __uint_as_float(static_cast<unsigned>(unit + 127) << 23);
      __syncwarp();
      if (lane == 0) {
        s.unit[team][row][j] = power;
        s.raised[team][j][row] =
            unit - before < -126 ? 0.0f : __uint_as_float(static_cast<unsigned>(unit - before + 127) << 23);
      }
    }
    raised = true;
    __syncwarp();
  }

  /// P as B fragments: pairs of tokens of a row, which neighbouring lanes exchange.
  __device__ static void store(typename Traits::Exchange& exchange, int block, unsigned warp, unsigned lane,
                               const std::uint32_t (&words)[kWords]) {
    const unsigned odd = lane & 1;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t own = words[i];
      const std::uint32_t other = __shfl_xor_sync(~0u, own, 1);
      const std::uint32_t word = odd ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
      if (kGroups * kRows == 1 && odd) continue;
      const unsigned value = 2 * i + odd, group = value / kRows, row = warp * kRows + value % kRows;
      uint2& place = exchange.prob[block][group][lane / 16][row / 8][row % 8 * 4 + lane % 8 / 2];
      reinterpret_cast<std::uint32_t*>(&place)[lane % 16 / 8] = word;
    }
  }
};

}  // namespace halftone::cuda
