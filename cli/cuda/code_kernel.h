// A kernel that leaves nothing else in the instruction caches. Plain C++: the kernel is in code_kernel.cu.
#pragma once

#include "halftone/types.h"

namespace halftone::cli::cuda {

inline constexpr int kOtherCode = 256 * 1024;  // bytes, twice what an SM caches

/// Enqueues so many bytes of instructions on every SM. `sink` [4 bytes]: never written. Returns a
/// cudaError_t.
int launch_other_code(void* sink, Stream stream);

}  // namespace halftone::cli::cuda
