#include "cuda/dequantize/kernel.h"
#include "cuda/dequantize/launch.h"
#include "cuda/dequantize/params.h"

namespace halftone::cuda {
namespace {

constexpr int kCtas = 4;  // of an SM

template <DType kType, bool kAsymmetric, bool kRecords>
__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas)
    dequantize(const __grid_constant__ DequantizeParams params) {
  __shared__ DequantizeShared shared;
  Dequantizer<kType, kAsymmetric, kRecords>(params, shared, {params}).run();
}

template <bool kRecords, DType kType, bool kAsymmetric>
const void* kernel_of(codec::Codec<kType, kAsymmetric>) {
  return reinterpret_cast<const void*>(&dequantize<kType, kAsymmetric, kRecords>);
}

template <bool kRecords>
int launch(const DequantizeParams& params, void* stream) {
  const void* kernel =
      codec::with_codec(params.part.format, [](auto codec) { return kernel_of<kRecords>(codec); });
  return launch_over_tiles(kernel, params, &params, kCtas, stream);
}

}  // namespace

int launch_dequantize(const DequantizeParams& params, void* stream) { return launch<false>(params, stream); }

int launch_dequantize_records(const DequantizeParams& params, void* stream) {
  return launch<true>(params, stream);
}

}  // namespace halftone::cuda
