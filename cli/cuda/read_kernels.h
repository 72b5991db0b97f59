// Kernels that only read memory: what they reach on a number of bytes is the ceiling of a kernel that must
// read as many. Plain C++: the kernels are in read_kernels.cu.
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

/// Enqueues a read that replaces what L2 holds: like launch_read, with plain loads and no cache hints.
int launch_flush(const void* data, std::int64_t bytes, void* sink, Stream stream);

/// Enqueues a kernel that does nothing.
int launch_nothing(Stream stream);

}  // namespace halftone::cli::cuda
