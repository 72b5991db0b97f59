// Kernels that only read memory: what they reach on a number of bytes, or on the records that lists name, is
// the ceiling of a kernel that must read as many, or the same ones. Plain C++: the kernels are in
// read_kernels.cu.
#pragma once

#include <cstdint>

#include "halftone/types.h"

namespace halftone::cli::cuda {

/// Different ways to keep many reads in flight; which is best depends on the number of bytes.
int read_kernel_count();
/// "loads: 4 in flight, 4 x 512 threads per SM".
const char* read_kernel_name(int kernel);

/// Enqueues a read of `bytes` (the rest of a division by 16 is left out) at `data` (16-byte aligned).
/// `sink` [16 bytes] keeps the compiler from dropping the loads. Returns a cudaError_t.
int launch_read(int kernel, const void* data, std::int64_t bytes, void* sink, Stream stream);

/// Records of a latent cache that lists name.
struct GatherList {
  const std::uint8_t* pages = nullptr;  ///< 16-byte aligned
  const std::int32_t* slots = nullptr;  ///< page * page_size + offset; a negative one names nothing
  std::int64_t places = 0;              ///< of the lists of all queries together
};

/// What a gather reads: the records of one or two lists, and what each token has behind the page's records.
struct Gather {
  GatherList first, second;     ///< the second one may have no places
  std::int64_t page_bytes = 0;  ///< from a page to the next, of both caches
  int page_size = 0;            ///< tokens
  int record_bytes = 0;         ///< a multiple of 16, at most kMaxRecordBytes
  int apart_bytes = 0;          ///< of a token behind the records: a multiple of 8
};
inline constexpr int kMaxRecordBytes = 1536;

/// As read kernels, "gather: 4 records per warp".
int gather_kernel_count();
const char* gather_kernel_name(int kernel);

/// Enqueues a read of what `gather` names, into registers and nothing else. A thread whose words read so far
/// add up to kSinkMark (each word of 16 bytes as the exclusive or of its four parts) writes that to `sink`:
/// else the compiler could drop the loads. Returns a cudaError_t.
inline constexpr std::uint32_t kSinkMark = 0x9e3779b9U;
int launch_gather(int kernel, const Gather& gather, void* sink, Stream stream);

/// Enqueues a read that replaces what L2 holds: like launch_read, with plain loads and no cache hints.
int launch_flush(const void* data, std::int64_t bytes, void* sink, Stream stream);

/// Enqueues a kernel that does nothing.
int launch_nothing(Stream stream);

}  // namespace halftone::cli::cuda
