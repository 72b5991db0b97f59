#include "cuda/backend.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <numbers>
#include <string>
#include <string_view>

#include "cuda/decode_config.h"
#include "cuda/device_call.h"
#include "cuda/launch.h"
#include "cuda/schedule_params.h"
#include "format/codec.h"
#include "format/status.h"
#include "halftone/error.h"

namespace halftone::cuda {
namespace {

/// What a workspace holds for this backend beyond planning::Workspace.
struct BackendParts {
  ItemList list;
  std::int32_t* arrivals;  // [partials, kArrivalCounters]
  std::int64_t bytes;
};

BackendParts backend_parts(planning::Carver carver, int workers, std::int64_t partials) {
  BackendParts parts{};
  parts.list.items = carver.take<DeviceItem>(std::int64_t{workers} * kListedItems);
  parts.list.counts = carver.take<std::int32_t>(workers);
  parts.arrivals = carver.take<std::int32_t>(partials * kArrivalCounters);
  parts.bytes = carver.bytes();
  return parts;
}

BackendParts backend_parts(const Plan::Impl& plan, const planning::Workspace& workspace) {
  return backend_parts(planning::Carver(workspace.backend), plan.info.workers, plan.info.max_partials);
}

ParamView param_view(const KvFormat& format, const StaticScale& scale, int dim) {
  ParamView v{};
  v.static_scale = pointer<float>(scale.scale);
  v.static_min = pointer<float>(scale.min);
  v.static_stride = format.granularity == Granularity::kHead ? 1 : 0;
  v.groups = format.params_per_token(dim);
  v.block_shift = format.granularity == Granularity::kGroup ? log2_of(format.group_size / 32) : 0;
  v.asymmetric = format.asymmetric;
  return v;
}

CacheView cache_view(const PagedKv& cache, const PageLayout& layout) {
  CacheView v{};
  v.pages = pointer<std::uint8_t>(cache.pages);
  v.block_table = pointer<std::int32_t>(cache.block_table);
  v.page_stride = cache.pages.strides[0];
  v.table_stride = cache.block_table.strides[0];
  v.table_width = static_cast<std::int32_t>(std::min<std::int64_t>(cache.block_table.shape[1], INT32_MAX));
  v.num_pages = static_cast<std::int32_t>(std::min<std::int64_t>(cache.pages.shape[0], INT32_MAX));
  v.page_log2 = log2_of(cache.spec.page_size);
  v.head_bytes = static_cast<std::int32_t>(layout.head_bytes);
  v.tile_bytes = static_cast<std::int32_t>(layout.tile_bytes);
  v.v_data_offset = static_cast<std::int32_t>(layout.v_data_offset);
  v.k_param_offset = static_cast<std::int32_t>(layout.k_param_offset);
  v.v_param_offset = static_cast<std::int32_t>(layout.v_param_offset);
  return v;
}

DecodeParams decode_params(const Plan::Impl& plan, const AttentionArgs& args, std::byte* base) {
  const AttentionProblem& problem = plan.problem;
  const planning::Workspace workspace = planning::carve_workspace(plan, base);
  const BackendParts parts = backend_parts(plan, workspace);
  static constexpr int kNoLimit = INT_MAX / 2;  // a position plus this still fits
  DecodeParams p{};
  p.schedule = workspace.schedule;
  p.list = parts.list;
  p.arrivals = parts.arrivals;
  p.partial_out = workspace.partial_out;
  p.partial_state_log2 = workspace.partial_state;
  p.cache = cache_view(args.cache, plan.layout);
  p.k = param_view(problem.kv.k_format, args.cache.k_scale, problem.kv.head_dim);
  p.v = param_view(problem.kv.v_format, args.cache.v_scale, problem.kv.v_dim());
  p.q = args.q.data;
  p.q_tokens = args.q.shape[0];
  p.q_token_stride = args.q.strides[0];
  p.q_head_stride = args.q.strides[1];
  p.out = args.out.data;
  p.out_token_stride = args.out.strides[0];
  p.out_head_stride = args.out.strides[1];
  p.lse = static_cast<float*>(args.lse.data);
  p.lse_token_stride = args.lse.strides[0];
  p.lse_head_stride = args.lse.strides[1];
  p.alibi_slopes = pointer<float>(args.alibi_slopes);
  p.sinks = pointer<float>(args.sinks);
  p.status = static_cast<std::int32_t*>(args.status.data);
  p.scale_log2 = plan.scale * std::numbers::log2e_v<float>;
  p.softcap = problem.softcap;
  const auto window = [](int tokens) { return tokens < 0 ? kNoLimit : std::min(tokens, kNoLimit); };
  p.causal_right = problem.mask.causal ? 0 : window(problem.mask.window_right);
  p.window_left = window(problem.mask.window_left);
  p.q_aligned = rows_aligned(args.q);
  p.q_type = problem.q_dtype;
  p.out_type = problem.out_dtype;
  p.rotate_k = problem.kv.rotate_k;
  p.rotate_v = problem.kv.rotate_v;
  p.cache_settled = args.cache_settled;
  p.parts[0] = page::part_of(problem.kv, plan.layout, KvPart::kK);
  p.parts[1] = page::part_of(problem.kv, plan.layout, KvPart::kV);
  return p;
}

using DecodeKernels = std::array<DecodeKernel, kDecodeTable.size()>;

/// The kernels of all rows; of a row that is not in this build a null one.
const DecodeKernels& decode_kernels() {
  static const DecodeKernels all = [] {
    DecodeKernels kernels;
    for (std::size_t row = 0; row < kernels.size(); ++row) {
      for (const auto find : {decode_kernel_16bit, decode_kernel_fp8, decode_kernel_int8, decode_kernel_int4,
                              decode_kernel_mixed8, decode_kernel_mixed4}) {
        if (kernels[row].function == nullptr) kernels[row] = find(static_cast<int>(row));
      }
    }
    return kernels;
  }();
  return all;
}

/// The kernel of a plan.
DecodeKernel decode_kernel(int row, const KvCacheSpec& kv) {
  if (row == kUniversalKernel) return decode_kernel_any(kv.head_dim, kv.v_dim());
  const DecodeKernel& kernel = decode_kernels()[row];
  if (kernel.function == nullptr) {
    throw Error(ErrorCode::kInternal,
                fmt::format("decode kernel {} is not in this build: rebuild halftone.", row));
  }
  return kernel;
}

/// Lets a plan's kernel use its shared memory on the current device: as much as any plan asks of its
/// function.
void allow_shared_memory(int row, const KvCacheSpec& kv) {
  KvCacheSpec most = kv;
  if (row == kUniversalKernel) most.v_head_dim = kv.v_dim(), most.head_dim = kHeadDims.back();
  const DecodeKernel kernel = decode_kernel(row, most);
  check(
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
      "cudaFuncSetAttribute");
}

/// The same, once for each kernel and device.
void allow_shared_memory_once(int row, const KvCacheSpec& kv, int device) {
  constexpr std::size_t kKernels = kDecodeTable.size() + kHeadDims.size();  // universal ones by V's head_dim
  static constinit std::array<std::atomic<std::uint64_t>, kKernels> allowed{};  // bits: devices
  const auto dim = std::find(kHeadDims.begin(), kHeadDims.end(), kv.v_dim()) - kHeadDims.begin();
  auto& devices = allowed[static_cast<std::size_t>(row == kUniversalKernel ? row + dim : row)];
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((devices.load(std::memory_order_acquire) & bit) != 0) return;
  allow_shared_memory(row, kv);  // two threads may both do it
  devices.fetch_or(bit, std::memory_order_release);
}

void check_out(const AttentionArgs& args) {
  const TensorView& out = args.out;
  const auto rest = reinterpret_cast<std::uintptr_t>(out.data) % 8;
  if (rest == 0 && out.strides[0] % 4 == 0 && out.strides[1] % 4 == 0) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "out starts {} bytes past a multiple of 8 with strides {} and {}, but CUDA needs 8-byte aligned "
          "rows: use an aligned buffer and strides that are multiples of 4.",
          rest, out.strides[0], out.strides[1]));
}

