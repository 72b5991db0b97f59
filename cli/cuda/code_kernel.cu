#include "cli/cuda/code_kernel.h"

#include <cuda_runtime.h>

namespace halftone::cli::cuda {
namespace {

constexpr int kInstructionBytes = 16;

// Written out, since a loop would be few instructions; many in each statement, which compiles faster.
#define HALFTONE_4(x) x x x x
#define HALFTONE_256(x) HALFTONE_4(HALFTONE_4(HALFTONE_4(HALFTONE_4(x))))
#define HALFTONE_64(x) HALFTONE_4(HALFTONE_4(HALFTONE_4(x)))
static_assert(64 * 256 * kInstructionBytes == kOtherCode);

__global__ void other_code(float* sink, float a, float b) {
  float x = static_cast<float>(threadIdx.x);
  HALFTONE_64(asm volatile(HALFTONE_256("fma.rn.f32 %0, %0, %1, %2;\n") : "+f"(x) : "f"(a), "f"(b));)
  if (x < 0.0f) *sink = x;
}

#undef HALFTONE_64
#undef HALFTONE_256
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
