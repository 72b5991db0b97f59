// What clock the SMs ran at between two points of a stream. Plain C++: the kernel is in clock_kernel.cu.
#pragma once

#include <cstdint>

#include "halftone/types.h"

namespace halftone::cli::cuda {

/// An SM's counters at one point; 0: no block ran there.
struct ClockMark {
  std::uint64_t cycles;
  std::uint64_t nanoseconds;
};
inline constexpr int kMaxMarks = 256;  // numbers of SMs

/// Enqueues a kernel that writes the counters of the SMs to `marks` [kMaxMarks, 16-byte aligned], which are
/// 0. Returns a cudaError_t.
int launch_clock_marks(ClockMark* marks, Stream stream);

}  // namespace halftone::cli::cuda
