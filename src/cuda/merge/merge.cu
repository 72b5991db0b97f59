#include <algorithm>
#include <bit>
#include <cmath>

#include "cuda/device/values.h"
#include "cuda/merge/params.h"
#include "plan/merge.h"

namespace halftone::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFewParts = 32;  // served by a kernel whose parameters are copied faster

__device__ __forceinline__ float* at(const MergeLse& lse, std::int64_t row, std::int64_t head) {
  return lse.data + row * lse.row_stride + head * lse.head_stride;
}

__device__ __forceinline__ std::int64_t offset(const MergeValues& t, std::int64_t row, std::int64_t head) {
  return row * t.row_stride + head * t.head_stride;
}

/// Threads along x share a row of a head, kCount adjacent dims each, and every one of them folds the LSEs of
/// the parts by itself, in the order of src/cpu/merge.cc.
template <int kParts, int kCount>
__global__ void __launch_bounds__(kThreads) merge(const __grid_constant__ MergeParams<kParts> p) {
  const std::int64_t pairs = p.shape.rows * p.shape.heads;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.y;
  for (std::int64_t pair = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y; pair < pairs; pair += step) {
    const bool narrow = pairs <= 0xffffffff;  // 64-bit division is slow
    const std::int64_t row =
        narrow ? static_cast<std::uint32_t>(pair) / static_cast<std::uint32_t>(p.shape.heads)
               : pair / p.shape.heads;
    const std::int64_t head = pair - row * p.shape.heads;
    planning::RowState total = planning::empty_state();
    for (int i = 0; i < p.count; ++i) {
      total = planning::merge_states(total, {__ldg(at(p.parts[i].lse, row, head)), 1.0f}).state;
    }
    for (std::int64_t d = threadIdx.x * kCount; d < p.shape.dim; d += std::int64_t{blockDim.x} * kCount) {
      float sum[kCount] = {};
      for (int i = 0; i < p.count; ++i) {
        const MergePart& part = p.parts[i];
        const float lse = __ldg(at(part.lse, row, head));
        if (lse == planning::kMinusInfinity) continue;
        const float weight = codec::ht_div(std::exp(lse - total.max), total.sum);
        float x[kCount];
        load_values(part.out.type, part.out.data, offset(part.out, row, head) + d, x);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] = codec::ht_add(sum[j], codec::ht_mul(weight, x[j]));
      }
      store_values(p.out.type, p.out.data, offset(p.out, row, head) + d, sum);
    }
    if (p.lse.data != nullptr && threadIdx.x == 0) *at(p.lse, row, head) = planning::finish_state(total).lse;
  }
}

template <int kParts>
int launch(const MergeParams<kParts>& p, void* stream) {
  const std::int64_t pairs = p.shape.rows * p.shape.heads;
  if (pairs == 0) return cudaSuccess;
  const std::int64_t chunks = p.shape.aligned ? p.shape.dim / kVector : p.shape.dim;
  const unsigned across = std::bit_ceil(static_cast<unsigned>(std::clamp<std::int64_t>(chunks, 1, kThreads)));
  const dim3 block(across, kThreads / across);
  constexpr std::int64_t kMaxBlocks = 1 << 20;
  const auto blocks = static_cast<unsigned>(std::min((pairs + block.y - 1) / block.y, kMaxBlocks));
  const void* kernel = p.shape.aligned ? reinterpret_cast<const void*>(&merge<kParts, kVector>)
                                       : reinterpret_cast<const void*>(&merge<kParts, 1>);
  const void* arguments[] = {&p};
  return cudaLaunchKernel(kernel, dim3(blocks), block, const_cast<void**>(arguments), 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace

int launch_merge(const LargestMerge& params, void* stream) {
  if (params.count > kFewParts) return launch(params, stream);
  MergeParams<kFewParts> few{params.shape, params.out, params.lse, params.count, {}};
  std::copy_n(params.parts, params.count, few.parts);
  return launch(few, stream);
}

}  // namespace halftone::cuda
