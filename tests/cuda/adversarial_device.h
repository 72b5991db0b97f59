// What the adversarial tests of attention on the GPU share.
#pragma once

#include "tests/cuda/device_problem.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {

inline AttentionCase decode_case(const std::string& format) { return table_case(format, DType::kFloat16); }

/// typical_formats(), one of which the table of kernels lacks, and another general form that it has.
inline const std::vector<std::string>& device_formats() {
  static const std::vector<std::string> formats = [] {
    std::vector<std::string> all = typical_formats();
    all.push_back("int8-token-asym");
    return all;
  }();
  return formats;
}

inline void copy_to_device(const TensorView& device, const Tensor& host) {
  check_cuda(cudaMemcpy(device.data, host.bytes().data(), host.bytes().size(), cudaMemcpyHostToDevice));
}

}  // namespace halftone::testing
