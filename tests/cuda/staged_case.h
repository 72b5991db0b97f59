// Prompts over quantised caches, as prefill stages them.
#pragma once

#include <string>
#include <vector>

#include "tests/attention/prefill_cases.h"

namespace halftone::testing {

/// Causal, four query heads over two KV heads, Q and O of a type.
inline AttentionCase staged_case(const std::string& k_format, const std::string& v_format, int head_dim,
                                 const std::vector<Request>& requests, DType q_dtype = DType::kBFloat16) {
  AttentionCase row = prefill_case(q_dtype, head_dim, false, requests);
  row.q_heads = 4;
  row.k_format = k_format;
  row.v_format = v_format;
  row.name = "K " + k_format + ", V " + v_format + ", head_dim " + std::to_string(head_dim) + ", Q " +
             std::string(dtype_name(q_dtype));
  return row;
}

/// Whether rows of `head_dim` values have whole groups of the format.
inline bool has_whole_groups(const std::string& format, int head_dim) {
  const KvFormat f = parse_format(format);
  return f.granularity != Granularity::kGroup || head_dim % f.group_size == 0;
}

}  // namespace halftone::testing
