#include "cuda/append_kernel.h"
#include "cuda/launch.h"

namespace halftone::cuda {
namespace {

/// blockIdx.y: 0 for K, 1 for V.
__global__ void __launch_bounds__(kAppendWarps * 32) append(const __grid_constant__ AppendParams params) {
  __shared__ AppendShared shared;
  append_any(params, blockIdx.y == 0 ? params.k : params.v, shared);
}

}  // namespace

int launch_append(const AppendParams& params, void* stream) {
  if (params.tokens == 0) return cudaSuccess;
  constexpr std::int64_t kMaxBlocksX = 1 << 16;
  const dim3 grid(static_cast<unsigned>(params.tokens < kMaxBlocksX ? params.tokens : kMaxBlocksX), 2);
  const void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&append), grid, dim3(kAppendWarps * 32),
                          const_cast<void**>(arguments), 0, static_cast<cudaStream_t>(stream));
}

}  // namespace halftone::cuda
