// Instantiates a slice of the rows of the prefill table. Included by the instances_*.cu files.
#pragma once

#include "cuda/prefill/kernel.h"
#include "cuda/prefill/kernels.h"

namespace halftone::cuda {

template <int Row>
__global__ void __launch_bounds__(PrefillTraits<kPrefillTable[Row]>::kThreads, 1)
    prefill(const __grid_constant__ PrefillParams params) {
  using Shared = typename PrefillTraits<kPrefillTable[Row]>::Shared;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  prefill_worker<kPrefillTable[Row]>(params, *reinterpret_cast<Shared*>(shared_bytes));
}

template <int Row, bool (*kWanted)(const PrefillConfig&)>
constexpr CompiledKernel prefill_kernel_of() {
  constexpr PrefillConfig kConfig = kPrefillTable[Row];
  if constexpr (is_built(kConfig) && kWanted(kConfig)) {
    using Traits = PrefillTraits<kConfig>;
    return {reinterpret_cast<const void*>(&prefill<Row>), sizeof(typename Traits::Shared), Traits::kThreads};
  } else {
    return {};
  }
}

/// The kernel of `row`, if it is one of those wanted.
template <bool (*kWanted)(const PrefillConfig&)>
CompiledKernel find_prefill_kernel(int row) {
  constexpr int kRows = static_cast<int>(kPrefillTable.size());
  return find_kernel<kRows>(row, [](auto index) { return prefill_kernel_of<index, kWanted>(); });
}

}  // namespace halftone::cuda
