// What the prompts of a paged problem attend to, as plain tensors that prefill's kernels take.
#pragma once

#include <vector>

#include "tests/attention/prefill_cases.h"

namespace halftone::testing {

/// K and V of p's cache in the type of its Q, without keys [begin, end) of a request.
inline Problem plain_without(const Problem& p, std::size_t request, std::int64_t begin, std::int64_t end) {
  AttentionCase row = p.row;
  const DType dtype = row.q_dtype;
  row.plain = dtype;
  row.k_format = row.v_format = dtype == DType::kFloat16 ? "fp16" : "bf16";
  const std::vector<std::int64_t> first = first_tokens(row);
  const reference::Dequantised d = dequantised(*p.cache);
  const auto shorter = [&](const Tensor& x) {
    std::vector<float> values = floats_of_rows(x, 0, first[request] + begin);
    const std::vector<float> rest = floats_of_rows(x, first[request] + end, first.back());
    values.insert(values.end(), rest.begin(), rest.end());
    return Tensor::of(dtype, {first.back() - (end - begin), row.kv_heads, x.shape()[2]}, values);
  };
  row.requests[request].kv_len -= static_cast<int>(end - begin);
  Problem twin = make_problem(row);
  twin.q = p.q.clone();
  twin.k = shorter(d.k);
  twin.v = shorter(d.v);
  return twin;
}

}  // namespace halftone::testing
