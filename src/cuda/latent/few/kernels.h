// The compiled kernels of latent attention for few heads: what the .cu files define and host code looks up.
#pragma once

#include "cuda/attention/compiled_kernel.h"

namespace halftone::cuda {

/// Of kLatentFewTable.
CompiledKernel latent_few_kernel(int row);

}  // namespace halftone::cuda
