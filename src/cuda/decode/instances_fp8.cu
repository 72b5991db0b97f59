#include "cuda/decode/instances.h"

namespace halftone::cuda {

CompiledKernel decode_kernel_fp8(int row) {
  return find_decode_kernel(
      row, [](const DecodeConfig& c) { return !is_mixed(c) && c.v.dtype == DType::kFloat8E4M3; });
}

}  // namespace halftone::cuda
