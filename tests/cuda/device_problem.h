// Runs a problem of the case table on the GPU, with streams and graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "testing/cuda/limits.h"
#include "testing/cuda/memory.h"
#include "testing/runners.h"
#include "tests/device_rows.h"
#include "tests/kv_of.h"

namespace halftone::testing {

/// What `call(stream)` launches, captured in a graph on a stream of its own.
class CapturedGraph {
 public:
  template <class Call>
  explicit CapturedGraph(Call call, unsigned stream_flags = cudaStreamNonBlocking) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, stream_flags));
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    call(stream_);
    check_cuda(cudaStreamEndCapture(stream_, &graph_));
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~CapturedGraph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  cudaStream_t stream() const { return stream_; }
  /// Runs it to its end.
  void replay() const {
    check_cuda(cudaGraphLaunch(executable_, stream_));
    check_cuda(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

inline Plan plan_on_device(const Problem& p) { return cuda_runner().plan(p); }

/// Whether a problem is for the universal kernel.
inline bool is_universal(const Problem& p) { return plan_on_device(p).info().config == kUniversalConfig; }

/// A problem's tensors and a workspace on device 0, for any number of calls on streams.
class DeviceRun : public PlacedRun {
 public:
  DeviceRun(const Problem& p, const Plan& plan, int fill = 0xff) : PlacedRun(cuda_runner(), p, plan, fill) {
    check_cuda(cudaDeviceSynchronize());  // streams that do not wait for the default one may use it now
  }

  /// Outputs become bytes 0xFF again, in stream order.
  void clear(cudaStream_t stream = nullptr) const {
    for (const TensorView* t : {&args.out, &args.lse}) {
      if (!t->present()) continue;
      const std::int64_t bytes = t->numel() * dtype_bits(t->dtype) / 8;
      check_cuda(cudaMemsetAsync(t->data, 0xff, static_cast<std::size_t>(bytes), stream));
    }
  }
};

/// schedule() and run(), captured.
inline CapturedGraph captured_step(const DeviceRun& device) {
  return CapturedGraph([&](cudaStream_t stream) {
    device.schedule(stream);
    device.run(stream);
  });
}

inline Outputs run_on_device(const Problem& p, const Plan& plan) { return cuda_runner().run(p, plan); }
inline Outputs run_on_device(const Problem& p) { return cuda_runner().run(p); }

/// The problem's outputs over pages that lie elsewhere on device 0.
inline Outputs run_over(const Problem& p, const Plan& plan, void* pages, std::int64_t count) {
  DeviceRun device(p, plan);
  TensorView& view = cache_of(device.args).pages;
  view.data = pages;
  view.shape[0] = count;
  device.schedule();
  device.run();
  return device.outputs();
}

inline std::int32_t status_of(const Outputs& outputs) { return outputs.status.as<std::int32_t>()[0]; }

/// judge() with the limits of the kernel that serves the problem.
inline std::string judge_device(const Problem& p, const Outputs& outputs) {
  return cuda_runner().judge(p, outputs);
}

}  // namespace halftone::testing
