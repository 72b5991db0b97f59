#include "cuda/latent/few/instances.h"

namespace halftone::cuda {

CompiledKernel latent_few_kernel(int row) {
  constexpr int kRows = static_cast<int>(kLatentFewTable.size());
  return find_kernel<kRows>(row, [](auto index) { return latent_few_kernel_of<index>(); });
}

}  // namespace halftone::cuda
