#include <cstdint>

#include "cuda/append/params.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {
namespace {

constexpr int kThreads = 128;

/// A kernel of its own: append's CTAs read the lengths in no order that one of them could wait for.
__global__ void __launch_bounds__(kThreads)
    advance(std::int32_t* lengths, const std::int32_t* cu_seqlens, std::int32_t batch, bool next_knows) {
  if (next_knows) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i < batch) lengths[i] += cu_seqlens[i + 1] - cu_seqlens[i];
}

__global__ void __launch_bounds__(kThreads) settle(std::int32_t* lengths, const std::int32_t* grown,
                                                   const std::int32_t* cu_seqlens, std::int32_t batch) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= batch) return;
  const std::int32_t added = cu_seqlens[i + 1] - cu_seqlens[i];
  if (added > 0 && grown[i] >= added) lengths[i] = grown[i];
}

int launch(const void* kernel, const void** arguments, std::int32_t batch, void* stream) {
  if (batch == 0) return cudaSuccess;
  return launch_early(kernel, dim3(static_cast<unsigned>((batch - 1) / kThreads + 1)), dim3(kThreads),
                      arguments, stream);
}

}  // namespace

int launch_settle(std::int32_t* lengths, const std::int32_t* grown, const std::int32_t* cu_seqlens,
                  std::int32_t batch, void* stream) {
  const void* arguments[] = {&lengths, &grown, &cu_seqlens, &batch};
  return launch(reinterpret_cast<const void*>(&settle), arguments, batch, stream);
}

int launch_advance(std::int32_t* lengths, const std::int32_t* cu_seqlens, std::int32_t batch, bool next_knows,
                   void* stream) {
  const void* arguments[] = {&lengths, &cu_seqlens, &batch, &next_knows};
  return launch(reinterpret_cast<const void*>(&advance), arguments, batch, stream);
}

}  // namespace halftone::cuda
