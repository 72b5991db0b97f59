// The flush of L2 before a timed call leaves nothing of what the call reads, however it reads.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "cli/cuda/device.h"
#include "cuda/device/ptx.h"

namespace halftone::cli::cuda {
namespace {

constexpr int kPieces = 64, kPieceBytes = 1024, kBlocks = 128;
constexpr std::int64_t kBytes = std::int64_t{kBlocks} * kPieces * kPieceBytes;  // 8 MiB, less than any L2

/// A block's part by bulk copies or by cp.async, with no hint.
template <bool kBulk>
__global__ void __launch_bounds__(128) copy_parts(const std::uint8_t* from) {
  extern __shared__ __align__(128) std::uint8_t to[];
  __shared__ std::uint64_t full;
  namespace ptx = halftone::cuda;
  const std::uint8_t* const own = from + std::int64_t{blockIdx.x} * kPieces * kPieceBytes;
  const std::uint32_t barrier = ptx::shared_address(&full);
  if (threadIdx.x == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::fence_async_shared();
    if (kBulk) ptx::barrier_expect_bytes(barrier, kPieces * kPieceBytes);
  }
  __syncthreads();
  if constexpr (kBulk) {
    if (threadIdx.x < kPieces) {
      const int at = static_cast<int>(threadIdx.x) * kPieceBytes;
      ptx::bulk_load(ptx::shared_address(to + at), own + at, kPieceBytes, barrier);
    }
    ptx::barrier_wait(barrier, 0);
  } else {
    for (int at = static_cast<int>(threadIdx.x) * 16; at < kPieces * kPieceBytes; at += 128 * 16) {
      ptx::copy_async(ptx::shared_address(to + at), own + at, 16);
    }
    ptx::copy_async_wait();
  }
}

template <bool kBulk>
void expect_cold() {
  const auto kernel = copy_parts<kBulk>;
  constexpr int kShared = kPieces * kPieceBytes;
  ASSERT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), cudaSuccess);
  constexpr int kCalls = 200;  // each with bytes of its own
  const DeviceBuffer data(kCalls * kBytes);
  Timer timer;
  const auto copy = [&](std::int64_t call, Stream stream) {
    kernel<<<kBlocks, 128, kShared, static_cast<cudaStream_t>(stream)>>>(data.data() +
                                                                         call % kCalls * kBytes);
  };
  std::int64_t call = 0;
  const double fresh = timer.median_us(51, [&](Stream s) { copy(call++, s); });
  const double again = timer.median_us(51, [&](Stream s) { copy(0, s); });
  const double both = timer.median_us(51, [&](Stream s) { copy(0, s), copy(0, s); });
  EXPECT_LT(both - again, 0.85 * fresh) << "what has just been read should come sooner";
  EXPECT_GT(again, 0.82 * fresh);  // pages looked up before come a little sooner
}

TEST(DeviceFlush, LeavesNothingOfBulkCopies) { expect_cold<true>(); }
TEST(DeviceFlush, LeavesNothingOfAsyncCopies) { expect_cold<false>(); }

}  // namespace
}  // namespace halftone::cli::cuda
