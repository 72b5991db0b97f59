// Rows of the case table as the kernels of the GPU take them. Plain C++.
#pragma once

#include <algorithm>
#include <cstddef>
#include <variant>

#include "cuda/decode/config.h"
#include "testing/cases.h"

namespace halftone::testing {

/// The row on pages and in 16-bit arithmetic, which the backend takes in any format.
inline AttentionCase for_device(AttentionCase row) {
  row.plain.reset();
  row.arithmetic = "16-bit";
  return row;
}

/// The row as the kernels of the table take it: 16-bit Q and O, V of K's head_dim and, if the table lacks the
/// pair, in K's format; a named format, if it lacks that.
inline AttentionCase for_table(AttentionCase row) {
  row = for_device(row);
  if (row.q_dtype == DType::kFloat32) row.q_dtype = DType::kBFloat16;
  if (row.out_dtype == DType::kFloat32) row.out_dtype = DType::kFloat16;
  row.v_head_dim = 0;
  const auto served = [&] {
    return cuda::find_row(std::get<KvCacheSpec>(attention_problem(row).kv), 0) >= 0;
  };
  if (!row.v_format.empty() && !served()) row.v_format.clear();
  const auto formats = named_formats();
  for (std::size_t i = 0; i < formats.size() && !served(); ++i) {
    const NamedFormat& named = formats[(row.seed + i) % formats.size()];
    if (row.head_dim % std::max(named.format.group_size, 1) != 0) continue;
    row.k_format = named.name;
    if (!named.format.quantised()) row.offset_k = row.scale_k = false;
  }
  return row;
}

}  // namespace halftone::testing
