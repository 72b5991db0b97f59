// The compiled kernels of decode: what the .cu files define and host.cc looks up.
#pragma once

#include "cuda/attention/compiled_kernel.h"

namespace halftone::cuda {

/// The slices in which kDecodeTable is compiled, one instances_*.cu each. They return null for rows of
/// another slice.
CompiledKernel decode_kernel_16bit(int row);
CompiledKernel decode_kernel_fp8(int row);
CompiledKernel decode_kernel_int8(int row);
CompiledKernel decode_kernel_int4(int row);
CompiledKernel decode_kernel_mixed8(int row);  // by the bits of V
CompiledKernel decode_kernel_mixed4(int row);
/// The universal kernel, for any format of K and V.
CompiledKernel universal_kernel(int head_dim, int v_dim);

}  // namespace halftone::cuda
