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
    decode_rows(const __grid_constant__ AttentionParams params) {
  using Shared = typename DecodeRowsTraits<kDecodeTable[Row]>::Shared;
  extern __shared__ __align__(1024) unsigned char rows_shared_bytes[];
  decode_rows_worker<kDecodeTable[Row]>(params, *reinterpret_cast<Shared*>(rows_shared_bytes));
}

template <int Row, class InSlice>
constexpr CompiledKernel decode_kernel_of(InSlice in_slice) {
  constexpr DecodeConfig kConfig = kDecodeTable[Row];
  if constexpr (!is_built(kConfig) || !in_slice(kConfig)) {
    return {};
  } else if constexpr (kConfig.family == Family::kRows) {
    using Traits = DecodeRowsTraits<kConfig>;
    return {reinterpret_cast<const void*>(&decode_rows<Row>), sizeof(typename Traits::Shared),
            Traits::kThreads};
  } else {
    static_assert(sizeof(typename DecodeTraits<kDecodeTable[Row]>::Shared) <=
                  DecodeTraits<kDecodeTable[Row]>::kMaxShared);
    return {reinterpret_cast<const void*>(&decode<Row>),
            sizeof(typename DecodeTraits<kDecodeTable[Row]>::Shared),
            DecodeTraits<kDecodeTable[Row]>::kThreads};
  }
}

/// The kernel of `row`, if `in_slice(its configuration)`.
template <class InSlice>
CompiledKernel find_decode_kernel(int row, InSlice in_slice) {
  constexpr int kRows = static_cast<int>(kDecodeTable.size());
  return find_kernel<kRows>(row, [&](auto index) { return decode_kernel_of<index>(in_slice); });
}

}  // namespace halftone::cuda
