#include <type_traits>

#include "cuda/dequantize/kernel.h"
#include "cuda/dequantize/launch.h"
#include "cuda/dequantize/params.h"

namespace halftone::cuda {
namespace {

/// CTAs of an SM, as registers allow.
template <class Out, int kHalves>
constexpr int kCtas = kHalves == 2                          ? 2
                      : std::is_same_v<Out, ChannelRowsOut> ? 3
                                                            : 4;

template <DType kType, bool kAsymmetric, bool kRecords, class Out, int kHalves>
__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas<Out, kHalves>)
    dequantize(const __grid_constant__ DequantizeParams params) {
  __shared__ DequantizeShared shared;
  Dequantizer<kType, kAsymmetric, kRecords, Out, kHalves>(params, shared, Out{params}).run();
}

template <bool kRecords, class Out, int kHalves, DType kType, bool kAsymmetric>
const void* kernel_of(codec::Codec<kType, kAsymmetric>) {
  return reinterpret_cast<const void*>(&dequantize<kType, kAsymmetric, kRecords, Out, kHalves>);
}

template <bool kRecords, class Out, int kHalves = 1>
int launch(const DequantizeParams& params, void* stream) {
  const void* kernel = codec::with_codec(params.part.format,
                                         [](auto codec) { return kernel_of<kRecords, Out, kHalves>(codec); });
  return launch_over_tiles(kernel, params, &params, kCtas<Out, kHalves>, stream);
}

}  // namespace

int launch_dequantize(const DequantizeParams& params, void* stream) {
  if (is_wide(params.part.dim)) {
    return params.channels.any() ? launch<false, ChannelRowsOut, 2>(params, stream)
                                 : launch<false, RowsOut, 2>(params, stream);
  }
  return params.channels.any() ? launch<false, ChannelRowsOut>(params, stream)
                               : launch<false, RowsOut>(params, stream);
}

int launch_dequantize_records(const DequantizeParams& params, void* stream) {
  return launch<true, RowsOut>(params, stream);
}

}  // namespace halftone::cuda
