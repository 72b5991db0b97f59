#include "cuda/decode_instances.h"

namespace halftone::cuda {

DecodeKernel decode_kernel_16bit(int row) {
  return find_decode_kernel(row, [](DType t) { return dtype_bits(t) == 16; });
}

}  // namespace halftone::cuda
