#include "cuda/latent/few/instances.h"

namespace halftone::cuda {

CompiledKernel latent_few_kernel_fp8(int row) { return find_latent_few_kernel<LatentCodes::kFp8>(row); }

}  // namespace halftone::cuda
