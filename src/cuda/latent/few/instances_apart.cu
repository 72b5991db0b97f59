#include "cuda/latent/few/instances.h"

namespace halftone::cuda {

CompiledKernel latent_few_kernel_apart(int row) {
  return find_latent_few_kernel<LatentCodes::kFp8Apart>(row);
}

}  // namespace halftone::cuda
