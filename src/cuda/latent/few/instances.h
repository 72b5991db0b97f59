// Instantiates rows of kLatentFewTable.
#pragma once

#include "cuda/latent/few/kernel.h"
#include "cuda/latent/few/kernels.h"

namespace halftone::cuda {

template <int Row>
__global__ void __launch_bounds__(LatentFewTraits<kLatentFewTable[Row]>::kThreads, 1)
    latent_few(const __grid_constant__ AttentionParams params) {
  using Shared = typename LatentFewTraits<kLatentFewTable[Row]>::Shared;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  latent_few_worker<kLatentFewTable[Row]>(params, blockIdx.x, *reinterpret_cast<Shared*>(shared_bytes));
}

template <int Row>
constexpr CompiledKernel latent_few_kernel_of() {
  using Traits = LatentFewTraits<kLatentFewTable[Row]>;
  static_assert(sizeof(typename Traits::Shared) <= Traits::kMaxShared);
  return {reinterpret_cast<const void*>(&latent_few<Row>), sizeof(typename Traits::Shared), Traits::kThreads};
}

/// The kernel of a row if the slice of `kCodes` has it.
template <LatentCodes... kCodes>
CompiledKernel find_latent_few_kernel(int row) {
  constexpr int kRows = static_cast<int>(kLatentFewTable.size());
  return find_kernel<kRows>(row, [](auto index) -> CompiledKernel {
    if constexpr (((kLatentFewTable[index].codes == kCodes) || ...)) return latent_few_kernel_of<index>();
    return {};
  });
}

}  // namespace halftone::cuda
