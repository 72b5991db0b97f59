#include "cuda/latent/dense/kernel.h"
#include "cuda/latent/dense/kernels.h"

namespace halftone::cuda {
namespace {

template <int Row>
__global__ void __launch_bounds__(dense::kThreads, 1)
    latent_dense(const __grid_constant__ LatentDenseParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  dense::dense_worker<kLatentDenseTable[Row]>(params, *reinterpret_cast<dense::Shared*>(shared_bytes));
}

}  // namespace

CompiledKernel latent_dense_kernel(int row) {
  constexpr int kRows = static_cast<int>(kLatentDenseTable.size());
  return find_kernel<kRows>(row, [](auto index) -> CompiledKernel {
    return {reinterpret_cast<const void*>(&latent_dense<index>), sizeof(dense::Shared), dense::kThreads,
            kLatentDenseTable[index].blocks};
  });
}

}  // namespace halftone::cuda