AppendPart append_part(const PagedKv& cache, const PageLayout& layout, KvPart which, const TensorView& input,
                       const StaticScale& scale) {
  AppendPart a{};
  a.part = page::part_of(cache.spec, layout, which);
  a.input = input.data;
  a.token_stride = input.strides[0];
  a.head_stride = input.strides[1];
  a.input_type = input.dtype;
  a.aligned = rows_aligned(input);
  a.static_scale = pointer<float>(scale.scale);
  a.static_min = pointer<float>(scale.min);
  a.static_stride = a.part.format.granularity == Granularity::kHead ? 1 : 0;
  const bool limited =
      which == KvPart::kV && a.part.groups > 0 && a.part.format.scale_dtype == DType::kFloat16;
  const float levels = codec::quantisation_levels(a.part.format.dtype, a.part.format.asymmetric);
  a.largest_min = limited ? kMaxScaledV : HUGE_VALF;
  a.largest_scale =
      limited ? (a.part.format.asymmetric ? 2.0F : 1.0F) * kMaxScaledV / levels * 1.001F : HUGE_VALF;
  a.segment_log2 = a.part.dim <= 64 ? 3 : a.part.dim <= 128 ? 4 : 5;
  a.group_log2 = a.part.groups > 1 ? log2_of(a.part.format.group_size / kChunk) : a.segment_log2;
  if (a.part.groups > 0) {
    const auto first = a.part.scale_offset(0, 0);
    a.scale_first = static_cast<std::int32_t>(first);
    a.scale_token = static_cast<std::int32_t>(a.part.scale_offset(1, 0) - first);
    a.scale_group = static_cast<std::int32_t>(a.part.scale_offset(0, 1) - first);
    a.min_away = static_cast<std::int32_t>(a.part.min_offset(0, 0) - first);
  }
  const int bits = dtype_bits(a.part.format.dtype);
  for (int block = 0; bits < 16 && block < a.part.dim / 32; ++block) {
    const int strings = which == KvPart::kK ? 64 : 32, length = a.part.dim * bits * 2 / strings;
    const int pos = block * 64 * bits / strings;
    const int first = page::chunked(0, strings, length, pos);
    a.block_first[block] = static_cast<std::int32_t>(a.part.data_offset) + first;
    a.block_step[block] = page::chunked(1, strings, length, pos) - first;
  }
  return a;
}

