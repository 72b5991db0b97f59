#include "cli/cuda/gemm_kernel.h"

#include <cuda_runtime.h>

#include <array>

#include "cuda/device/cluster.h"
#include "cuda/device/ptx.h"

namespace halftone::cli::cuda {
namespace {

namespace ptx = halftone::cuda;

// A cluster computes 64 columns, each of its blocks half of the depth: of 4096 columns 128 blocks, one for
// nearly every multiprocessor, and no more of them would fit as clusters of four. A warp multiplies 32
// columns by an eighth of the depth.
constexpr int kBlocks = 2, kSlices = 4, kThreads = 256;
constexpr int kChunk = 32;  // of the depth: what a lane's loads of 16 bytes cover
constexpr int kInFlight = 4;
constexpr int kStride = kGemmColumns + 4;  // of partial sums, so that stores of a warp meet every bank once
static_assert(kGemmDepth == kBlocks * kSlices * kChunk * kInFlight);

__device__ float4 load_from(std::uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

/// kTiles: of 8 rows, for each block; the grid's y counts such groups. Weights are the operand with 16 rows.
/// A lane has 8 consecutive values of the depth where the instruction wants two and two, in both operands
/// alike.
template <int kTiles>
__global__ void __launch_bounds__(kThreads) multiply(const Gemm gemm) {
  extern __shared__ __align__(16) float partial[];  // [kSlices][8 kTiles][kStride]
  constexpr int kRows = 8 * kTiles, kAhead = kTiles > 1 ? 2 : kInFlight;
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int group = lane / 4, member = lane % 4, half = warp % 2, slice = warp / 2;
  const int rank = ptx::cluster_rank(), column = static_cast<int>(blockIdx.x) / kBlocks * kGemmColumns;
  const int row = static_cast<int>(blockIdx.y) * kRows;
  const int part = gemm.depth / (kBlocks * kSlices), chunks = part / kChunk;
  const std::int64_t first = (rank * kSlices + slice) * part + 8 * member;
  const auto* const weights = static_cast<const std::uint16_t*>(gemm.weights) + first +
                              std::int64_t{column + 32 * half + group} * gemm.depth;
  const auto* const x =
      static_cast<const std::uint16_t*>(gemm.x) + first + std::int64_t{row + group} * gemm.depth;
  uint4 a[kInFlight][4], b[kAhead][kTiles];
  const auto load_a = [&](uint4(&to)[4], int chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i] = __ldcs(reinterpret_cast<const uint4*>(weights + 8 * i * gemm.depth + chunk * kChunk));
    }
  };
  const auto load_b = [&](uint4(&to)[kTiles], int chunk) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      to[i] = row + 8 * i + group < gemm.rows
                  ? *reinterpret_cast<const uint4*>(x + 8 * i * gemm.depth + chunk * kChunk)
                  : uint4{};
    }
  };
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) load_a(a[i], i);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_b(b[i], i);
  float sums[2][kTiles][4] = {};
  for (int begin = 0; begin < chunks; begin += kInFlight) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint4(&w)[4] = a[i];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 v = b[i % kAhead][tile];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint4 low = w[2 * m], high = w[2 * m + 1];
          ptx::mma_bf16(sums[m][tile], {low.x, high.x, low.y, high.y}, v.x, v.y);
          ptx::mma_bf16(sums[m][tile], {low.z, high.z, low.w, high.w}, v.z, v.w);
        }
      }
      if (begin + i + kInFlight < chunks) load_a(a[i], begin + i + kInFlight);
      if (begin + i + kAhead < chunks) load_b(b[i % kAhead], begin + i + kAhead);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        partial[(slice * kRows + 8 * tile + 2 * member + e % 2) * kStride + 32 * half + 16 * m + group +
                e / 2 * 8] = sums[m][tile][e];
      }
    }
  }
  ptx::cluster_barrier();
  // A block adds up the columns of its rank, four at a time.
  constexpr int kOwn = kGemmColumns / kBlocks;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kOwn / 4; i += kThreads) {
    const int own_row = i / (kOwn / 4), own_column = rank * kOwn + i % (kOwn / 4) * 4;
    float4 sum{};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        const float4 more = load_from(ptx::cluster_address(
            ptx::shared_address(partial + (s * kRows + own_row) * kStride + own_column), block));
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
    }
    if (row + own_row >= gemm.rows) continue;
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(gemm.out) +
                              std::int64_t{row + own_row} * gemm.columns + column +
                              own_column) = {ptx::pack_bf16x2(sum.x, sum.y), ptx::pack_bf16x2(sum.z, sum.w)};
  }
  ptx::cluster_barrier();  // others have read what is here
}

template <int kTiles>
cudaError_t launch(const Gemm& gemm, cudaStream_t stream) {
  constexpr int kShared = kSlices * 8 * kTiles * kStride * static_cast<int>(sizeof(float));
  const auto kernel = multiply<kTiles>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kBlocks;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(gemm.columns / kGemmColumns * kBlocks),
                        static_cast<unsigned>((gemm.rows + 8 * kTiles - 1) / (8 * kTiles)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = attributes.size();
  return cudaLaunchKernelEx(&config, kernel, gemm);
}

}  // namespace

int launch_gemm(const Gemm& gemm, Stream stream) {
  if (gemm.rows < 1 || gemm.columns < 1 || gemm.columns % kGemmColumns != 0 || gemm.depth < 1 ||
      gemm.depth % kGemmDepth != 0) {
    return cudaErrorInvalidValue;
  }
  const auto on = static_cast<cudaStream_t>(stream);
  return gemm.rows <= 8 ? launch<1>(gemm, on) : launch<8>(gemm, on);
}

}  // namespace halftone::cli::cuda
