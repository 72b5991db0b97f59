#include "cuda/prefill/instances.h"

namespace halftone::cuda {

CompiledKernel prefill_kernel_bf16(int row) { return find_prefill_kernel<DType::kBFloat16>(row); }

}  // namespace halftone::cuda
