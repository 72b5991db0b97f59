#include "cli/cuda/clock_kernel.h"

#include <cuda_runtime.h>

namespace halftone::cli::cuda {
namespace {

/// Blocks of an SM write the same place, each all of it at once.
__global__ void mark_clocks(ulonglong2* marks) {
  if (threadIdx.x != 0) return;
  std::uint32_t sm = 0;
  ulonglong2 mark;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(mark.x));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(mark.y));
  if (sm < kMaxMarks) marks[sm] = mark;
}

}  // namespace

int launch_clock_marks(ClockMark* marks, Stream stream) {
  static_assert(sizeof(ClockMark) == sizeof(ulonglong2));
  mark_clocks<<<kMaxMarks, 32, 0, static_cast<cudaStream_t>(stream)>>>(reinterpret_cast<ulonglong2*>(marks));
  return cudaGetLastError();
}

}  // namespace halftone::cli::cuda
