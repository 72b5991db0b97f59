// What the adversarial tests of attention on the GPU share.
#pragma once

#include "tests/adversarial.h"
#include "tests/cuda/device_problem.h"

namespace halftone::testing {

inline AttentionCase decode_case(const std::string& format) { return table_case(format, DType::kFloat16); }

/// typical_formats() with the scales that the backend takes.
inline const std::vector<std::string>& device_formats() {
  static const std::vector<std::string> formats = {
      "bf16",      "fp16",     "fp8",      "fp8-token-head", "int8-tensor",     "int8-token",
      "int8-head", "int8-g64", "int4-g32", "int4-row",       "int8-token-asym", "int4-static-head-sym"};
  return formats;
}

inline void copy_to_device(const TensorView& device, const Tensor& host) {
  check_cuda(cudaMemcpy(device.data, host.bytes().data(), host.bytes().size(), cudaMemcpyHostToDevice));
}

}  // namespace halftone::testing
