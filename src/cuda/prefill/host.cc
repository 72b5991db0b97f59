#include "cuda/prefill/host.h"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <variant>

#include "cuda/attention/workspace.h"
#include "cuda/device/call.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/kernels.h"
#include "cuda/prefill/params.h"

namespace halftone::cuda {
namespace {

/// The dtype that K and V both have and that stays as it is; kUInt8: there is none.
DType common_dtype(const AttentionProblem& problem) {
  if (const auto* const tensors = std::get_if<KvTensors>(&problem.kv)) return tensors->dtype;
  const auto& spec = std::get<KvCacheSpec>(problem.kv);
  const bool rows = !spec.is_latent() && !spec.rotate_k && spec.k_format.dtype == spec.v_format.dtype;
  return rows ? spec.k_format.dtype : DType::kUInt8;
}

/// cuTensorMapEncodeTiled, from the driver that the run-time library has loaded.
decltype(&cuTensorMapEncodeTiled) find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  check(status, "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Error(ErrorCode::kDeviceError,
                "the driver has no cuTensorMapEncodeTiled, which prefill needs: use a driver of CUDA 12 or "
                "later.");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto found = find_encoder();
  return found;
}

/// A tensor of 16-bit elements whose boxes are copied: sizes and, from the second dim on, strides in bytes,
/// innermost first.
template <std::size_t kRank>
struct Boxes {
  const void* data;
  std::array<cuuint64_t, kRank> size;
  std::array<cuuint64_t, kRank - 1> stride;
  std::array<cuuint32_t, kRank> box;

  CUtensorMap map(DType dtype) const {
    const auto type =
        dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    std::array<cuuint32_t, kRank> steps;
    steps.fill(1);
    CUtensorMap map{};
    const CUresult status =
        encoder()(&map, type, kRank, const_cast<void*>(data), size.data(), stride.data(), box.data(),
                  steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("cuTensorMapEncodeTiled failed with {}: report this as a bug.",
                              static_cast<int>(status)));
    }
    return map;
  }
};

/// [tokens][heads][dim]: boxes of 64 dims, `heads` heads and `tokens` tokens. What a tensor without elements
/// points to is never read. The stride of a dim of one element says nothing.
Boxes<3> tensor_boxes(const TensorView& t, const void* somewhere, int heads, int tokens) {
  const bool empty = t.numel() == 0;
  const auto size = [](std::int64_t n) { return static_cast<cuuint64_t>(std::max<std::int64_t>(1, n)); };
  const auto stride = [&](int dim) {
    return static_cast<cuuint64_t>(empty || t.shape[dim] <= 1 ? 16 : t.strides[dim] * 2);
  };
  return {empty ? somewhere : t.data,
          {size(t.shape[2]), size(t.shape[1]), size(t.shape[0])},
          {stride(1), stride(0)},
          {64, static_cast<cuuint32_t>(heads), static_cast<cuuint32_t>(tokens)}};
}

/// [pages][heads][tiles][tokens][dim]: boxes of 64 dims of a tile. `offset`: of the part within a tile.
Boxes<5> page_boxes(const Plan::Impl& plan, const PagedKv& cache, std::int64_t offset, int dim) {
  const PageLayout& layout = plan.layout;
  const auto bytes = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  return {static_cast<const std::uint8_t*>(cache.pages.data) + offset,
          {bytes(dim), kTileTokens, bytes(cache.spec.page_size / kTileTokens), bytes(cache.spec.kv_heads),
           bytes(std::max<std::int64_t>(1, cache.pages.shape[0]))},
          {bytes(dim) * 2, bytes(layout.tile_bytes), bytes(layout.head_bytes),
           bytes(cache.pages.shape[0] <= 1 ? layout.page_bytes : cache.pages.strides[0])},
          {64, kTileTokens, 1, 1, 1}};
}