/// Row of kDecodeTable for units of `rows` packed rows (0: of any number); -1 if there is none.
int find_table_row(const AttentionProblem& problem, int rows) {
  const KvCacheSpec& kv = problem.kv;
  if (kv.v_dim() != kv.head_dim) return -1;
  if (problem.q_dtype == DType::kFloat32 || problem.out_dtype == DType::kFloat32) return -1;
#ifdef HALFTONE_CUDA_BOTH_FAMILIES
  const char* family = std::getenv("HALFTONE_DECODE_FAMILY");
  return find_row(kv, rows, family == nullptr || std::string_view(family) != "warp");
#else
  return find_row(kv, rows);
#endif
}

}  // namespace

int multiprocessors(int device) {
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

int find_kernel(const AttentionProblem& problem, const planning::Config& config) {
  if (!problem.paged) return -1;
  if (!config.universal) return find_table_row(problem, config.row_block);
  return find_table_row(problem, 0) < 0 ? kUniversalKernel : -1;
}

void refuse(const AttentionProblem& problem) {
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("paged is {}, but the CUDA backend has attention over paged caches only: change it or "
                  "use the CPU.",
                  problem.paged));
}

std::int64_t backend_bytes(int workers, std::int64_t partials) {
  return backend_parts(planning::Carver(nullptr), workers, partials).bytes;
}

