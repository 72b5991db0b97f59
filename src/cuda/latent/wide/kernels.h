// The compiled kernels of latent attention for many heads.
#pragma once

#include "cuda/attention/compiled_kernel.h"

namespace halftone::cuda {

/// Of kLatentWideTable. To be launched in clusters of the row's `blocks` thread blocks, one for each worker.
CompiledKernel latent_wide_kernel(int row);

}  // namespace halftone::cuda
