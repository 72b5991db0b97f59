#include "cuda/decode/instances.h"

namespace halftone::cuda {

CompiledKernel decode_kernel_16bit(int row) {
  return find_decode_kernel(
      row, [](const DecodeConfig& c) { return !is_mixed(c) && dtype_bits(c.v.dtype) == 16; });
}

}  // namespace halftone::cuda
