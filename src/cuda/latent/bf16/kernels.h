// The compiled kernels of latent attention for many heads over bf16.
#pragma once

#include "cuda/attention/compiled_kernel.h"

namespace halftone::cuda {

/// Of kLatentBf16Table. To be launched in clusters of the row's `blocks` thread blocks, one for each worker.
CompiledKernel latent_bf16_kernel(int row);

}  // namespace halftone::cuda
