#include "cuda/backend.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <variant>

#include "cuda/append/host.h"
#include "cuda/attention/host.h"
#include "cuda/attention/workspace.h"
#include "cuda/decode/host.h"
#include "cuda/decode/unit.h"
#include "cuda/dequantize/host.h"
#include "cuda/device/call.h"
#include "cuda/latent/host.h"
#include "cuda/merge/host.h"
#include "cuda/prefill/estimate.h"
#include "cuda/prefill/host.h"
#include "cuda/schedule/host.h"
#include "halftone/error.h"
#include "plan/plan.h"

namespace halftone::cuda {
namespace {

/// One worker per multiprocessor. Throws Unsupported, naming what is missing, unless the device is a Hopper
/// GPU (compute capability 9.0) with a working driver.
int workers(Device on) {
  const int device = on.index;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "device is cuda:{}, but no CUDA device works here ({}): run `halftone doctor`, or use the CPU.",
            device, status == cudaSuccess ? "none found" : cudaGetErrorString(status)));
  }
  if (device >= count) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("device.index is {}, but there are {} CUDA devices: use 0 to {}.", device, count,
                            count - 1));
  }
  constexpr int kDecompresses = 12040;  // the first that reads device code as it is stored: CUDA 12.4
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  if (driver < kDecompresses) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("device is cuda:{}, but its driver is for CUDA {}.{} and the kernels need one for "
                    "12.4 or later: install driver 550.54 or newer, or use the CPU.",
                    device, driver / 1000, driver % 1000 / 10));
  }
  int major = 0, minor = 0, processors = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "device is cuda:{} with compute capability {}.{}, but the kernels are for 9.0 (Hopper): use a "
            "Hopper GPU or the CPU.",
            device, major, minor));
  }
  return processors;
}

constexpr auto make_table() {
  std::array<planning::Kernel, kLatentKernels.size() + kDecodeKernels.size() + kPrefillKernels.size() + 1>
      table{};
  std::size_t row = 0;
  for (const planning::Kernel& kernel : kLatentKernels) table[row++] = kernel;
  for (const planning::Kernel& kernel : kDecodeKernels) table[row++] = kernel;
  for (const planning::Kernel& kernel : kPrefillKernels) table[row++] = kernel;
  table[row] = kUniversalRow;
  return table;
}
constexpr auto kKernels = make_table();
static_assert(planning::is_consistent(kKernels));

bool is_prefill(const planning::Kernel& kernel) { return kernel.queue_bytes > 0; }

/// Packed rows of the largest unit of decode that serves the problem; 0: none does.
int largest_decode_unit(const AttentionProblem& problem) {
  int rows = 0;
  for (const planning::Kernel& kernel : kDecodeKernels) {
    if (decode_variant(problem, kernel) >= 0) rows = std::max(rows, kernel.max_rows);
  }
  return rows;
}

/// Whether prefill could serve the problem, but leaves it to decode's kernels or the universal one.
bool leaves_to_decode(const AttentionProblem& problem) {
  if (!problem.is_paged() || problem.arithmetic != Arithmetic::k16Bit) return false;
  const int most = largest_unit(problem), unit = std::min(largest_decode_unit(problem), most);
  if (most == 8 && unit == 8) return true;
  if (problem.policy == SplitPolicy::kBatchInvariant) return false;  // bounds do not decide
  const bool staged = prefill_staged_key(problem).bytes > 0;
  const std::int64_t group = problem.q_heads / problem.kv_heads();
  const bool few = group * problem.max_q_len <= kUnstagedRows;
  if (staged && unit == 0) {  // the universal kernel is left, which is not refused for its bounds
    const bool prompts_alone = group <= kUniversalRow.max_rows && problem.max_prompt_kv != 0;
    const std::int64_t keys = prompts_alone ? problem.max_prompt_kv : planning::most_keys(problem);
    return keys > INT32_MAX || (few && universal_is_faster(problem, kUniversalRow.row_block));
  }
  if (staged && few) return true;
  const bool packed = keys_of(problem) == PrefillKeys::kPacked;
  const bool compared = problem.max_kv_len >= kComparedKeys || (packed && few);
  return unit > 0 && compared && decode_is_faster(problem, unit);
}

int variant(const AttentionProblem& problem, const planning::Kernel& kernel) {
  if (problem.is_latent()) return kernel.latent ? latent_variant(problem, kernel) : -1;
  if (kernel.latent || problem.is_listed()) return -1;
  if (!is_prefill(kernel)) {
    return kernel.row_block > largest_unit(problem) ? -1 : decode_variant(problem, kernel);
  }
  return leaves_to_decode(problem) ? -1 : prefill_variant(problem, kernel);
}

/// What K and V of a problem are, for a sentence.
std::string kv_text(const AttentionProblem& p) {
  const auto* const spec = std::get_if<KvCacheSpec>(&p.kv);
  if (spec == nullptr) return fmt::format("tensors in {}", dtype_name(std::get<KvTensors>(p.kv).dtype));
  if (spec->is_latent()) return "a latent cache";
  return fmt::format("a cache of K in {}{} and V in {}{}", format_name(spec->k_format),
                     spec->rotate_k ? " with rotate_k" : "", format_name(spec->v_format),
                     spec->rotate_v ? " with rotate_v" : "");
}

