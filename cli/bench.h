// Timing the library on this machine: the measurements behind `halftone bench`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/problem.h"

namespace halftone::cli {

enum class Suite { kDecode, kPrefill, kAppend };

struct BenchCase {
  Suite suite = Suite::kDecode;
  ProblemShape shape;
};

struct BenchRow {
  BenchCase setup;
  double us = 0;           ///< median of one call
  std::int64_t bytes = 0;  ///< least traffic of one call: Floor::bytes(), or what append reads and writes
  double gbs = 0;          ///< bytes / us
  double gflops = 0;       ///< attention only
  int repeats = 0;
  int copies = 0;     ///< distinct caches that the calls go through in turn
  bool cold = false;  ///< together they exceed twice the last-level cache
};

/// Reads much more memory than the caches hold, on all OpenMP threads; GB/s (10^9), best of several passes.
double measure_read_bandwidth();

/// Runs one case; `repeats` 0 means for half a second, at least 5 times.
BenchRow run_case(const BenchCase& setup, int repeats);

}  // namespace halftone::cli
