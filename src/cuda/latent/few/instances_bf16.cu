#include "cuda/latent/few/instances.h"

namespace halftone::cuda {

CompiledKernel latent_few_kernel_bf16(int row) { return find_latent_few_kernel<LatentCodes::kBf16>(row); }

}  // namespace halftone::cuda
