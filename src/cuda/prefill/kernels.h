// The compiled kernels of prefill: what the .cu files define and host.cc looks up.
#pragma once

#include "cuda/attention/compiled_kernel.h"

namespace halftone::cuda {

/// The slices in which kPrefillTable is compiled, by keys and dtype. They return null for rows of another
/// slice.
CompiledKernel prefill_kernel_bf16(int row);
CompiledKernel prefill_kernel_f16(int row);
CompiledKernel prefill_kernel_staged(int row);
CompiledKernel prefill_kernel_packed(int row);

}  // namespace halftone::cuda
