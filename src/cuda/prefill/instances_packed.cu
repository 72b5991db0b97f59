#include "cuda/prefill/instances.h"

namespace halftone::cuda {
namespace {

constexpr bool wanted(const PrefillConfig& c) { return c.keys == PrefillKeys::kPacked; }

}  // namespace

CompiledKernel prefill_kernel_packed(int row) { return find_prefill_kernel<wanted>(row); }

}  // namespace halftone::cuda
