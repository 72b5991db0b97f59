#include "cuda/prefill/host.h"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <variant>

#include "cuda/attention/workspace.h"
#include "cuda/dequantize/host.h"
#include "cuda/device/call.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/kernels.h"
#include "cuda/prefill/params.h"

namespace halftone::cuda {
namespace {

/// Whether K and V lie in a cache from which the kernel cannot take them as they are: they are dequantised to
/// Q's type first.
bool is_staged(const AttentionProblem& problem) {
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  if (spec == nullptr || spec->is_latent()) return false;
  const bool as_q = spec->k_format.dtype == problem.q_dtype && spec->v_format.dtype == problem.q_dtype;
  return !as_q || spec->rotate_k;
}

/// The type of K and V as the kernel reads them; kUInt8: it cannot. What a cache stands for need not lie in
/// f16's range.
DType operand_dtype(const AttentionProblem& problem) {
  if (const auto* const tensors = std::get_if<KvTensors>(&problem.kv)) return tensors->dtype;
  if (is_staged(problem)) return DType::kBFloat16;
  return std::get<KvCacheSpec>(problem.kv).is_latent() ? DType::kUInt8 : problem.q_dtype;
}

/// `count` heads of a tensor [tokens][heads][dim] from `first` on.
TensorView heads_of(TensorView t, std::int64_t first, std::int64_t count) {
  t.shape[1] = count;
  if (t.data != nullptr) {
    t.data = static_cast<std::byte*>(t.data) + first * t.strides[1] * (dtype_bits(t.dtype) / 8);
  }
  return t;
}

/// Moves a tensor of floats that may be absent.
void advance(TensorView& t, std::int64_t floats) {
  if (t.data != nullptr) t.data = static_cast<float*>(t.data) + floats;
}

/// `count` KV heads of a cache from `first` on.
PagedKv heads_of(PagedKv cache, const PageLayout& layout, int first, int count) {
  if (cache.pages.data != nullptr) {
    cache.pages.data = static_cast<std::byte*>(cache.pages.data) + first * layout.head_bytes;
  }
  cache.spec.kv_heads = count;
  for (const auto& [format, scale] :
       {std::pair{&cache.spec.k_format, &cache.k_scale}, std::pair{&cache.spec.v_format, &cache.v_scale}}) {
    if (format->granularity != Granularity::kHead) continue;
    advance(scale->scale, first);
    advance(scale->min, first);
  }
  return cache;
}

/// What a launch takes: all heads, or those of a round.
AttentionArgs round_args(const Plan::Impl& plan, const planning::Pass& pass, AttentionArgs args, int round) {
  if (pass.staged.rounds == 1) return args;
  const int kv_heads = pass.staged.heads, kv_first = round * kv_heads;
  const std::int64_t count = std::int64_t{kv_heads} * pass.schedule.group, first = round * count;
  args.kv = heads_of(std::get<PagedKv>(args.kv), plan.layout, kv_first, kv_heads);
  args.q = heads_of(args.q, first, count);
  args.out = heads_of(args.out, first, count);
  advance(args.alibi_slopes, first);
  advance(args.sinks, first);
  advance(args.lse, first * args.lse.strides[1]);
  return args;
}

/// Where K (or, after all of it, V) of a round is staged: [keys, heads, dim].
TensorView staged_tensor(const Plan::Impl& plan, const planning::Pass& pass, std::byte* at, KvPart which) {
  const std::int64_t dim = plan.problem.head_dim(), heads = pass.staged.heads, keys = pass.staged.keys;
  if (which == KvPart::kV) at += keys * heads * dim * 2;
  return TensorView::contiguous(at, plan.problem.q_dtype, {keys, heads, dim}, plan.problem.device);
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

/// `staged`: K and V that the pass has staged, if it does.
PrefillParams prefill_params(const Plan::Impl& plan, const AttentionArgs& args,
                             const planning::Workspace& workspace, std::size_t index,
                             const KvTensorViews& staged) {
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
  const auto* const cache = std::get_if<PagedKv>(&args.kv);
  const bool in_rows = cache == nullptr || pass.staged.keys > 0;
  if (in_rows) {
    const KvTensorViews& rows = cache == nullptr ? std::get<KvTensorViews>(args.kv) : staged;
    const void* const somewhere = workspace.passes[index].schedule.header;
    p.kv_tokens = rows.k.shape[0];
    p.k = tensor_boxes(rows.k, somewhere, 1, config.kv_tile).map(config.dtype);
    p.v = tensor_boxes(rows.v, somewhere, 1, config.kv_tile).map(config.dtype);
    p.attention.rotate_v = false;  // staged rows are in the caller's basis
  } else {
    p.k = page_boxes(plan, *cache, 0, config.head_dim).map(config.dtype);
    p.v = page_boxes(plan, *cache, plan.layout.v_data_offset, config.head_dim).map(config.dtype);
  }
  return p;
}

}  // namespace

int prefill_variant(const AttentionProblem& problem, const planning::Kernel& kernel) {
  const DType dtype = operand_dtype(problem);
  if (problem.arithmetic != Arithmetic::k16Bit) return -1;
  if (problem.q_dtype != dtype || problem.v_dim() != problem.head_dim()) return -1;
  const std::int64_t group = problem.q_heads / problem.kv_heads();
  if (is_staged(problem) && problem.policy != SplitPolicy::kBatchInvariant &&
      group * problem.max_q_len <= kUnstagedRows) {
    return -1;
  }
  for (std::size_t row = 0; row < kPrefillTable.size(); ++row) {
    const PrefillConfig& c = kPrefillTable[row];
    if (is_built(c) && c.dtype == dtype && c.head_dim == problem.head_dim() &&
        rows_of(c) == kernel.row_block) {
      return static_cast<int>(row);
    }
  }
  return -1;
}

int prefill_staged_bytes(const AttentionProblem& problem) {
  return is_staged(problem) ? (problem.head_dim() + problem.v_dim()) * 2 : 0;
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
  for (int round = 0; round < pass.staged.rounds; ++round) {
    const AttentionArgs own = round_args(plan, pass, args, round);
    KvTensorViews staged;
    if (pass.staged.keys > 0) {
      const auto& cache = std::get<PagedKv>(own.kv);
      const DeviceScope scope(plan.problem.device.index);
      for (const KvPart which : {KvPart::kK, KvPart::kV}) {
        TensorView& rows = which == KvPart::kK ? staged.k : staged.v;
        rows = staged_tensor(plan, pass, workspace.staged, which);
        stage_rows(cache, plan.layout, which, workspace.passes[index].schedule.staged, rows, stream);
      }
    }
    const PrefillParams p = prefill_params(plan, own, workspace, index, staged);
    launch(compiled_kernel(pass.variant), &p, plan, stream);
  }
}

}  // namespace halftone::cuda
