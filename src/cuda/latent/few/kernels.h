// The compiled kernels of latent attention for few heads: what instances.cu defines and host code looks up.
#pragma once

#include "cuda/attention/host.h"

namespace halftone::cuda {

/// Of a row of kLatentFewTable.
CompiledKernel latent_few_kernel(int row);

}  // namespace halftone::cuda
