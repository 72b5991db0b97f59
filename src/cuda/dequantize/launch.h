// Launches of kernels in which warps take the tiles of a cache as they come by.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/dequantize/kernel.h"
#include "cuda/device/launch.h"

namespace halftone::cuda {

/// `argument`: the kernel's one argument; `ctas`: of an SM; `early`: launch_early(). cudaError_t as int.
inline int launch_over_tiles(const void* kernel, const DequantizeParams& params, const void* argument,
                             int ctas, void* stream, bool early = false) {
  if (params.rows == 0) return cudaSuccess;
  const std::int64_t tiles = params.rows / kTileTokens + params.batch + 1;  // at most, and any rows of zeros
  const std::int64_t wanted = (tiles * params.kv_heads + kDequantizeWarps - 1) / kDequantizeWarps;
  unsigned blocks = 0;
  if (const cudaError_t status = limit_blocks(wanted, ctas, blocks); status != cudaSuccess) return status;
  if (early) return launch_early(kernel, dim3(blocks), dim3(kDequantizeWarps * 32), &argument, stream);
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kDequantizeWarps * 32), const_cast<void**>(&argument), 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace halftone::cuda
