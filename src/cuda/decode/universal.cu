#include "cuda/decode/host.h"
#include "cuda/decode/kernels.h"
#include "cuda/decode/universal.h"

namespace halftone::cuda {
namespace {

static_assert(kUniversalRow.row_block == kAnyRows);
static_assert(any_shared_bytes(128, 128) <= 227 * 1024 && any_shared_bytes(256, 256) <= 227 * 1024 &&
              any_shared_bytes(512, 512) <= 227 * 1024);

template <int kVDim>
__global__ void __launch_bounds__(32 * AnyTraits<kVDim>::kWarps, 1)
    decode_any(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  decode_any_worker<kVDim>(params, *reinterpret_cast<AnyShared*>(shared_bytes));
}

template <std::size_t... kDim>
const void* kernel_of(int v_dim, std::index_sequence<kDim...>) {
  const void* found = nullptr;
  ((v_dim == kHeadDims[kDim] ? (found = reinterpret_cast<const void*>(&decode_any<kHeadDims[kDim]>), 0) : 0),
   ...);
  return found;
}

}  // namespace

CompiledKernel universal_kernel(int head_dim, int v_dim) {
  return {kernel_of(v_dim, std::make_index_sequence<kHeadDims.size()>()), any_shared_bytes(head_dim, v_dim),
          32 * any_warps(head_dim, v_dim)};
}

}  // namespace halftone::cuda
