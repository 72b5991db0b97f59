// Problems as prefill on a GPU takes them: Q, K and V of one 16-bit dtype, in plain tensors or in pages. The
// CPU takes them, too.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

inline constexpr DType kPrefillTypes[] = {DType::kBFloat16, DType::kFloat16};
inline constexpr int kPrefillDims[] = {64, 80, 96, 128, 192, 256, 512};

/// Causal, two heads over two. `v_head_dim` 0: head_dim.
inline AttentionCase prefill_case(DType dtype, int head_dim, bool plain, const std::vector<Request>& requests,
                                  int v_head_dim = 0) {
  AttentionCase row;
  row.name = std::string(dtype_name(dtype)) + ", head_dim " + std::to_string(head_dim) +
             (v_head_dim == 0 ? "" : " and " + std::to_string(v_head_dim)) + (plain ? ", plain" : ", pages");
  row.requests = requests;
  row.q_heads = row.kv_heads = 2;
  row.head_dim = head_dim;
  row.v_head_dim = v_head_dim;
  row.k_format = dtype == DType::kFloat16 ? "fp16" : "bf16";
  if (plain) row.plain = dtype;
  row.q_dtype = row.out_dtype = dtype;
  row.mask.causal = true;
  row.cu_q = true;
  row.seed = static_cast<std::uint64_t>(head_dim) + (plain ? 1 : 0);
  return row;
}

/// Lengths around the ends of row blocks (64 rows of a warpgroup, 128 or 192 of a unit) and of tiles of keys
/// (80, 96 or 112), fewer keys than queries, single queries, no queries, no keys.
inline std::vector<Request> edge_requests() {
  return {{63, 79},   {64, 80},  {65, 81}, {127, 95}, {128, 96}, {129, 97}, {191, 112}, {192, 161},
          {193, 192}, {100, 30}, {1, 300}, {1, 1},    {0, 50},   {40, 0},   {0, 0},     {5, 417}};
}

/// The rows of every dtype and head_dim, plain and in pages; of head_dims whose kernels differ from others by
/// numbers alone, to save time, either. Also K of 192 dims with V of 128, and tensors whose K becomes codes.
inline std::vector<AttentionCase> prefill_cases(const std::vector<Request>& requests) {
  std::vector<AttentionCase> rows;
  for (const DType dtype : kPrefillTypes) {
    const auto add = [&](int head_dim, bool plain, int v_head_dim = 0) {
      rows.push_back(prefill_case(dtype, head_dim, plain, requests, v_head_dim));
    };
    const bool f16 = dtype == DType::kFloat16;
    for (const int head_dim : {64, 128, 256, 512}) {
      for (const bool plain : {true, false}) add(head_dim, plain);
    }
    add(80, f16);
    add(96, !f16);
    add(192, f16);
    for (const bool plain : {true, false}) add(192, plain, 128);
    add(f16 ? 256 : 128, true);
    rows.back().arithmetic = "half_int8";
    rows.back().name += ", half_int8";
  }
  return rows;
}

/// First token of each request in plain K and V, and their end.
inline std::vector<std::int64_t> first_tokens(const AttentionCase& row) {
  std::vector<std::int64_t> first = {0};
  for (const Request& r : row.requests) first.push_back(first.back() + r.kv_len);
  return first;
}

/// Sets tokens [begin, end) of a tensor to NaN.
inline void poison_rows(const Tensor& x, std::int64_t begin, std::int64_t end) {
  const std::int64_t row = x.shape()[1] * x.shape()[2];
  for (std::int64_t e = begin * row; e < end * row; ++e) x.set(e, std::numeric_limits<float>::quiet_NaN());
}

/// Rows [begin, end) of a tensor.
inline std::vector<float> floats_of_rows(const Tensor& x, std::int64_t begin, std::int64_t end) {
  const std::int64_t row = x.shape()[1] * x.shape()[2];
  const std::vector<float> all = x.to_floats();
  return {all.begin() + begin * row, all.begin() + end * row};
}

}  // namespace halftone::testing
