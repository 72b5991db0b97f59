#include "cuda/decode_instances.h"

namespace halftone::cuda {

DecodeKernel decode_kernel_mixed8(int row) {
  return find_decode_kernel(row,
                            [](const DecodeConfig& c) { return is_mixed(c) && dtype_bits(c.v.dtype) == 8; });
}

}  // namespace halftone::cuda
