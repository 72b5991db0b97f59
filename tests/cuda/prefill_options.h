// Masks, options of the logits, types and data with which prefill is tested.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "tests/attention/prefill_cases.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {

/// Prompts, the ends of some, requests of a few rows, single queries, and empty requests.
inline std::vector<Request> mixed_requests() {
  return {{100, 130}, {1, 70}, {81, 200}, {0, 20}, {65, 30}, {40, 0}, {3, 5}, {0, 0}, {16, 97}, {192, 193}};
}

struct Option {
  const char* name;
  std::function<void(AttentionCase&)> set;
};

/// One at a time, and all that change logits together. Rows are causal before.
inline const std::vector<Option>& options() {
  static const std::vector<Option> all = {
      {"causal", [](AttentionCase&) {}},
      {"full", [](AttentionCase& row) { row.mask = {}; }},
      {"window", [](AttentionCase& row) { row.mask.window_left = 70; }},
      {"narrow window", [](AttentionCase& row) { row.mask.window_left = 0; }},
      {"window right", [](AttentionCase& row) { row.mask = {.window_left = -1, .window_right = 33}; }},
      {"two windows", [](AttentionCase& row) { row.mask = {.window_left = 90, .window_right = 17}; }},
      {"softcap", [](AttentionCase& row) { row.softcap = 15; }},
      {"ALiBi", [](AttentionCase& row) { row.alibi = true; }},
      {"ALiBi, full", [](AttentionCase& row) { row.alibi = true, row.mask = {}; }},
      {"sinks", [](AttentionCase& row) { row.sinks = true; }},
      {"sinks, full", [](AttentionCase& row) { row.sinks = true, row.mask = {}; }},
      {"f32 out", [](AttentionCase& row) { row.out_dtype = DType::kFloat32; }},
      {"other out",
       [](AttentionCase& row) {
         row.out_dtype = row.q_dtype == DType::kFloat16 ? DType::kBFloat16 : DType::kFloat16;
       }},
      {"no LSE", [](AttentionCase& row) { row.lse = false; }},
      {"scale", [](AttentionCase& row) { row.scale = 0.3F; }},
      {"outliers", [](AttentionCase& row) { row.data = Data::kOutlierChannels; }},
      {"sink token", [](AttentionCase& row) { row.data = Data::kSinkToken; }},
      {"constant", [](AttentionCase& row) { row.data = Data::kConstant; }},
      {"zeros", [](AttentionCase& row) { row.data = Data::kZero; }},
      {"wide bounds", [](AttentionCase& row) { row.slack = 1000; }},
      {"batch-invariant", [](AttentionCase& row) { row.policy = SplitPolicy::kBatchInvariant; }},
      {"few workers", [](AttentionCase& row) { row.workers = 3; }},
      {"all",
       [](AttentionCase& row) {
         row.softcap = 20, row.alibi = row.sinks = true;
         row.mask.window_left = 100;
         row.out_dtype = DType::kFloat32;
       }},
  };
  return all;
}

/// Dim 0 alone makes the logits: key t of a request has t steps.
inline void set_linear_logits(Problem& p, float step) {
  const AttentionCase& row = p.row;
  const std::int64_t width = row.kv_heads * row.head_dim;
  const std::vector<std::int64_t> first = first_tokens(row);
  const float root = std::sqrt(static_cast<float>(row.head_dim));
  for (std::int64_t e = 0; e < p.q.numel(); ++e) p.q.set(e, e % row.head_dim == 0 ? 1.0F : 0.0F);
  for (std::size_t r = 0; r < row.requests.size(); ++r) {
    for (std::int64_t e = first[r] * width; e < first[r + 1] * width; e += row.head_dim) {
      p.k.set(e, step * root * static_cast<float>(e / width - first[r]));
    }
  }
  if (!row.plain) p.cache = refilled(p, {0xFF});
}

}  // namespace halftone::testing
