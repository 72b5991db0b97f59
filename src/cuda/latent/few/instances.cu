#include "cuda/latent/few/kernel.h"
#include "cuda/latent/few/kernels.h"

namespace halftone::cuda {
namespace {

template <int Row>
__global__ void __launch_bounds__(LatentFewTraits<kLatentFewTable[Row]>::kThreads, 1)
    latent_few(const __grid_constant__ LatentFewParams params) {
  using Shared = typename LatentFewTraits<kLatentFewTable[Row]>::Shared;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  latent_few_worker<kLatentFewTable[Row]>(params, blockIdx.x, *reinterpret_cast<Shared*>(shared_bytes));
}

}  // namespace

CompiledKernel latent_few_kernel(int row) {
  return find_kernel<kLatentFewTable>(
      row, [](const auto&) { return true; },
      [](auto index) -> CompiledKernel {
        using Traits = LatentFewTraits<kLatentFewTable[index]>;
        static_assert(sizeof(typename Traits::Shared) <= Traits::kMaxShared);
        return {reinterpret_cast<const void*>(&latent_few<index>), sizeof(typename Traits::Shared),
                Traits::kThreads};
      });
}

}  // namespace halftone::cuda
