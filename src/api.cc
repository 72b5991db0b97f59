// The front door: every call validates, then goes to the backend of its device.
#include <fmt/format.h>

#include <memory>
#include <new>
#include <variant>

#include "halftone/attention.h"
#include "halftone/error.h"
#include "plan/backend.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "plan/validate_cache.h"
#include "plan/workspace_use.h"

namespace halftone {
namespace {

void check_cpu_stream(Device device, Stream stream) {
  if (device.type != DeviceType::kCpu || stream == nullptr) return;
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
  impl.backend->schedule(impl, lengths, bytes_of(workspace), stream);
}

void run(const Plan& plan, const AttentionArgs& args, const TensorView& workspace, Stream stream) {
  const Plan::Impl& impl = planning::require_plan(plan);
  const planning::WorkspaceUse use(impl, workspace);
  planning::validate_run(impl, args, workspace, stream);
  impl.backend->run(impl, args, bytes_of(workspace), stream);
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
  const auto* const cache = std::get_if<PagedKv>(&args.kv);
  if (problem.is_paged() && !problem.is_listed() && cache != nullptr &&
      !complete.lengths.kv_lengths.present()) {
    complete.lengths.kv_lengths = cache->lengths;
  }

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
  planning::backend_for("merge", out.device).merge(parts, part_lse, out, lse, stream);
}

void append(const PagedKv& cache, const AppendArgs& args, Stream stream) {
  planning::validate_append(cache, args);
  const Device device = cache.pages.device;
  check_cpu_stream(device, stream);
  planning::backend_for("append", device).append(cache, args, stream);
}

void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream) {
  planning::validate_dequantize(cache, k_out, v_out);
  const Device device = cache.pages.device;
  check_cpu_stream(device, stream);
  planning::backend_for("dequantize", device).dequantize(cache, k_out, v_out, stream);
}

}  // namespace halftone