void schedule(const Plan::Impl& plan, const SequenceLengths& lengths, std::byte* workspace, Stream stream) {
  const planning::Workspace parts = planning::carve_workspace(plan, workspace);
  const BackendParts backend = backend_parts(plan, parts);
  ScheduleBuildParams p{};
  p.schedule = parts.schedule;
  p.list = backend.list;
  p.arrivals = backend.arrivals;
  p.cu_q = pointer<std::int32_t>(lengths.cu_q);
  p.kv_lengths = pointer<std::int32_t>(lengths.kv_lengths);
  p.plan_id = plan.id;
  const DeviceScope scope(plan.problem.device.index);
  check(launch_schedule(p, stream), "schedule");
}

void run(const Plan::Impl& plan, const AttentionArgs& args, std::byte* workspace, Stream stream) {
  if (plan.problem.batch == 0) return;
  if (plan.kernel != kUniversalKernel) check_out(args);
  const DecodeParams p = decode_params(plan, args, workspace);
  const DeviceScope scope(plan.problem.device.index);
  const DecodeKernel kernel = decode_kernel(plan.kernel, plan.problem.kv);
  allow_shared_memory_once(plan.kernel, plan.problem.kv, plan.problem.device.index);
  cudaLaunchAttribute overlap{};  // of this kernel's start with the end of the one before it
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.info.workers));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = 1;
  const void* arguments[] = {&p};
  const auto launch = [&] {
    return cudaLaunchKernelExC(&config, kernel.function, const_cast<void**>(arguments));
  };
  cudaError_t status = launch();
  if (status == cudaErrorInvalidValue) {  // the device has been reset, or its context is another one
    (void)cudaGetLastError();             // or the caller's next check would find it
    allow_shared_memory(plan.kernel, plan.problem.kv);
    status = launch();
  }
  check(status, "run");
}

void append(const PagedKv& cache, const AppendArgs& args, Stream stream) {
  const PageLayout layout = page_layout(cache.spec);
  AppendParams p{};
  p.parts[0] = append_part(cache, layout, KvPart::kK, args.k, cache.k_scale);
  p.parts[1] = append_part(cache, layout, KvPart::kV, args.v, cache.v_scale);
  p.tile_bytes = layout.tile_bytes;
  p.head_bytes = layout.head_bytes;
  p.pages = static_cast<std::uint8_t*>(cache.pages.data);
  p.page_stride = cache.pages.strides[0];
  p.num_pages = cache.pages.shape[0];
  p.page_log2 = log2_of(cache.spec.page_size);
  p.kv_heads = cache.spec.kv_heads;
  p.tokens = args.k.shape[0];
  p.slot_mapping = pointer<std::int64_t>(args.slot_mapping);
  if (p.slot_mapping == nullptr) {
    p.cu_seqlens = pointer<std::int32_t>(args.cu_seqlens);
    p.lengths = pointer<std::int32_t>(cache.lengths);
    p.block_table = pointer<std::int32_t>(cache.block_table);
    p.table_stride = cache.block_table.strides[0];
    p.table_width = cache.block_table.shape[1];
    p.batch = static_cast<std::int32_t>(cache.lengths.shape[0]);
  }
  p.pairing = args.rope.pairing;
  if (p.pairing != RopePairing::kNone) {
    p.rope_half = static_cast<std::int32_t>(args.rope.cos.shape[1]);
    p.rope_rows = args.rope.cos.shape[0];
    p.cos = pointer<float>(args.rope.cos);
    p.sin = pointer<float>(args.rope.sin);
    p.positions = pointer<std::int32_t>(args.rope.positions);
    p.rope_aligned = aligned_to_16(p.cos) && aligned_to_16(p.sin) && p.rope_half % 4 == 0;
  }
  p.status = static_cast<std::int32_t*>(args.status.data);
  const DeviceScope scope(cache.pages.device.index);
  check(launch_append(p, stream), "append");
  if (args.advance) {
    check(launch_advance(static_cast<std::int32_t*>(cache.lengths.data), p.cu_seqlens, p.batch, stream),
          "append");
  }
}

}  // namespace halftone::cuda
