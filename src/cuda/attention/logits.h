// From a scaled product to a base-2 logit: softcap, ALiBi, mask, in this order.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"
#include "format/page.h"

namespace halftone::cuda {

/// Whether logits are more than scaled products, wherever their keys are.
__device__ inline bool caps_or_biases(const AttentionParams& p) {
  return p.softcap > 0.0f || p.alibi_slopes != nullptr;
}

/// softcap * tanh(x / softcap) for base-2 logits; only where p.softcap > 0.
struct Softcap {
  float cap, inverse;  // cap in base 2; 2 log2(e) / cap

  __device__ explicit Softcap(const AttentionParams& p)
      : cap(p.softcap * kLog2e), inverse(p.softcap > 0.0f ? 2.0f * kLog2e / cap : 0.0f) {}

  /// By tanh(y) = 1 - 2 / (e^2y + 1): about 2^-20 of the cap off.
  __device__ float operator()(float x) const {
    return cap - cap * __fdividef(2.0f, exp2_approx(x * inverse) + 1.0f);
  }
};
/// The same to fp32's precision.
struct ExactSoftcap {
  float cap;

  __device__ explicit ExactSoftcap(const AttentionParams& p) : cap(p.softcap) {}
  __device__ float operator()(float x) const { return cap * kLog2e * tanhf(x * kLn2 / cap); }
};

/// The keys before `end` that a row sees.
struct VisibleKeys {
  int from, last;
  unsigned count;

  __device__ VisibleKeys(const AttentionParams& p, int position, int end)
      : from(position - p.window_left), last(min(end - 1, position + p.causal_right)) {
    count = last < from ? 0u : last - from + 1u;
  }
  __device__ bool has(int key) const { return static_cast<unsigned>(key - from) < count; }
};

/// A logit of a key `away` from the row's position, with ALiBi's share; `slope` in base 2.
__device__ inline float biased(float logit, float slope, int away) { return logit - slope * abs(away); }

// Where a lane's logits stand: register i has the lane's row row(i), one of rows(count), and lies key(i) keys
// behind its first one.

/// Products Q K^T, rows being M: rows g and g + 8 of 16, from key 2 t on. (g, t) = (lane / 4, lane % 4).
struct RowsAsM {
  static constexpr int rows(int) { return 2; }
  static constexpr int row(int i) { return i / 2 % 2; }
  static constexpr int key(int i) { return i / 4 * 8 + i % 2; }
};
/// Products K Q^T, keys being M: of each 8 rows 2 t and 2 t + 1, of each 16 keys g and g + 8. Registers lie
/// as [16 keys][kRowTiles of 8 rows][4].
template <int kRowTiles>
struct KeysAsM {
  static constexpr int rows(int) { return 2 * kRowTiles; }
  static constexpr int row(int i) { return i / 4 % kRowTiles * 2 + i % 2; }
  static constexpr int key(int i) { return i / 4 / kRowTiles * 16 + i / 2 % 2 * 8; }
  /// How far the lane's row `row` lies behind its first one.
  static constexpr int offset(int row) { return row / 2 * 8 + row % 2; }
};
template <int kA, int kB>
__device__ inline float (&flat(float (&x)[kA][kB]))[kA * kB] {
  return reinterpret_cast<float(&)[kA * kB]>(x);
}
template <int kA, int kB, int kC>
__device__ inline float (&flat(float (&x)[kA][kB][kC]))[kA * kB * kC] {
  return reinterpret_cast<float(&)[kA * kB * kC]>(x);
}
/// One key of many rows.
struct OneKey {
  static constexpr int rows(int count) { return count; }
  static constexpr int row(int i) { return i; }
  static constexpr int key(int) { return 0; }
};

/// Products times `factor(row)`, and capped.
template <class Layout, class Cap, class Factor, int kCount>
__device__ inline void cap_logits(const AttentionParams& p, const Cap& cap, const Factor& factor,
                                  float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= factor(Layout::row(i));
  if (p.softcap > 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = cap(x[i]);
  }
}

/// ALiBi, of rows at `position(row)` with `slope(row)`; `key`: the lane's first.
template <class Layout, class Position, class Slope, int kCount>
__device__ inline void bias_logits(const Position& position, const Slope& slope, int key,
                                   float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = Layout::row(i);
    x[i] = biased(x[i], slope(row), position(row) - (key + Layout::key(i)));
  }
}

/// Keys that a row does not see have no logit, nor have those from `end` on.
template <class Layout, class Position, int kCount>
__device__ inline void mask_unseen(const AttentionParams& p, const Position& position, int key, int end,
                                   float (&x)[kCount]) {
#pragma unroll
  for (int row = 0; row < Layout::rows(kCount); ++row) {
    const VisibleKeys visible(p, position(row), end);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (Layout::row(i) == row && !visible.has(key + Layout::key(i))) x[i] = kMinus;
    }
  }
}

/// All of these row by row, which takes the fewest registers where they are dear. `place(row)`: a RowPlace,
/// whose slope is 0 without ALiBi.
template <class Layout, class Cap, class Factor, class Place, int kCount>
__device__ inline void modify_logits(const AttentionParams& p, const Cap& cap, const Factor& factor,
                                     const Place& place, int first_key, int end, float (&x)[kCount]) {
#pragma unroll
  for (int row = 0; row < Layout::rows(kCount); ++row) {
    const RowPlace at = place(row);
    const VisibleKeys visible(p, at.position, end);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (Layout::row(i) != row) continue;
      const int key = first_key + Layout::key(i);
      x[i] *= factor(row);
      if (p.softcap > 0.0f) x[i] = cap(x[i]);
      x[i] = visible.has(key) ? biased(x[i], at.slope, at.position - key) : kMinus;
    }
  }
}

/// Keys of tiles of 16 that are not in `live` have no logit either; the lane's first key is in the first one.
template <class Layout, int kCount>
__device__ inline void mask_missing(std::uint32_t live, float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!(live >> Layout::key(i) / kTileTokens & 1)) x[i] = kMinus;
  }
}

}  // namespace halftone::cuda
