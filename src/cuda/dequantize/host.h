// dequantize() on CUDA, for arguments that planning::validate_dequantize has accepted.
#pragma once

#include "halftone/cache.h"

namespace halftone::cuda {

/// Throws InvalidArgument if the outputs differ in rows. sum(lengths) is not known to the host: surplus rows
/// become zeros, surplus tokens are left out.
void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream);

}  // namespace halftone::cuda
