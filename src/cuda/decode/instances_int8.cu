#include "cuda/decode/instances.h"

namespace halftone::cuda {

CompiledKernel decode_kernel_int8(int row) {
  return find_decode_kernel(row,
                            [](const DecodeConfig& c) { return !is_mixed(c) && c.v.dtype == DType::kInt8; });
}

}  // namespace halftone::cuda
