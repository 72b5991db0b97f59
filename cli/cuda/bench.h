// `halftone bench` on the GPU: the library through its public API on device memory, beside plain reads of as
// many bytes.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench/cpu.h"

namespace halftone::cli::cuda {

class Bench {
 public:
  /// Takes the device and 256 MiB of its memory for flushing L2. `repeats`: timed calls of a case, 0 for the
  /// default of 25. Throws Error when the device does not work.
  Bench(int device, int repeats);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// Measures one case and its ceiling. Throws Error: kUnsupported where the backend has no kernel,
  /// kResourceExhausted where device memory is too small.
  BenchRow run(const BenchCase& setup);

  /// Name, driver, clocks under load and memory of the device, and what an empty kernel measures.
  nlohmann::ordered_json describe();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halftone::cli::cuda
