// The compiled kernels of latent attention for few heads: what the .cu files define and host code looks up.
#pragma once

#include "cuda/attention/compiled_kernel.h"

namespace halftone::cuda {

/// The slices in which kLatentFewTable is compiled, one instances_*.cu each. They return null for rows of
/// another slice.
CompiledKernel latent_few_kernel_fp8(int row);
CompiledKernel latent_few_kernel_apart(int row);
CompiledKernel latent_few_kernel_integers(int row);
CompiledKernel latent_few_kernel_bf16(int row);

}  // namespace halftone::cuda
