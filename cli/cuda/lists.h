// Lists of keys for the benchmarks in device memory, and what reads their records.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/cuda/read_kernels.h"
#include "cli/cuda/tensors.h"
#include "cli/options/problem.h"

namespace halftone::cli::cuda {

/// Random lists over a cache, one for each query, which its layers share; with ProblemShape::extra_top_k
/// second ones over a cache of their own.
struct DeviceLists {
  DeviceTensor first, second;
  DeviceCache extra;  ///< of the second lists

  /// Sets what run() takes of them.
  void give(AttentionArgs& args, int layer) const;
};

/// Lists of a latent cache. Throws ResourceExhausted where the device has no room for the second cache.
DeviceLists make_lists(const ProblemShape& shape, const std::vector<std::int64_t>& q_lengths,
                       const std::vector<std::int64_t>& kv_lengths, int layers, const DeviceCache& cache,
                       Device device);

/// A read of all that they name.
Gather gather_of(const DeviceCache& cache, const DeviceLists& lists, int layer);

}  // namespace halftone::cli::cuda
