// Instantiates a slice of the rows of the decode table. Included by the instances_*.cu files.
#pragma once

#include "cuda/decode/config.h"
#include "cuda/decode/kernel.h"
#include "cuda/decode/kernels.h"
#include "cuda/decode/rows/kernel.h"

namespace halftone::cuda {

template <int Row>
__global__ void __launch_bounds__(DecodeTraits<kDecodeTable[Row]>::kThreads, 1)
    decode(const __grid_constant__ DecodeParams params) {
  using Shared = typename DecodeTraits<kDecodeTable[Row]>::Shared;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  decode_worker<kDecodeTable[Row]>(params, blockIdx.x, *reinterpret_cast<Shared*>(shared_bytes));
}

template <int Row>
__global__ void __launch_bounds__(DecodeRowsTraits<kDecodeTable[Row]>::kThreads, 1)
    decode_rows(const __grid_constant__ DecodeParams params) {
  using Shared = typename DecodeRowsTraits<kDecodeTable[Row]>::Shared;
  extern __shared__ __align__(1024) unsigned char rows_shared_bytes[];
  decode_rows_worker<kDecodeTable[Row]>(params, *reinterpret_cast<Shared*>(rows_shared_bytes));
}

template <int Row>
constexpr CompiledKernel decode_kernel_of() {
  constexpr DecodeConfig kConfig = kDecodeTable[Row];
  if constexpr (kConfig.family == Family::kRows) {
    using Traits = DecodeRowsTraits<kConfig>;
    return {reinterpret_cast<const void*>(&decode_rows<Row>), sizeof(typename Traits::Shared),
            Traits::kThreads};
  } else {
    using Traits = DecodeTraits<kDecodeTable[Row]>;
    static_assert(sizeof(typename Traits::Shared) <= Traits::kMaxShared);
    return {reinterpret_cast<const void*>(&decode<Row>), sizeof(typename Traits::Shared), Traits::kThreads};
  }
}

/// The kernel of `row`, if it is built and InSlice{} has its configuration.
template <class InSlice>
CompiledKernel find_decode_kernel(int row, InSlice /*in_slice*/) {
  return find_kernel<kDecodeTable>(
      row, [](const DecodeConfig& c) { return is_built(c) && InSlice{}(c); },
      [](auto index) { return decode_kernel_of<index>(); });
}

}  // namespace halftone::cuda
