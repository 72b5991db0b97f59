#include "cuda/latent/few/instances.h"

namespace halftone::cuda {

CompiledKernel latent_few_kernel_integers(int row) {
  return find_latent_few_kernel<LatentCodes::kInt8, LatentCodes::kInt4>(row);
}

}  // namespace halftone::cuda
