// The algebra of partial attention results, for one row: how two results over disjoint keys become one.
//
// A state is (max, sum, out): the largest logit, sum_j exp(logit_j - max), and sum_j exp(logit_j - max) v_j
// (not yet divided by sum). Merging is associative in exact arithmetic (online softmax, arXiv:1805.02867); in
// floating point the order matters, so callers fix it. The empty state, of a row that saw no key, has max =
// -inf, sum = 0 and out = 0. It is neutral: its weight is 0 and exp(-inf - -inf) is never formed. Maxima are
// natural: logits as the softmax sees them, not scaled by log2(e).
#pragma once

#include <cmath>

#include "format/codec.h"
#include "format/host_device.h"

namespace halftone::planning {

struct RowState {
  float max;  ///< -inf: empty
  float sum;
};

inline constexpr float kMinusInfinity = -__builtin_huge_valf();

HT_HOST_DEVICE inline RowState empty_state() { return {kMinusInfinity, 0.0f}; }
HT_HOST_DEVICE inline bool is_empty(const RowState& s) { return s.max == kMinusInfinity; }

/// merge(a, b) has out = weight_a * a.out + weight_b * b.out.
struct MergedState {
  RowState state;
  float weight_a;
  float weight_b;
};

/// A NaN maximum (a row that read a NaN) stays NaN.
HT_HOST_DEVICE inline MergedState merge_states(const RowState& a, const RowState& b) {
  if (is_empty(b)) return {a, 1.0f, 0.0f};
  if (is_empty(a)) return {b, 0.0f, 1.0f};
  const float max = a.max <= b.max ? b.max : a.max;
  const float weight_a = std::exp(a.max - max);
  const float weight_b = std::exp(b.max - max);
  const float sum = codec::ht_add(codec::ht_mul(a.sum, weight_a), codec::ht_mul(b.sum, weight_b));
  return {{max, sum}, weight_a, weight_b};
}

/// What turns a state into the result: output = scale * out; lse is the natural log of the sum of
/// exponentials.
struct FinishedState {
  float scale;
  float lse;
};

/// max + log(sum), rounded once.
HT_HOST_DEVICE inline float log_sum(const RowState& s) {
  return static_cast<float>(static_cast<double>(s.max) + std::log(static_cast<double>(s.sum)));
}

/// An empty state gives scale 0 and LSE -inf, with or without a sink.
HT_HOST_DEVICE inline FinishedState finish_state(const RowState& s) {
  if (is_empty(s)) return {0.0f, s.max};
  return {1.0f / s.sum, log_sum(s)};
}

/// The same with an attention sink: a logit that joins the denominator and carries no value
/// (arXiv:2309.17453).
HT_HOST_DEVICE inline FinishedState finish_state(const RowState& s, float sink) {
  if (is_empty(s)) return {0.0f, s.max};
  const MergedState with_sink = merge_states(s, {sink, 1.0f});
  return {with_sink.weight_a / with_sink.state.sum, log_sum(with_sink.state)};
}

}  // namespace halftone::planning
