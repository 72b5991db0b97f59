#include "cli/cuda/read_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "cuda/device/ptx.h"

namespace halftone::cli::cuda {
namespace {

namespace ptx = halftone::cuda;

__device__ uint4 load16(const uint4* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

/// Every thread has kInFlight loads under way; the grid covers `count` 16-byte words in as many rounds as it
/// takes. kNear: a block's words of one round are adjacent; else each of a thread's loads is a stream of its
/// own.
template <int kInFlight, bool kNear>
__global__ void __launch_bounds__(1024)
    read_by_threads(const uint4* data, std::int64_t count, std::uint32_t* sink) {
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t step = kNear ? blockDim.x : threads;
  std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x * (kNear ? kInFlight : 1) + threadIdx.x;
  std::uint32_t sum = 0;
  for (; i < count; i += kInFlight * threads) {
    uint4 x[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      x[k] = i + k * step < count ? load16(data + i + k * step) : uint4{};
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
  }
  if (sum == 0x9e3779b9U) *sink = sum;
}

/// One thread of a block copies its share into a ring in shared memory that nobody reads. kNear: the blocks
/// take chunks in turn; else a block's share is one range.
template <int kStages, int kChunk, bool kNear>
__global__ void __launch_bounds__(32) read_by_bulk_copies(const uint4* data, std::int64_t count) {
  extern __shared__ __align__(128) std::uint8_t ring[];
  __shared__ std::uint64_t arrived[kStages];
  if (threadIdx.x != 0) return;
  for (int s = 0; s < kStages; ++s) ptx::barrier_init(ptx::shared_address(&arrived[s]), 1);
  ptx::fence_async_shared();
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
  const std::int64_t begin = kNear ? std::int64_t{blockIdx.x} * kChunk : count * blockIdx.x / gridDim.x * 16;
  const std::int64_t end = kNear ? count * 16 : count * (blockIdx.x + 1) / gridDim.x * 16;
  const std::int64_t step = kNear ? std::int64_t{gridDim.x} * kChunk : kChunk;
  const std::uint64_t hint = ptx::evict_first_policy();
  std::int64_t issued = begin;
  int stage = 0;
  const auto issue = [&] {
    if (issued >= end) return;
    const int size = static_cast<int>(min(std::int64_t{kChunk}, end - issued));
    ptx::barrier_expect_bytes(ptx::shared_address(&arrived[stage]), size);
    ptx::bulk_load(ptx::shared_address(ring + stage * kChunk), bytes + issued, size,
                   ptx::shared_address(&arrived[stage]), hint);
    issued += step;
  };
  for (stage = 0; stage < kStages; ++stage) issue();
  stage = 0;
  std::uint32_t parity = 0;
  for (std::int64_t landed = begin; landed < end; landed += step) {
    ptx::barrier_wait(ptx::shared_address(&arrived[stage]), parity);
    issue();
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__global__ void nothing() {}

int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

struct Words {
  const uint4* data;
  std::int64_t count;
  std::uint32_t* sink;
};

/// kBlocksPerSm 0: as many blocks as one round needs.
template <int kInFlight, int kThreads, int kBlocksPerSm, bool kNear>
void by_threads(const Words& words, cudaStream_t stream) {
  constexpr std::int64_t kRound = std::int64_t{kInFlight} * kThreads;
  const std::int64_t rounds = std::max<std::int64_t>(1, (words.count + kRound - 1) / kRound);
  const std::int64_t blocks =
      kBlocksPerSm == 0 ? rounds : std::min<std::int64_t>(rounds, kBlocksPerSm * multiprocessors());
  read_by_threads<kInFlight, kNear>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(words.data, words.count, words.sink);
}

template <int kStages, int kChunk, int kBlocksPerSm, bool kNear>
void by_bulk_copies(const Words& words, cudaStream_t stream) {
  const auto kernel = read_by_bulk_copies<kStages, kChunk, kNear>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kChunk);
  kernel<<<static_cast<unsigned>(kBlocksPerSm * multiprocessors()), 32, kStages * kChunk, stream>>>(
      words.data, words.count);
}

struct Kernel {
  const char* name;
  void (*launch)(const Words&, cudaStream_t);
};

constexpr bool kNear = true, kFar = false;

constexpr std::array kKernels{
    Kernel{"loads: 4 in flight, 4 x 512 threads per SM", by_threads<4, 512, 4, kFar>},
    Kernel{"loads: 4 in flight, 4 x 512 threads per SM, adjacent", by_threads<4, 512, 4, kNear>},
    Kernel{"loads: 8 in flight, 2 x 1024 threads per SM", by_threads<8, 1024, 2, kFar>},
    Kernel{"loads: 8 in flight, 2 x 1024 threads per SM, adjacent", by_threads<8, 1024, 2, kNear>},
    Kernel{"loads: 4 per thread, blocks of 256", by_threads<4, 256, 0, kFar>},
    Kernel{"loads: 4 per thread, blocks of 256, adjacent", by_threads<4, 256, 0, kNear>},
    Kernel{"loads: 8 per thread, blocks of 256", by_threads<8, 256, 0, kFar>},
    Kernel{"loads: 8 per thread, blocks of 256, adjacent", by_threads<8, 256, 0, kNear>},
    Kernel{"loads: 4 per thread, blocks of 1024, adjacent", by_threads<4, 1024, 0, kNear>},
    Kernel{"bulk copies: 6 x 32 KiB per SM", by_bulk_copies<6, 32768, 1, kFar>},
    Kernel{"bulk copies: 12 x 16 KiB per SM, adjacent", by_bulk_copies<12, 16384, 1, kNear>},
    Kernel{"bulk copies: 24 x 4 KiB per SM", by_bulk_copies<24, 4096, 1, kFar>},
    Kernel{"bulk copies: 24 x 4 KiB per SM, adjacent", by_bulk_copies<24, 4096, 1, kNear>},
    Kernel{"bulk copies: 4 x 6 x 8 KiB per SM, adjacent", by_bulk_copies<6, 8192, 4, kNear>},
};

Words words_of(const void* data, std::int64_t bytes, void* sink) {
  return {static_cast<const uint4*>(data), bytes / 16, static_cast<std::uint32_t*>(sink)};
}

}  // namespace

int read_kernel_count() { return static_cast<int>(kKernels.size()); }

const char* read_kernel_name(int kernel) { return kKernels[static_cast<std::size_t>(kernel)].name; }

int launch_read(int kernel, const void* data, std::int64_t bytes, void* sink, Stream stream) {
  kKernels[static_cast<std::size_t>(kernel)].launch(words_of(data, bytes, sink),
                                                    static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int launch_flush(const void* data, std::int64_t bytes, void* sink, Stream stream) {
  by_threads<4, 512, 4, kFar>(words_of(data, bytes, sink), static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int launch_nothing(Stream stream) {
  nothing<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  return cudaGetLastError();
}

}  // namespace halftone::cli::cuda