/// Boxes are copied from and to multiples of 16 bytes.
bool has_boxes(const TensorView& t) {
  const auto fits = [&](int dim) {
    return t.shape[dim] <= 1 || (t.strides[dim] > 0 && t.strides[dim] % 8 == 0);
  };
  return aligned_to_16(t.data) && fits(0) && fits(1);
}

void check_rows(const TensorView& t, const char* name) {
  if (t.numel() == 0 || has_boxes(t)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} starts {} bytes past a multiple of 16 with strides {} and {}, but CUDA needs "
                          "rows at multiples of 16 bytes, none of them shared: use an aligned buffer and "
                          "positive strides that are multiples of 8.",
                          name, reinterpret_cast<std::uintptr_t>(t.data) % 16, t.strides[0], t.strides[1]));
}

CompiledKernel compiled_kernel(int row) {
  return kPrefillTable[row].dtype == DType::kBFloat16 ? prefill_kernel_bf16(row) : prefill_kernel_f16(row);
}

}  // namespace

int prefill_variant(const AttentionProblem& problem, const planning::Kernel& kernel) {
  const DType dtype = common_dtype(problem);
  if (problem.q_dtype != dtype || problem.v_dim() != problem.head_dim()) return -1;
  for (std::size_t row = 0; row < kPrefillTable.size(); ++row) {
    const PrefillConfig& c = kPrefillTable[row];
    if (is_built(c) && c.dtype == dtype && c.head_dim == problem.head_dim() &&
        rows_of(c) == kernel.row_block) {
      return static_cast<int>(row);
    }
  }
  return -1;
}

void check_prefill(const Plan::Impl& plan, const planning::Pass& pass, const AttentionArgs& args) {
  check_out(args);
  (void)encoder();
  if (compiled_kernel(pass.variant).function == nullptr) {
    throw Error(ErrorCode::kInternal,
                fmt::format("prefill kernel {} is not in this build: rebuild halftone.", pass.variant));
  }
  if (plan.problem.is_paged()) return;
  const auto& tensors = std::get<KvTensorViews>(args.kv);
  check_rows(tensors.k, "k");
  check_rows(tensors.v, "v");
}

void run_prefill(const Plan::Impl& plan, const AttentionArgs& args, const planning::Workspace& workspace,
                 std::size_t index, Stream stream) {
  const planning::Pass& pass = plan.passes()[index];
  const PrefillConfig& config = kPrefillTable[pass.variant];
  PrefillParams p{};
  p.attention = attention_params(plan, args, workspace, index);
  p.taken = backend_parts(pass, workspace.passes[index]).taken;
  const int group = pass.schedule.group;
  p.q_boxes = 64 % group == 0 && has_boxes(args.q) && args.q.numel() > 0;
  if (p.q_boxes) p.q = tensor_boxes(args.q, nullptr, group, 64 / group).map(config.dtype);
  const DType out = args.out.dtype;
  p.out_boxes = 64 % group == 0 && dtype_bits(out) == 16 && has_boxes(args.out) && args.out.numel() > 0;
  if (p.out_boxes) p.out = tensor_boxes(args.out, nullptr, group, 64 / group).map(out);
  if (const auto* const cache = std::get_if<PagedKv>(&args.kv)) {
    p.k = page_boxes(plan, *cache, 0, config.head_dim).map(config.dtype);
    p.v = page_boxes(plan, *cache, plan.layout.v_data_offset, config.head_dim).map(config.dtype);
  } else {
    const auto& tensors = std::get<KvTensorViews>(args.kv);
    const void* const somewhere = workspace.passes[index].schedule.header;
    p.kv_tokens = tensors.k.shape[0];
    p.k = tensor_boxes(tensors.k, somewhere, 1, config.kv_tile).map(config.dtype);
    p.v = tensor_boxes(tensors.v, somewhere, 1, config.kv_tile).map(config.dtype);
  }
  launch(compiled_kernel(pass.variant), &p, plan, pass, stream);
}

}  // namespace halftone::cuda
