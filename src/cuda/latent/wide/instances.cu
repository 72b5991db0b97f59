#include "cuda/latent/wide/kernel.h"
#include "cuda/latent/wide/kernels.h"

namespace halftone::cuda {
namespace {

template <int Row>
__global__ void __launch_bounds__(wide::kThreads, 1)
    latent_wide(const __grid_constant__ LatentWideParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  wide::wide_worker<kLatentWideTable[Row]>(params, *reinterpret_cast<wide::Shared*>(shared_bytes));
}

}  // namespace

CompiledKernel latent_wide_kernel(int row) {
  return find_kernel<kLatentWideTable>(
      row, [](const auto&) { return true; },
      [](auto index) -> CompiledKernel {
        return {reinterpret_cast<const void*>(&latent_wide<index>), sizeof(wide::Shared), wide::kThreads,
                kLatentWideTable[index].blocks};
      });
}

}  // namespace halftone::cuda
