// dequantize() on CUDA, for arguments that planning::validate_dequantize has accepted.
#pragma once

#include "cuda/dequantize/params.h"

namespace halftone::cuda {

/// What a kernel receives that reads a span of K or V. `out`: the span's dims.
DequantizeParams dequantize_params(const PagedKv& cache, const PageLayout& layout, const page::Part& part,
                                   const StaticScale& scale, const TensorView& out);

/// Throws InvalidArgument if the outputs differ in rows. sum(lengths) is not known to the host: surplus rows
/// become zeros, surplus tokens are left out.
void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream);

}  // namespace halftone::cuda
