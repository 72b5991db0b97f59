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

template <int Row>
constexpr CompiledKernel prefill_kernel_of() {
  using Traits = PrefillTraits<kPrefillTable[Row]>;
  return {reinterpret_cast<const void*>(&prefill<Row>), sizeof(typename Traits::Shared), Traits::kThreads};
}

/// The kernel of `row`, if it is built and one of those wanted.
template <bool (*kWanted)(const PrefillConfig&)>
CompiledKernel find_prefill_kernel(int row) {
  return find_kernel<kPrefillTable>(
      row, [](const PrefillConfig& c) { return is_built(c) && kWanted(c); },
      [](auto index) { return prefill_kernel_of<index>(); });
}

}  // namespace halftone::cuda
