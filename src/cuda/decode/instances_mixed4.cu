#include "cuda/decode/instances.h"

namespace halftone::cuda {

CompiledKernel decode_kernel_mixed4(int row) {
  return find_decode_kernel(row,
                            [](const DecodeConfig& c) { return is_mixed(c) && dtype_bits(c.v.dtype) == 4; });
}

}  // namespace halftone::cuda
