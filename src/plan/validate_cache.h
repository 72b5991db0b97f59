// User errors of the cache operations, found before any work.
#pragma once

#include <span>
#include <string_view>

#include "halftone/cache.h"
#include "plan/check_tensor.h"

namespace halftone::planning {

/// Which of the cache's index tensors an operation reads.
enum class CacheIndex : bool { kUnused, kTableAndLengths };

/// Checks spec, pages, static scales and, if used, block_table [batch, max_pages] and lengths [batch];
/// returns the layout. Reads tensor elements only of static scales on the CPU, which must be finite, positive
/// and within [2^-100, 2^119] so that 1 / scale is finite; on CUDA their values are the caller's
/// responsibility. Throws InvalidArgument or Unsupported.
PageLayout validate_cache(const PagedKv& cache, CacheIndex index);

/// K and V of new tokens, and where they stand for a rotary embedding.
struct Appended {
  const TensorView& k;
  const TensorView& v;
  const Rope& rope;
};

/// Checks shapes of what is appended, on whatever way, to a cache of this spec.
void check_appended(const KvCacheSpec& spec, Device device, const Appended& tokens);
/// Checks the offset and scale of a cache of such a spec, and their values on the CPU.
void check_channels(const ChannelTensors& channels, const KvCacheSpec& spec, Device device);

/// Throws InvalidArgument if an output overlaps the cache's scales, or the offset or scale of its channels.
void check_apart(std::span<const NamedTensor> outputs, const PagedKv& cache);

/// Checks everything about append() that shapes and addresses tell. The values of slots, lengths, table
/// entries, positions and inputs are the backend's to check. Throws InvalidArgument or Unsupported.
void validate_append(const PagedKv& cache, const AppendArgs& args);

/// Likewise for dequantize(). The outputs' first dimension is compared with sum(lengths) by the backend.
void validate_dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out);

/// Likewise for import_fbgemm_int4() and export_fbgemm_int4(). Returns the number of groups of a row.
int validate_fbgemm(const PagedKv& cache, KvPart which, const TensorView& rows, const TensorView& slots);

}  // namespace halftone::planning
