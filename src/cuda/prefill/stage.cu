#include "cuda/prefill/stage.h"

#include "cuda/dequantize/kernel.h"
#include "cuda/dequantize/launch.h"
#include "cuda/device/range.h"
#include "format/int8_row.h"

namespace halftone::cuda {
namespace {

constexpr int kCtas = 3;  // of an SM

/// kCodes: of K as codes.
template <bool kCodes>
struct StagedOut {
  const StageParams& p;

  /// Of all lanes that have the row; `live` ones have a chunk of it. `row` < 0: it is not wanted.
  template <class Codes>
  __device__ __forceinline__ void take(const Codes& codes, const codec::Params& params, float (&x)[kChunk],
                                       std::int64_t row, int head, int chunk, bool live) const {
    const page::Part& part = p.rows.part;
    if constexpr (kCodes) {
      uint2 bytes;
      float scale = params.scale;
      if (p.has_codes) {
        if constexpr (Codes::kBits == 8) bytes = {codes.words[0], codes.words[1]};
      } else {
        const int8_row::Row as = int8_row::row_of(largest(x));
        scale = as.scale;
        bytes = to_codes(x, as.inverse);
      }
      if (live && row >= 0) {
        auto* const out = static_cast<std::uint8_t*>(p.rows.out);
        *reinterpret_cast<uint2*>(out + place(row, head, chunk)) = bytes;
        if (chunk == 0) p.scales[head * p.rows.rows + row] = scale;
      }
      return;
    }
    if (part.rotated) rotate_row(part.dim, x);
    if (p.rows.channels.scale != nullptr && live) {
      const float* const scale = p.rows.channels.scale + (std::int64_t{head} * part.dim + chunk * kChunk);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[i] *= scale[i];
    }
    if (p.as == StagedAs::kKeys) {
      const float scale = f16_scale(largest(x));
      divide(x, scale);
      if (chunk == 0 && row >= 0) p.scales[head * p.rows.rows + row] = scale;
    } else if (part.format.static_scale()) {
      divide(x, value_unit(p.rows.static_scale, p.rows.static_min, head * p.rows.static_stride));
    }
    if (live && row >= 0) store_values(DType::kFloat16, p.rows.out, place(row, head, chunk), x);
  }
  __device__ __forceinline__ void zero(std::int64_t row, int head, int chunk) const {
    if constexpr (kCodes) {
      *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.rows.out) + place(row, head, chunk)) = {};
    } else {
      const float none[kChunk] = {};
      store_values(DType::kFloat16, p.rows.out, place(row, head, chunk), none);
    }
    if (p.as != StagedAs::kValues && chunk == 0) p.scales[head * p.rows.rows + row] = 1.0f;
  }

 private:
  __device__ __forceinline__ std::int64_t place(std::int64_t row, int head, int chunk) const {
    return row * p.rows.row_stride + head * p.rows.head_stride + chunk * kChunk;
  }
  /// Bits of the largest magnitude, over the lanes of a row.
  __device__ __forceinline__ std::uint32_t largest(const float (&x)[kChunk]) const {
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) most = max(most, magnitude_bits(x[i]));
    for (int i = lanes_of(p.rows.part.dim) / 2; i > 0; i /= 2) {
      most = max(most, __shfl_xor_sync(~0u, most, i));
    }
    return most;
  }
  static __device__ __forceinline__ void divide(float (&x)[kChunk], float by) {
    if (by == 1.0f) return;
    const float inverse = 1.0f / by;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] *= inverse;
  }
  static __device__ __forceinline__ uint2 to_codes(const float (&x)[kChunk], float inverse) {
    std::uint32_t word[2] = {};
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int code = __float2int_rn(x[i] * inverse);
      word[i / 4] |= (static_cast<std::uint32_t>(code) & 0xffu) << 8 * (i % 4);
    }
    return {word[0], word[1]};
  }
};

template <DType kType, bool kAsymmetric, bool kCodes>
__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas)
    stage(const __grid_constant__ StageParams params) {
  __shared__ DequantizeShared shared;
  Dequantizer<kType, kAsymmetric, false, StagedOut<kCodes>>(params.rows, shared, {params}).run();
}

template <bool kCodes, DType kType, bool kAsymmetric>
const void* kernel_of(codec::Codec<kType, kAsymmetric>) {
  return reinterpret_cast<const void*>(&stage<kType, kAsymmetric, kCodes>);
}

}  // namespace

int launch_stage(const StageParams& params, void* stream) {
  const void* kernel = codec::with_codec(params.rows.part.format, [&](auto codec) {
    return params.as == StagedAs::kCodes ? kernel_of<true>(codec) : kernel_of<false>(codec);
  });
  return launch_over_tiles(kernel, params.rows, &params, kCtas, stream);
}

}  // namespace halftone::cuda
