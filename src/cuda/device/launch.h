// Programmatic dependent launch, from the host.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace halftone::cuda {

/// `wanted` blocks, but no more than the current device's multiprocessors hold, `ctas` each.
inline cudaError_t limit_blocks(std::int64_t wanted, int ctas, unsigned& blocks) {
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, std::int64_t{processors} * ctas));
  return status;
}

/// Launches a kernel that may begin while the previous one of the stream ends: it has to wait for that one
/// (wait_for_previous_kernel()) before it touches memory that that one writes, or reads what it overwrites.
inline cudaError_t launch_early(const void* kernel, dim3 grid, dim3 block, const void** arguments,
                                void* stream, int shared_bytes = 0) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments));
}

}  // namespace halftone::cuda
