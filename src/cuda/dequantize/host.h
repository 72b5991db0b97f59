// dequantize() on CUDA, for arguments that planning::validate_dequantize has accepted.
#pragma once

#include "halftone/cache.h"

namespace halftone::cuda {

/// Rows of K or V: the first lengths[i] tokens of every request, one request after the other. `lengths`
/// (int32 [batch]) is on the device. Only of a cache that stores K and V apart, or of some of its heads;
/// rotations are undone, tokens of missing pages are zeros, those beyond `out` left out.
void stage_rows(const PagedKv& cache, const PageLayout& layout, KvPart which, const std::int32_t* lengths,
                const TensorView& out, Stream stream);

/// Throws InvalidArgument if the outputs differ in rows. sum(lengths) is not known to the host: surplus rows
/// become zeros, surplus tokens are left out.
void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream);

}  // namespace halftone::cuda
