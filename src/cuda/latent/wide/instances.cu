#include <utility>

#include "cuda/latent/wide/kernel.h"
#include "cuda/latent/wide/kernels.h"

namespace halftone::cuda {
namespace {

template <int Row>
__global__ void __launch_bounds__(wide::kThreads, 1)
    latent_wide(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  wide::wide_worker<kLatentWideTable[Row]>(params, *reinterpret_cast<wide::Shared*>(shared_bytes));
}

}  // namespace

CompiledKernel latent_wide_kernel(int row) {
  constexpr int kRows = static_cast<int>(kLatentWideTable.size());
  return [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
    CompiledKernel found;
    ((row == kRow
          ? (found = {reinterpret_cast<const void*>(&latent_wide<kRow>),
                      static_cast<int>(sizeof(wide::Shared)), wide::kThreads, kLatentWideTable[kRow].blocks},
             0)
          : 0),
     ...);
    return found;
  }
  (std::make_integer_sequence<int, kRows>{});
}

}  // namespace halftone::cuda
