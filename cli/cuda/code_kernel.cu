#include "cli/cuda/code_kernel.h"

#include <cuda_runtime.h>

namespace halftone::cli::cuda {
namespace {

constexpr int kInstructionBytes = 16;

// Written out, since a loop would be few instructions.
#define HALFTONE_4(x) x x x x
#define HALFTONE_64(x) HALFTONE_4(HALFTONE_4(HALFTONE_4(x)))
#define HALFTONE_16384(x) HALFTONE_4(HALFTONE_64(HALFTONE_64(x)))
static_assert(16384 * kInstructionBytes == kOtherCode);

__global__ void other_code(float* sink, float a, float b) {
  float x = static_cast<float>(threadIdx.x);
  HALFTONE_16384(asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(a), "f"(b));)
  if (x < 0.0f) *sink = x;
}

#undef HALFTONE_16384
#undef HALFTONE_64
#undef HALFTONE_4

}  // namespace

int launch_other_code(void* sink, Stream stream) {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  other_code<<<multiprocessors, 128, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<float*>(sink), 1.0f,
                                                                             0.5f);
  return cudaGetLastError();
}

}  // namespace halftone::cli::cuda
