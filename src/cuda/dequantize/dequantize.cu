#include <algorithm>

#include "cuda/dequantize/kernel.h"
#include "cuda/dequantize/params.h"

namespace halftone::cuda {
namespace {

constexpr int kCtasPerSm = 4;

template <DType kType, bool kAsymmetric, bool kRecords>
__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtasPerSm)
    dequantize(const __grid_constant__ DequantizeParams params) {
  __shared__ DequantizeShared shared;
  Dequantizer<kType, kAsymmetric, kRecords>(params, shared).run();
}

template <bool kRecords, DType kType, bool kAsymmetric>
const void* kernel_of(codec::Codec<kType, kAsymmetric>) {
  return reinterpret_cast<const void*>(&dequantize<kType, kAsymmetric, kRecords>);
}

template <bool kRecords>
int launch(const DequantizeParams& params, void* stream) {
  if (params.rows == 0) return cudaSuccess;
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status != cudaSuccess) return status;
  const std::int64_t tiles = params.rows / kTileTokens + params.batch + 1;  // at most, and any rows of zeros
  const std::int64_t wanted = (tiles * params.kv_heads + kDequantizeWarps - 1) / kDequantizeWarps;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, processors * kCtasPerSm));
  const void* arguments[] = {&params};
  const void* kernel =
      codec::with_codec(params.part.format, [](auto codec) { return kernel_of<kRecords>(codec); });
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kDequantizeWarps * 32), const_cast<void**>(arguments), 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace

int launch_dequantize(const DequantizeParams& params, void* stream) { return launch<false>(params, stream); }

int launch_dequantize_records(const DequantizeParams& params, void* stream) {
  return launch<true>(params, stream);
}

}  // namespace halftone::cuda
