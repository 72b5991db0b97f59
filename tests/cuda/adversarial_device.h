// What the adversarial tests of attention on the GPU share.
#pragma once

#include "tests/adversarial.h"
#include "tests/cuda/device_problem.h"

namespace halftone::testing {

/// Three requests that fill no page, and an empty one.
inline AttentionCase decode_case(const std::string& format) {
  AttentionCase row;
  row.requests = {{1, 70}, {1, 33}, {1, 129}, {1, 0}};
  row.k_format = format;
  row.page_size = 16;
  row.out_dtype = DType::kFloat16;
  return row;
}

/// typical_formats() with the scales that the backend takes.
inline const std::vector<std::string>& device_formats() {
  static const std::vector<std::string> formats = {
      "bf16",      "fp16",     "fp8",      "fp8-token-head", "int8-tensor",     "int8-token",
      "int8-head", "int8-g64", "int4-g32", "int4-row",       "int8-token-asym", "int4-static-head-sym"};
  return formats;
}

/// Of the host's block table.
inline std::int32_t& entry(const Problem& p, std::int64_t request, std::int64_t column) {
  const std::int64_t columns = p.cache->block_table.shape()[1];
  return p.cache->block_table.as<std::int32_t>()[static_cast<std::size_t>(request * columns + column)];
}

inline void copy_to_device(const TensorView& device, const Tensor& host) {
  check_cuda(cudaMemcpy(device.data, host.bytes().data(), host.bytes().size(), cudaMemcpyHostToDevice));
}

}  // namespace halftone::testing
