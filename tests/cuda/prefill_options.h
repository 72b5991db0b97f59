// Masks, options of the logits, types and data with which prefill is tested.
#pragma once

#include <functional>
#include <vector>

#include "testing/cases.h"

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

}  // namespace halftone::testing
