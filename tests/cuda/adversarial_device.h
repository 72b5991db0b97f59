// What the adversarial tests of attention on the GPU share.
#pragma once

#include "tests/cuda/device_problem.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {

inline AttentionCase decode_case(const std::string& format) { return table_case(format, DType::kFloat16); }

inline void copy_to_device(const TensorView& device, const Tensor& host) {
  check_cuda(cudaMemcpy(device.data, host.bytes().data(), host.bytes().size(), cudaMemcpyHostToDevice));
}

}  // namespace halftone::testing
