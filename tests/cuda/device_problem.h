// Runs a problem of the case table on the GPU: copies its tensors there, plans, schedules, runs and copies
// back.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <stdexcept>
#include <string>

#include "cuda/decode/config.h"
#include "testing/cases.h"

namespace halftone::testing {

inline void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Device memory with guard regions of bytes 0xA5 around it.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t size) : size_(size) {
    check_cuda(cudaMalloc(&base_, size + 2 * kGuard));
    check_cuda(cudaMemset(base_, kByte, size + 2 * kGuard));
  }
  ~DeviceMemory() { cudaFree(base_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(base_) + kGuard; }
  std::size_t size() const { return size_; }
  bool guards_intact() const {
    std::vector<std::uint8_t> edge(kGuard);
    for (const std::uint8_t* at : {data() - kGuard, data() + size_}) {
      check_cuda(cudaMemcpy(edge.data(), at, kGuard, cudaMemcpyDeviceToHost));
      for (const std::uint8_t byte : edge) {
        if (byte != kByte) return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 512;
  static constexpr std::uint8_t kByte = 0xa5;
  void* base_ = nullptr;
  std::size_t size_;
};

/// Copies of host tensors on the device.
class Uploads {
 public:
  /// The same view of a copy; absent stays absent.
  TensorView add(const TensorView& host) {
    if (!host.present()) return host;
    std::int64_t elements = 1;
    for (int i = 0; i < host.rank; ++i) elements += (host.shape[i] - 1) * host.strides[i];
    if (host.numel() == 0) elements = 0;
    const std::size_t bytes = static_cast<std::size_t>(elements) * dtype_bits(host.dtype) / 8;
    memory_.emplace_back(bytes);
    check_cuda(cudaMemcpy(memory_.back().data(), host.data, bytes, cudaMemcpyHostToDevice));
    TensorView device = host;
    device.data = memory_.back().data();
    device.device = {DeviceType::kCuda, 0};
    return device;
  }
  bool guards_intact() const {
    for (const DeviceMemory& m : memory_) {
      if (!m.guards_intact()) return false;
    }
    return true;
  }

 private:
  std::list<DeviceMemory> memory_;
};

inline PagedKv upload(Uploads& uploads, const PagedKv& host) {
  PagedKv device = host;
  for (TensorView* t : {&device.pages, &device.block_table, &device.lengths, &device.k_scale.scale,
                        &device.k_scale.min, &device.v_scale.scale, &device.v_scale.min}) {
    *t = uploads.add(*t);
  }
  return device;
}

inline AttentionArgs upload(Uploads& uploads, const AttentionArgs& host) {
  AttentionArgs device = host;
  device.cache = upload(uploads, host.cache);
  for (TensorView* t : {&device.q, &device.lengths.cu_q, &device.lengths.kv_lengths, &device.alibi_slopes,
                        &device.sinks, &device.out, &device.lse, &device.status}) {
    *t = uploads.add(*t);
  }
  return device;
}

inline AppendArgs upload(Uploads& uploads, const AppendArgs& host) {
  AppendArgs device = host;
  for (TensorView* t : {&device.k, &device.v, &device.slot_mapping, &device.cu_seqlens, &device.status,
                        &device.rope.cos, &device.rope.sin, &device.rope.positions}) {
    *t = uploads.add(*t);
  }
  return device;
}

inline void download(const TensorView& device, const Tensor& host) {
  if (device.present()) {
    check_cuda(cudaMemcpy(host.bytes().data(), device.data, host.bytes().size(), cudaMemcpyDeviceToHost));
  }
}

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

/// The problem for device 0.
inline Plan plan_on_device(const Problem& p) {
  AttentionProblem problem = p.problem;
  problem.device = {DeviceType::kCuda, 0};
  return halftone::plan(problem);
}

/// Whether a problem is for the universal kernel.
inline bool is_universal(const Problem& p) { return plan_on_device(p).info().config == "sm90-universal"; }

/// The row as the backend takes it: on pages.
inline AttentionCase for_device(AttentionCase row) {
  row.paged = true;
  return row;
}

/// The row as most kernels of the table take it: 16-bit Q and O, V of K's head_dim and, if the table lacks
/// the pair, in K's format. Few are left for the universal kernel.
inline AttentionCase for_table(AttentionCase row) {
  row = for_device(row);
  if (row.q_dtype == DType::kFloat32) row.q_dtype = DType::kBFloat16;
  if (row.out_dtype == DType::kFloat32) row.out_dtype = DType::kFloat16;
  row.v_head_dim = 0;
  if (!row.v_format.empty() && cuda::find_row(attention_problem(row).kv, 0) < 0) row.v_format.clear();
  return row;
}

/// A problem's tensors and a workspace on device 0, for any number of calls.
class DeviceRun {
 public:
  /// Bytes of the workspace are `fill` at first.
  DeviceRun(const Problem& p, const Plan& plan, int fill = 0xff)
      : plan_(plan),
        host_(make_outputs(p)),
        args(upload(uploads_, arguments(p, host_))),
        workspace_(plan.workspace_bytes()) {
    check_cuda(cudaMemset(workspace_.data(), fill, workspace_.size()));
    check_cuda(cudaDeviceSynchronize());  // streams that do not wait for the default one may use it now
  }

  void schedule(Stream stream = nullptr) const { halftone::schedule(plan_, args.lengths, space(), stream); }
  void run(Stream stream = nullptr) const { halftone::run(plan_, args, space(), stream); }

  /// Outputs become bytes 0xFF again, in stream order.
  void clear(cudaStream_t stream = nullptr) const {
    check_cuda(cudaMemsetAsync(args.out.data, 0xff, host_.out.bytes().size(), stream));
    if (args.lse.present())
      check_cuda(cudaMemsetAsync(args.lse.data, 0xff, host_.lse.bytes().size(), stream));
  }
  /// The outputs once the device is idle. Throws if a guard region was written.
  Outputs outputs() const {
    check_cuda(cudaDeviceSynchronize());
    if (!uploads_.guards_intact() || !workspace_.guards_intact())
      throw std::logic_error("guard region written");
    download(args.out, host_.out);
    download(args.lse, host_.lse);
    download(args.status, host_.status);
    return Outputs{host_.out.clone(), host_.lse.present() ? host_.lse.clone() : Tensor{},
                   host_.status.clone()};
  }
  TensorView space() const {
    return TensorView::contiguous(workspace_.data(), DType::kUInt8,
                                  {static_cast<std::int64_t>(workspace_.size())}, {DeviceType::kCuda, 0});
  }

 private:
  Plan plan_;
  Outputs host_;
  Uploads uploads_;

 public:
  AttentionArgs args;  ///< on the device; a test may change them

 private:
  DeviceMemory workspace_;
};

inline Outputs run_on_device(const Problem& p, const Plan& plan) {
  const DeviceRun device(p, plan);
  device.schedule();
  device.run();
  return device.outputs();
}
inline Outputs run_on_device(const Problem& p) { return run_on_device(p, plan_on_device(p)); }

/// The tensor cores truncate as they accumulate, and signed codes enter with an offset of 128 or 8: logits
/// carry about 1e-5 more error than fp32 arithmetic.
inline constexpr double kLseSlack = 1e-4;

/// P is rounded to 16 bits before it weighs V: half a step of f16 of the largest |v|, which an output that
/// averages many values cannot show in its own magnitude.
inline double out_slack(const Problem& p) {
  double largest = 0;
  for (const float v : p.v.to_floats()) largest = std::max(largest, std::abs(static_cast<double>(v)));
  return std::ldexp(largest, -12);
}

/// The universal kernel computes in fp32 and converts between base 2 and e: a few roundings of the LSE.
inline constexpr double kUniversalLseSlack = 0x1p-22;

/// judge() with the limits of the kernel that serves the problem.
inline std::string judge_device(const Problem& p, const Outputs& outputs) {
  if (is_universal(p)) return judge(p, make_reference(p), outputs, kUniversalLseSlack);
  return judge(p, make_reference(p), outputs, kLseSlack, out_slack(p));
}

}  // namespace halftone::testing
