#include "cuda/latent/bf16/kernel.h"
#include "cuda/latent/bf16/kernels.h"

namespace halftone::cuda {
namespace {

template <int Row>
__global__ void __launch_bounds__(bf16::kThreads, 1)
    latent_bf16(const __grid_constant__ LatentBf16Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  bf16::bf16_worker<kLatentBf16Table[Row]>(params, *reinterpret_cast<bf16::Shared*>(shared_bytes));
}

}  // namespace

CompiledKernel latent_bf16_kernel(int row) {
  return find_kernel<kLatentBf16Table>(
      row, [](const auto&) { return true; },
      [](auto index) -> CompiledKernel {
        return {reinterpret_cast<const void*>(&latent_bf16<index>), sizeof(bf16::Shared), bf16::kThreads,
                kLatentBf16Table[index].blocks};
      });
}

}  // namespace halftone::cuda
