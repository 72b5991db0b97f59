#include "cuda/decode/host.h"
#include "cuda/decode/kernels.h"
#include "cuda/decode/universal.h"

namespace halftone::cuda {
namespace {

static_assert(kUniversalRow.row_block == kUniversalUnitRows);
static_assert(universal_shared_bytes(128, 128) <= 227 * 1024 &&
              universal_shared_bytes(256, 256) <= 227 * 1024 &&
              universal_shared_bytes(512, 512) <= 227 * 1024);

template <int kVDim>
__global__ void __launch_bounds__(32 * UniversalTraits<kVDim>::kWarps, 1)
    decode_universal(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  universal_worker<kVDim>(params, *reinterpret_cast<UniversalShared*>(shared_bytes));
}

template <std::size_t... kDim>
const void* kernel_of(int v_dim, std::index_sequence<kDim...>) {
  const void* found = nullptr;
  ((v_dim == kHeadDims[kDim] ? (found = reinterpret_cast<const void*>(&decode_universal<kHeadDims[kDim]>), 0)
                             : 0),
   ...);
  return found;
}

}  // namespace

CompiledKernel universal_kernel(int head_dim, int v_dim) {
  return {kernel_of(v_dim, std::make_index_sequence<kHeadDims.size()>()),
          universal_shared_bytes(head_dim, v_dim), 32 * universal_warps(head_dim, v_dim)};
}

}  // namespace halftone::cuda
