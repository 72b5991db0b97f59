#include "cli/cuda/read_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "cuda/device/ptx.h"

namespace halftone::cli::cuda {
namespace {

namespace ptx = halftone::cuda;

constexpr int kGatherThreads = 256;  // of a block

/// kStay: the line takes its place in L2 like any other. Else it is the first to leave, and displaces no line
/// that copies to shared memory brought there.
template <bool kStay>
__device__ uint4 load16(const uint4* p) {
  if constexpr (kStay) return *p;
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

/// Every thread has kInFlight loads under way; the grid covers `count` 16-byte words in as many rounds as it
/// takes. kNear: a block's words of one round are adjacent; else each of a thread's loads is a stream of its
/// own.
template <int kInFlight, bool kNear, bool kStay>
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
      x[k] = i + k * step < count ? load16<kStay>(data + i + k * step) : uint4{};
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
  }
  if (sum == kSinkMark) *sink = sum;
}

/// Where a record and what its token has apart lie; null: nowhere.
struct Place {
  const uint4* record = nullptr;
  const uint2* apart = nullptr;
};

__device__ std::int32_t slot_at(const Gather& gather, std::int64_t place) {
  const GatherList &first = gather.first, &second = gather.second;
  if (place < first.places) return __ldg(first.slots + place);
  place -= first.places;
  return place < second.places ? __ldg(second.slots + place) : -1;
}

__device__ Place place_of(const Gather& gather, std::int64_t place, std::int32_t slot) {
  if (slot < 0) return {};
  const std::uint8_t* const pages = place < gather.first.places ? gather.first.pages : gather.second.pages;
  const int number = slot / gather.page_size, offset = slot % gather.page_size;
  const std::uint8_t* const page = pages + number * gather.page_bytes;
  return {reinterpret_cast<const uint4*>(page + offset * gather.record_bytes),
          reinterpret_cast<const uint2*>(page + gather.page_size * gather.record_bytes +
                                         offset * gather.apart_bytes)};
}

/// A warp reads kRecords records at a time, all of their words under way at once, a lane every 32nd word of
/// each; the next slots are read meanwhile. Where there is nothing to read a load has another one's address,
/// since the compiler waits for what loads under a condition bring: that of the record's last word or,
/// without a record, that of the sink.
template <int kRounds, int kRecords>
__global__ void __launch_bounds__(kGatherThreads) gather_records(const Gather gather, std::uint32_t* sink) {
  const int lane = static_cast<int>(threadIdx.x % 32), last = gather.record_bytes / 16 - 1;
  const std::int64_t places = gather.first.places + gather.second.places;
  const std::int64_t warp = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x / 32 * kRecords;
  const auto own_slot = [&](std::int64_t place) { return lane < kRecords ? slot_at(gather, place) : -1; };
  std::uint32_t sum = 0;
  std::int64_t place = warp * kRecords + lane;  // whose slot this lane reads
  std::int32_t slot = own_slot(place);
  for (; place - lane < places; place += step) {
    const Place own = place_of(gather, place, slot);
    uint4 x[kRecords][kRounds];
#pragma unroll
    for (int r = 0; r < kRecords; ++r) {
      const auto* const record = reinterpret_cast<const uint4*>(
          __shfl_sync(~0U, reinterpret_cast<unsigned long long>(own.record), r));
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        x[r][i] = load16<false>(record == nullptr ? reinterpret_cast<const uint4*>(sink)
                                                  : record + min(32 * i + lane, last));
      }
    }
    slot = own_slot(place + step);
#pragma unroll 1
    for (int i = 0; own.apart != nullptr && i < gather.apart_bytes / 8; ++i) {
      const uint2 apart = __ldg(own.apart + i);
      sum += apart.x ^ apart.y;
    }
#pragma unroll
    for (int r = 0; r < kRecords; ++r) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) sum += x[r][i].x ^ x[r][i].y ^ x[r][i].z ^ x[r][i].w;
    }
    if (sum == kSinkMark) *sink = sum;
  }
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
template <int kInFlight, int kThreads, int kBlocksPerSm, bool kNear, bool kStay = false>
void by_threads(const Words& words, cudaStream_t stream) {
  constexpr std::int64_t kRound = std::int64_t{kInFlight} * kThreads;
  const std::int64_t rounds = std::max<std::int64_t>(1, (words.count + kRound - 1) / kRound);
  const std::int64_t blocks =
      kBlocksPerSm == 0 ? rounds : std::min<std::int64_t>(rounds, kBlocksPerSm * multiprocessors());
  read_by_threads<kInFlight, kNear, kStay>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(words.data, words.count, words.sink);
}

template <int kStages, int kChunk, int kBlocksPerSm, bool kNear>
void by_bulk_copies(const Words& words, cudaStream_t stream) {
  const auto kernel = read_by_bulk_copies<kStages, kChunk, kNear>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kChunk);
  kernel<<<static_cast<unsigned>(kBlocksPerSm * multiprocessors()), 32, kStages * kChunk, stream>>>(
      words.data, words.count);
}

/// kBlocksPerSm 0: as many blocks as read every record at once.
template <int kRecords, int kBlocksPerSm>
void gather_by(const Gather& gather, std::uint32_t* sink, cudaStream_t stream) {
  constexpr std::int64_t kRound = kRecords * kGatherThreads / 32;
  const std::int64_t places = gather.first.places + gather.second.places;
  const std::int64_t rounds = std::max<std::int64_t>(1, (places + kRound - 1) / kRound);
  const auto blocks = static_cast<unsigned>(
      kBlocksPerSm == 0 ? rounds : std::min<std::int64_t>(rounds, kBlocksPerSm * multiprocessors()));
  const auto kernel = gather.record_bytes <= 512    ? gather_records<1, kRecords>
                      : gather.record_bytes <= 1024 ? gather_records<2, kRecords>
                                                    : gather_records<3, kRecords>;
  kernel<<<blocks, kGatherThreads, 0, stream>>>(gather, sink);
}

struct GatherKernel {
  const char* name;
  void (*launch)(const Gather&, std::uint32_t*, cudaStream_t);
};

constexpr std::array kGathers{
    GatherKernel{"gather: 1 record per warp", gather_by<1, 0>},
    GatherKernel{"gather: 2 records per warp", gather_by<2, 0>},
    GatherKernel{"gather: 4 records per warp", gather_by<4, 0>},
    GatherKernel{"gather: 8 records per warp", gather_by<8, 0>},
    GatherKernel{"gather: 2 records at a time per warp, 48 warps per SM", gather_by<2, 6>},
    GatherKernel{"gather: 4 records at a time per warp, 32 warps per SM", gather_by<4, 4>},
    GatherKernel{"gather: 8 records at a time per warp, 16 warps per SM", gather_by<8, 2>},
};

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

int gather_kernel_count() { return static_cast<int>(kGathers.size()); }

const char* gather_kernel_name(int kernel) { return kGathers[static_cast<std::size_t>(kernel)].name; }

int launch_gather(int kernel, const Gather& gather, void* sink, Stream stream) {
  if (gather.record_bytes > kMaxRecordBytes) return cudaErrorInvalidValue;
  kGathers[static_cast<std::size_t>(kernel)].launch(gather, static_cast<std::uint32_t*>(sink),
                                                    static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int launch_flush(const void* data, std::int64_t bytes, void* sink, Stream stream) {
  constexpr bool kStay = true;
  by_threads<4, 512, 4, kFar, kStay>(words_of(data, bytes, sink), static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int launch_nothing(Stream stream) {
  nothing<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  return cudaGetLastError();
}

}  // namespace halftone::cli::cuda
