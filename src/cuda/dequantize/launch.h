// Launches of kernels in which warps take the tiles of a cache as they come by.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/dequantize/kernel.h"
#include "cuda/device/launch.h"

namespace halftone::cuda {

/// `argument`: the kernel's one argument; `ctas`: of an SM; `early`: launch_early(). cudaError_t as int.
inline int launch_over_tiles(const void* kernel, const DequantizeParams& params, const void* argument,
                             int ctas, void* stream, bool early = false) {
  if (params.rows == 0) return cudaSuccess;
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status != cudaSuccess) return status;
  const std::int64_t tiles = params.rows / kTileTokens + params.batch + 1;  // at most, and any rows of zeros
  const std::int64_t wanted = (tiles * params.kv_heads + kDequantizeWarps - 1) / kDequantizeWarps;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, processors * ctas));
  if (early) return launch_early(kernel, dim3(blocks), dim3(kDequantizeWarps * 32), &argument, stream);
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kDequantizeWarps * 32), const_cast<void**>(&argument), 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace halftone::cuda
