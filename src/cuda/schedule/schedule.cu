#include "cuda/schedule/kernel.h"
#include "cuda/schedule/params.h"

namespace halftone::cuda {
namespace {

__global__ void __launch_bounds__(kScheduleThreads, 1)
    build(const __grid_constant__ ScheduleBuildParams params) {
  const PassBuildParams& pass = params.passes[blockIdx.x];
  if (pass.schedule.params.queue_tokens > 0) {
    build_queue_block(params, pass);
  } else {
    build_schedule_block(params, pass);
  }
}

}  // namespace

int launch_schedule(const ScheduleBuildParams& params, void* stream) {
  const void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&build), dim3(params.count), dim3(kScheduleThreads),
                          const_cast<void**>(arguments), 0, static_cast<cudaStream_t>(stream));
}

}  // namespace halftone::cuda