/// Caches that store K and V apart are served in 16-bit arithmetic, all keys of a request at a time; of
/// latent caches some, lists of keys, too.
void refuse(const AttentionProblem& p) {
  if (p.arithmetic == Arithmetic::k16Bit && p.is_latent()) refuse_latent(p);
  if (p.is_listed() && !p.is_latent()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("listed.top_k is {}, but the CUDA backend has no lists of keys over caches that "
                            "store K and V apart: use a latent cache or the CPU.",
                            p.listed.top_k));
  }
  if (p.arithmetic == Arithmetic::kHalfInt8 || p.arithmetic == Arithmetic::kFp8) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "arithmetic is {0} and kv is {1} with head_dim {2} and {3} of V, q_dtype is {4}, but the "
            "CUDA backend serves {0} over tensors in bf16 and f16 and caches, head_dim {5} and V of as many "
            "dims, or 192 and 128 of V, Q in bf16 or f16: use 16-bit, or the CPU.",
            arithmetic_name(p.arithmetic), kv_text(p), p.head_dim(), p.v_dim(), dtype_name(p.q_dtype),
            p.arithmetic == Arithmetic::kFp8 ? "64, 128, 192, 256 or, without rotate_v, 512"
                                             : "128, 192, 256 or 512"));
  }
  if (p.arithmetic != Arithmetic::k16Bit) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("arithmetic is {}, but the CUDA backend serves 16-bit, half_int8 and fp8: use one of "
                    "these.",
                    arithmetic_name(p.arithmetic)));
  }
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("kv is K and V tensors in {} with head_dim {} and {} of V, q_dtype is {}, but the CUDA "
                  "backend takes tensors in bf16 and f16 with Q alike, V of as many dims as K or 128 beside "
                  "192: convert them, append them to a cache or use the CPU.",
                  dtype_name(std::get<KvTensors>(p.kv).dtype), p.head_dim(), p.v_dim(),
                  dtype_name(p.q_dtype)));
}

planning::StagedKey staged_key(const AttentionProblem& problem, const planning::Kernel& kernel) {
  if (kernel.latent) return latent_staged_key(problem, kernel);
  return is_prefill(kernel) ? prefill_staged_key(problem) : planning::StagedKey{};
}

std::int64_t extra_bytes(int workers, std::int64_t partials) {
  return backend_parts(planning::Carver(nullptr), workers, partials).bytes;
}

std::int64_t scratch_bytes(const planning::Kernel& kernel, int variant) {
  return is_prefill(kernel) ? prefill_scratch_bytes(variant) : 0;
}

/// Whether the kernel of a pass writes new tokens itself, rows of K and V permitting.
bool fuses_append(const AttentionProblem& problem, const planning::Kernel& kernel) {
  if (is_prefill(kernel)) return false;
  return kernel.latent ? latent_appends(problem, latent_variant(problem, kernel))
                       : decode_appends(problem, decode_variant(problem, kernel));
}

/// The passes one after another, each kernel beginning while the one before it ends. What a kernel may refuse
/// it refuses before the first one is launched. Kernels that do not append find the new tokens in the cache:
/// append's own kernel comes before them.
void run(const Plan::Impl& plan, const AttentionArgs& args, std::byte* workspace, Stream stream) {
  if (plan.problem.batch == 0) return;
  const std::span<const planning::Pass> passes = plan.passes();
  std::array<CompiledKernel, planning::kMaxPasses> kernels;
  for (std::size_t i = 0; i < passes.size(); ++i) {
    if (is_prefill(plan.kernel(passes[i]))) {
      check_prefill(plan, passes[i], args);
    } else {
      const auto find = plan.kernel(passes[i]).latent ? latent_kernel : decode_kernel;
      kernels[i] = find(plan, passes[i], args);
    }
  }
  const planning::Workspace parts = planning::carve_workspace(plan, workspace);
  const planning::Schedule& schedule = parts.passes[0].schedule;
  const auto appends = [&] {
    const AppendParams step = step_params(args, schedule);
    return plan.problem.is_latent() ? latent_appends(step) : decode_appends(step);
  };
  const bool fused = plan.info.fuses_append && appends();
  const bool separate = plan.problem.appends && !fused;
  if (separate) append_step(args, schedule, stream);
  bool advanced = !args.append.advance;
  for (std::size_t i = 0; i < passes.size(); ++i) {
    if (is_prefill(plan.kernel(passes[i]))) {
      run_prefill(plan, args, parts, i, stream);
    } else if (plan.kernel(passes[i]).latent) {
      advanced |= run_latent(kernels[i], plan, args, parts, i, fused, stream);
    } else {
      advanced |= run_decode(kernels[i], plan, args, parts, i, fused, stream);
    }
  }
  if (!advanced) settle_lengths(args, schedule, stream);
}

}  // namespace

const planning::Backend& backend() {
  static constexpr planning::Backend kBackend{.kernels = kKernels,
                                              .rows_share_bits = false,
                                              .variant = variant,
                                              .refuse = refuse,
                                              .workers = workers,
                                              .staged_key = staged_key,
                                              .fuses_append = fuses_append,
                                              .extra_bytes = extra_bytes,
                                              .scratch_bytes = scratch_bytes,
                                              .schedule = schedule,
                                              .run = run,
                                              .merge = merge,
                                              .append = append,
                                              .dequantize = dequantize};
  return kBackend;
}

}  // namespace halftone::cuda
