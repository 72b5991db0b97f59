#include "cuda/device/launch.h"
#include "cuda/device/ptx.h"
#include "cuda/schedule/kernel.h"
#include "cuda/schedule/params.h"

namespace halftone::cuda {
namespace {

__global__ void __launch_bounds__(kScheduleThreads, 1)
    build(const __grid_constant__ ScheduleBuildParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
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
  return launch_early(reinterpret_cast<const void*>(&build), dim3(params.count), dim3(kScheduleThreads),
                      arguments, stream);
}

}  // namespace halftone::cuda
