#include "cuda/decode_instances.h"

namespace halftone::cuda {

DecodeKernel decode_kernel_int4(int row) {
  return find_decode_kernel(row,
                            [](const DecodeConfig& c) { return !is_mixed(c) && c.v.dtype == DType::kInt4; });
}

}  // namespace halftone::cuda
