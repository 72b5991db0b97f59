#include "cuda/attention/host.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <climits>
#include <map>
#include <mutex>
#include <numbers>
#include <shared_mutex>
#include <utility>
#include <variant>

#include "cuda/attention/workspace.h"
#include "cuda/device/call.h"
#include "halftone/error.h"

namespace halftone::cuda {
namespace {

ParamView param_view(const KvFormat& format, const StaticScale& scale) {
  ParamView v{};
  v.static_scale = pointer<float>(scale.scale);
  v.static_min = pointer<float>(scale.min);
  v.static_stride = format.granularity == Granularity::kHead ? 1 : 0;
  return v;
}

CacheView cache_view(const PagedKv& cache, const PageLayout& layout) {
  CacheView v{};
  v.pages = pointer<std::uint8_t>(cache.pages);
  v.block_table = pointer<std::int32_t>(cache.block_table);  // null with lists
  v.page_stride = cache.pages.strides[0];
  v.table_stride = cache.block_table.strides[0];
  v.table_width = static_cast<std::int32_t>(std::min<std::int64_t>(cache.block_table.shape[1], INT32_MAX));
  v.num_pages = static_cast<std::int32_t>(std::min<std::int64_t>(cache.pages.shape[0], INT32_MAX));
  v.page_log2 = log2_of(cache.spec.page_size);
  v.head_bytes = static_cast<std::int32_t>(layout.head_bytes);
  v.tile_bytes = static_cast<std::int32_t>(layout.tile_bytes);
  v.row_bytes = static_cast<std::int32_t>(layout.row_bytes);
  v.v_data_offset = static_cast<std::int32_t>(layout.v_data_offset);
  v.k_param_offset = static_cast<std::int32_t>(layout.k_param_offset);
  v.v_param_offset = static_cast<std::int32_t>(layout.v_param_offset);
  return v;
}

ListView list_view(const TensorView& indices) { return {pointer<std::int32_t>(indices), indices.strides[0]}; }

ListedParams listed_params(const Plan::Impl& plan, const AttentionArgs& args,
                           const planning::Schedule& schedule) {
  ListedParams p{};
  if (!plan.problem.is_listed()) return p;
  p.list = list_view(args.indices);
  p.counts = schedule.kv_lengths;
  if (plan.problem.listed.extra_top_k == 0) return p;
  p.extra_list = list_view(args.extra_indices);
  p.counts = schedule.first_list;
  p.extra_cache = cache_view(args.extra_kv, plan.extra_layout);
  return p;
}

void allow_shared_memory(const CompiledKernel& kernel) {
  check(
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
      "cudaFuncSetAttribute");
}

/// The same, once for each kernel, size and device.
void allow_shared_memory_once(const CompiledKernel& kernel, int device) {
  static std::shared_mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;  // bytes
  const std::pair key{kernel.function, device};
  {
    const std::shared_lock lock(mutex);
    const auto found = allowed.find(key);
    if (found != allowed.end() && found->second >= kernel.shared_bytes) return;
  }
  const std::unique_lock lock(mutex);
  int& bytes = allowed[key];
  if (bytes >= kernel.shared_bytes) return;
  allow_shared_memory(kernel);
  bytes = kernel.shared_bytes;
}

}  // namespace

void require_built(const CompiledKernel& kernel, std::string_view family, int variant) {
  if (kernel.function != nullptr) return;
  throw Error(ErrorCode::kInternal,
              fmt::format("{} kernel {} is not in this build: rebuild halftone.", family, variant));
}

AttentionParams attention_params(const Plan::Impl& plan, const AttentionArgs& args,
                                 const planning::Workspace& workspace, std::size_t index) {
  const AttentionProblem& problem = plan.problem;
  const planning::PassWorkspace& pass = workspace.passes[index];
  const BackendParts parts = backend_parts(plan.passes()[index], pass);
  static constexpr int kNoLimit = INT_MAX / 2;  // a position plus this still fits
  AttentionParams p{};
  p.schedule = pass.schedule;
  p.list = parts.list;
  p.arrivals = parts.arrivals;
  p.partial_out = pass.partial_out;
  p.partial_state_log2 = pass.partial_state;
  if (const auto* const cache = std::get_if<PagedKv>(&args.kv)) {
    const KvCacheSpec& spec = cache->spec;
    p.cache = cache_view(*cache, plan.layout);
    p.listed = listed_params(plan, args, pass.schedule);
    p.k = param_view(spec.k_format, cache->k_scale);
    p.v = param_view(spec.v_format, cache->v_scale);
    p.rotate_k = spec.rotate_k;
    p.rotate_v = spec.rotate_v;
    p.channels = channels_of(cache->k_channels);
    if (!problem.lse && !problem.sinks) p.channels.offset = nullptr;
    p.parts[0] = page::part_of(spec, plan.layout, KvPart::kK);
    p.parts[1] = page::part_of(spec, plan.layout, KvPart::kV);
  }
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
  p.checks_inputs = index == 0;
  // The kernel of an earlier pass writes nothing that is read ahead, and lets this one start only when all
  // that came before it has ended.
  p.cache_settled = args.cache_settled || index > 0;
  return p;
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

void launch(const CompiledKernel& kernel, const void* params, const Plan::Impl& plan,
            const planning::Pass& pass, Stream stream) {
  const int device = plan.problem.device.index;
  const DeviceScope scope(device);
  allow_shared_memory_once(kernel, device);
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // starts as the one before it ends
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(kernel.cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(pass.schedule.workers * kernel.cluster));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes.data();
  config.numAttrs = kernel.cluster > 1 ? 2 : 1;
  const void* arguments[] = {params};
  const auto launch = [&] {
    return cudaLaunchKernelExC(&config, kernel.function, const_cast<void**>(arguments));
  };
  cudaError_t status = launch();
  if (status == cudaErrorInvalidValue) {  // the device has been reset, or its context is another one
    (void)cudaGetLastError();             // or the caller's next check would find it
    allow_shared_memory(kernel);
    status = launch();
  }
  check(status, "run");
}

}  // namespace halftone::cuda
