#include "cuda/prefill/instances.h"

namespace halftone::cuda {

CompiledKernel prefill_kernel_f16(int row) { return find_prefill_kernel<DType::kFloat16>(row); }

}  // namespace halftone::cuda
