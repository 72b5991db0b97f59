// K of tensors as codes with a scale per key, into the workspace: a row is of 16 or 32 lanes, of which some
// may be left over; a wide one has two halves.
#include "cuda/device/lanes.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.h"
#include "cuda/device/range.h"
#include "cuda/prefill/codes.h"
#include "cuda/prefill/stage.h"
#include "format/int8_row.h"

namespace halftone::cuda {
namespace {

constexpr int kThreads = 256, kCtas = 4;  // of an SM

template <int kDim>
struct RowStager {
  static constexpr int kLanes = lanes_of(kDim);
  static constexpr int kHalves = is_wide(kDim) ? 2 : 1;
  static constexpr int kEach = 4 / kHalves;  // rows of a lane that are on their way
  using Row = uint4[kHalves];
  const StageRowsParams& p;
  int chunk;  // of 8 dims, of each half; some lanes may have none

  __device__ bool live() const { return kDim >= 8 * kLanes || chunk < kDim / 8; }

  __device__ void load(std::int64_t token, int head, bool wanted, Row& row) const {
    const std::int64_t at = token * p.token_stride + head * p.head_stride + 8 * chunk;
    const auto* const from = reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.rows) + at);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) row[h] = wanted && live() ? from[h * kHalfChunks] : uint4{};
  }
  __device__ void store(const Row& row, std::int64_t token, int head, bool wanted) const {
    float x[kHalves][8];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) unpack(row[h], p.type == DType::kBFloat16, x[h]);
    const int8_row::Row as = int8_row::row_of(largest_of_row(x, kLanes));
    if (!wanted || !live()) return;
    auto* const to = reinterpret_cast<uint2*>(p.out + (token * p.heads + head) * kDim + 8 * chunk);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (float& v : x[h]) v *= as.inverse;
      to[h * kHalfChunks] = int8_codes(x[h]);
    }
    if (chunk == 0) p.scales[head * p.tokens + token] = as.scale;
  }
  __device__ void run() const {
    const std::int64_t tokens = min(p.tokens, static_cast<std::int64_t>(*p.used));
    const std::int64_t rows = tokens * p.heads, across = std::int64_t{gridDim.x} * (kThreads / kLanes);
    const std::int64_t first = std::int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
    const std::int64_t tokens_across = across / p.heads;
    const int heads_across = static_cast<int>(across % p.heads);
    std::int64_t token = first / p.heads;
    int head = static_cast<int>(first % p.heads);
    // All lanes of a warp stay as long as its first row is one.
#pragma unroll 1
    for (std::int64_t row = first; row - threadIdx.x % 32 / kLanes < rows; row += kEach * across) {
      Row x[kEach];
      std::int64_t own_token[kEach];
      int own_head[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        own_token[i] = token, own_head[i] = head;
        load(token, head, row + i * across < rows, x[i]);
        token += tokens_across, head += heads_across;
        if (head >= p.heads) head -= p.heads, ++token;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) store(x[i], own_token[i], own_head[i], row + i * across < rows);
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kThreads, kCtas) stage_rows(const __grid_constant__ StageRowsParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  using Stager = RowStager<kDim>;
  Stager{p, static_cast<int>(threadIdx.x % Stager::kLanes)}.run();
}

struct Kernel {
  const void* function;
  int lanes, each;
};
template <int kDim>
Kernel kernel_of() {
  return {reinterpret_cast<const void*>(&stage_rows<kDim>), RowStager<kDim>::kLanes, RowStager<kDim>::kEach};
}

}  // namespace

int launch_stage_rows(const StageRowsParams& p, void* stream) {
  const std::int64_t rows = p.tokens * p.heads;
  if (rows == 0) return cudaSuccess;
  const Kernel kernel = p.dim == 128   ? kernel_of<128>()
                        : p.dim == 192 ? kernel_of<192>()
                        : p.dim == 256 ? kernel_of<256>()
                                       : kernel_of<512>();
  const std::int64_t threads = kernel.each * kThreads;
  const std::int64_t wanted = (rows * kernel.lanes + threads - 1) / threads;
  unsigned blocks = 0;
  if (const cudaError_t status = limit_blocks(wanted, kCtas, blocks); status != cudaSuccess) return status;
  const void* argument = &p;
  return launch_early(kernel.function, dim3(blocks), dim3(kThreads), &argument, stream);
}

}  // namespace halftone::cuda
