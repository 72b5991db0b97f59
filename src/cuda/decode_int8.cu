#include "cuda/decode_instances.h"

namespace halftone::cuda {

DecodeKernel decode_kernel_int8(int row) {
  return find_decode_kernel(row, [](DType t) { return t == DType::kInt8; });
}

}  // namespace halftone::cuda
