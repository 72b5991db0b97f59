// The compiled kernels of dense latent attention.
#pragma once

#include "cuda/attention/host.h"

namespace halftone::cuda {

/// Of kLatentDenseTable. To be launched in clusters of the row's `blocks` thread blocks, one for each worker.
CompiledKernel latent_dense_kernel(int row);

}  // namespace halftone::cuda
