#include "cuda/latent/few/instances.h"

#include <utility>

namespace halftone::cuda {

CompiledKernel latent_few_kernel(int row) {
  return [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
    CompiledKernel found;
    ((row == kRow ? (found = latent_few_kernel_of<kRow>(), 0) : 0), ...);
    return found;
  }
  (std::make_integer_sequence<int, static_cast<int>(kLatentFewTable.size())>{});
}

}  // namespace halftone::cuda
