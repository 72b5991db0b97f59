// The problem over latent caches that their tests on the GPU vary, and the heads and formats of most of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "testing/cases.h"
#include "tests/cuda/repeated_problem.h"

namespace halftone::testing {

inline constexpr int kAllHeads[] = {8, 16, 32, 64, 128};
inline constexpr const char* kAllFormats[] = {"fp8-g128-f32", "bf16", "int8-g64", "int4-g64", "fp8-g64-e8m0"};
inline constexpr const char* kFormats[] = {"fp8-g128-f32", "bf16"};  // codes and none

/// Two requests over records of 656 bytes (bf16: 1152), a query each with a list of 64 slots. e8m0: records
/// of 576 bytes, all of whose dims are V.
inline AttentionCase listed_case(int heads, std::string_view format = "fp8-g128-f32") {
  AttentionCase row = latent_case({}, format);
  if (format.ends_with("-e8m0")) row.head_dim = row.v_head_dim;
  row.name = std::string(format) + ", " + std::to_string(heads) + " heads";
  row.q_heads = heads;
  row.requests = uniform_requests(2, 1, 150);
  row.lists.top_k = 64;
  row.out_dtype = DType::kFloat32;
  row.seed = 70 + static_cast<std::uint64_t>(heads);
  return row;
}

/// repeated(), of a problem whose bounds are those of more queries, too.
inline Problem repeated_lists(const Problem& p, int batch, int times) {
  Problem many = repeated(p, batch, times);
  if (!p.cu_q.present()) return many;
  many.cu_q = Tensor(DType::kInt32, {batch + 1});
  for (int i = 0; i <= batch; ++i) many.cu_q.as<std::int32_t>()[static_cast<std::size_t>(i)] = i;
  return many;
}

}  // namespace halftone::testing
