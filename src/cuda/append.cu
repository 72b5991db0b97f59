#include <algorithm>

#include "cuda/append_kernel.h"
#include "cuda/launch.h"

namespace halftone::cuda {
namespace {

/// blockIdx.y of two: 0 for K, 1 for V; of one: `only` says which.
template <DType kType, bool kAsymmetric>
__global__ void __launch_bounds__(kAppendWarps * 32, 2)
    append(const __grid_constant__ AppendParams params, const KvPart only) {
  __shared__ AppendShared shared;
  const bool k = gridDim.y == 2 ? blockIdx.y == 0 : only == KvPart::kK;
  Appender<kType, kAsymmetric>(params, k ? params.k : params.v, shared).run();
}

const void* kernel_of(const KvFormat& format) {
  const bool asymmetric = format.asymmetric;
  switch (format.dtype) {
    case DType::kFloat16:
      return reinterpret_cast<const void*>(&append<DType::kFloat16, false>);
    case DType::kFloat8E4M3:
      return reinterpret_cast<const void*>(&append<DType::kFloat8E4M3, false>);
    case DType::kInt8:
      return asymmetric ? reinterpret_cast<const void*>(&append<DType::kInt8, true>)
                        : reinterpret_cast<const void*>(&append<DType::kInt8, false>);
    case DType::kInt4:
      return asymmetric ? reinterpret_cast<const void*>(&append<DType::kInt4, true>)
                        : reinterpret_cast<const void*>(&append<DType::kInt4, false>);
    default:
      return reinterpret_cast<const void*>(&append<DType::kBFloat16, false>);
  }
}

}  // namespace

int launch_append(const AppendParams& params, void* stream) {
  if (params.tokens == 0) return cudaSuccess;
  constexpr std::int64_t kMaxUnits = 1 << 20;
  constexpr int kHeadWarps = 4;  // CTAs small enough that a decode step fills the device
  const auto per_token = [](const AppendPart& a) { return a.part.format.granularity == Granularity::kToken; };
  const auto launch = [&](const void* kernel, const AppendPart& a, unsigned parts, KvPart only, bool meets) {
    const int splits = 1 << (segment_log2(a.part.dim) - 3);
    const std::int64_t units = (params.tokens + kWindow - 1) / kWindow * splits;
    const int warps = std::min(params.kv_heads, meets ? kAppendWarps : kHeadWarps);
    const dim3 grid(
        static_cast<unsigned>(std::min(units, kMaxUnits)), parts,
        meets ? 1 : static_cast<unsigned>(std::min((params.kv_heads + warps - 1) / warps, 1 << 15)));
    const void* arguments[] = {&params, &only};
    return cudaLaunchKernel(kernel, grid, dim3(static_cast<unsigned>(warps * 32)),
                            const_cast<void**>(arguments), 0, static_cast<cudaStream_t>(stream));
  };
  // Heads that share a scale meet in one CTA.
  const void *k = kernel_of(params.k.part.format), *v = kernel_of(params.v.part.format);
  const bool k_meets = per_token(params.k), v_meets = per_token(params.v);
  if (k == v && params.k.part.dim == params.v.part.dim && k_meets == v_meets) {
    return launch(k, params.k, 2, KvPart::kK, k_meets);
  }
  const cudaError_t status = launch(k, params.k, 1, KvPart::kK, k_meets);
  return status != cudaSuccess ? status : launch(v, params.v, 1, KvPart::kV, v_meets);
}

}  // namespace halftone::cuda
