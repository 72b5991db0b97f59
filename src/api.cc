// The front door: every call validates, then goes to the backend of its device.
#include <fmt/format.h>

#include <memory>
#include <new>

#include "cpu/append.h"
#include "cpu/attention.h"
#include "cpu/dequantize.h"
#include "halftone/attention.h"
#include "halftone/error.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "plan/validate_cache.h"
#include "plan/workspace_use.h"

#ifdef HALFTONE_WITH_CUDA
#include "cuda/backend.h"
#endif

namespace halftone {
namespace {

#ifndef HALFTONE_WITH_CUDA
[[noreturn]] void no_backend(std::string_view call, Device device) {
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{} was asked for {}, but this build of halftone has only the CPU backend: configure "
                  "it with -DHALFTONE_CUDA=ON, or keep the tensors on the CPU.",
                  call, device_name(device)));
}
#endif

void check_cpu_stream(Stream stream) {
  if (stream == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("stream is {}, but must be null on the CPU: pass nullptr.", stream));
}

std::byte* bytes_of(const TensorView& workspace) { return static_cast<std::byte*>(workspace.data); }

}  // namespace

Plan plan(const AttentionProblem& problem) { return planning::make_plan(problem); }

void schedule(const Plan& plan, const SequenceLengths& lengths, const TensorView& workspace, Stream stream) {
  const Plan::Impl& impl = planning::require_plan(plan);
  const planning::WorkspaceUse use(impl, workspace);
  planning::validate_schedule(impl, lengths, workspace, stream);
  switch (impl.problem.device.type) {
    case DeviceType::kCpu:
      planning::fill_schedule(impl, lengths, planning::carve_workspace(impl, bytes_of(workspace)).schedule);
      return;
    case DeviceType::kCuda:
#ifdef HALFTONE_WITH_CUDA
      return cuda::schedule(impl, lengths, bytes_of(workspace), stream);
#else
      no_backend("schedule", impl.problem.device);
#endif
  }
}

void run(const Plan& plan, const AttentionArgs& args, const TensorView& workspace, Stream stream) {
  const Plan::Impl& impl = planning::require_plan(plan);
  const planning::WorkspaceUse use(impl, workspace);
  planning::validate_run(impl, args, workspace, stream);
  switch (impl.problem.device.type) {
    case DeviceType::kCpu:
      cpu::run(impl, args, bytes_of(workspace));
      return;
    case DeviceType::kCuda:
#ifdef HALFTONE_WITH_CUDA
      return cuda::run(impl, args, bytes_of(workspace), stream);
#else
      no_backend("run", impl.problem.device);
#endif
  }
}

void attend(const AttentionProblem& problem, const AttentionArgs& args) {
  if (problem.device.type != DeviceType::kCpu) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("attend was asked for {}, but it allocates its workspace on the CPU only: call plan(), "
                    "schedule() and run().",
                    device_name(problem.device)));
  }
  const Plan made = plan(problem);
  AttentionArgs complete = args;
  if (problem.paged && !complete.lengths.kv_lengths.present())
    complete.lengths.kv_lengths = args.cache.lengths;

  constexpr std::align_val_t kAlignment{planning::kWorkspaceAlignment};
  const auto release = [](std::byte* p) { ::operator delete(p, kAlignment); };
  const std::size_t size = made.workspace_bytes();
  const std::unique_ptr<std::byte, decltype(release)> memory(
      static_cast<std::byte*>(::operator new(size, kAlignment, std::nothrow)), release);
  if (memory == nullptr) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("workspace_bytes is {}, but so much memory is not free: use fewer workers or a smaller "
                    "max_kv_len.",
                    size));
  }
  const TensorView workspace =
      TensorView::contiguous(memory.get(), DType::kUInt8, {static_cast<std::int64_t>(size)});
  schedule(made, complete.lengths, workspace);
  run(made, complete, workspace);
}

void merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
           const TensorView& out, const TensorView& lse, Stream stream) {
  planning::validate_merge(parts, part_lse, out, lse, stream);
  switch (out.device.type) {
    case DeviceType::kCpu:
      cpu::merge(parts, part_lse, out, lse);
      return;
    case DeviceType::kCuda:
#ifdef HALFTONE_WITH_CUDA
      return cuda::merge(parts, part_lse, out, lse, stream);
#else
      no_backend("merge", out.device);
#endif
  }
}

void append(const PagedKv& cache, const AppendArgs& args, Stream stream) {
  planning::validate_append(cache, args);
  switch (cache.pages.device.type) {
    case DeviceType::kCpu:
      check_cpu_stream(stream);
      cpu::append(cache, args);
      return;
    case DeviceType::kCuda:
#ifdef HALFTONE_WITH_CUDA
      return cuda::append(cache, args, stream);
#else
      no_backend("append", cache.pages.device);
#endif
  }
}

void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream) {
  planning::validate_dequantize(cache, k_out, v_out);
  switch (cache.pages.device.type) {
    case DeviceType::kCpu:
      check_cpu_stream(stream);
      cpu::dequantize(cache, k_out, v_out);
      return;
    case DeviceType::kCuda:
#ifdef HALFTONE_WITH_CUDA
      return cuda::dequantize(cache, k_out, v_out, stream);
#else
      no_backend("dequantize", cache.pages.device);
#endif
  }
}

}  // namespace halftone
