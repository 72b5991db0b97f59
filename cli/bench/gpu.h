// `halftone bench` on a GPU: the library through its public API on device memory, beside plain reads of as
// many bytes. cli/cuda/ defines it, or cli/without_cuda/ in builds that lack the CUDA backend.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench/cpu.h"

namespace halftone::cli {

class GpuBench {
 public:
  GpuBench() = default;
  virtual ~GpuBench() = default;
  GpuBench(const GpuBench&) = delete;
  GpuBench& operator=(const GpuBench&) = delete;

  /// Measures one case and its ceiling. Throws Error: kUnsupported where the backend has no kernel,
  /// kResourceExhausted where device memory is too small.
  virtual BenchRow run(const BenchCase& setup) = 0;

  /// Name, driver, clocks under load and memory of the device, and what an empty kernel measures.
  virtual nlohmann::ordered_json describe() = 0;
};

/// Takes the device and 256 MiB of its memory for flushing L2. `repeats`: timed calls of a case, 0 for the
/// default of 25. `cold_code`: each comes after other instructions, and finds none of its own in a cache.
/// Throws Error when the device does not work, or the build lacks the CUDA backend.
std::unique_ptr<GpuBench> gpu_bench(int device, int repeats, bool cold_code);

}  // namespace halftone::cli
