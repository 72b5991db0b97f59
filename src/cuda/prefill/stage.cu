#include "cuda/prefill/stage.h"

#include "cuda/dequantize/kernel.h"
#include "cuda/dequantize/launch.h"
#include "cuda/device/range.h"
#include "format/int8_row.h"

namespace halftone::cuda {
namespace {

constexpr int kCtas = 3;  // of an SM

struct StagedOut {
  const StageParams& p;

  /// Of all lanes that have the row; `live` ones have a chunk of it. `row` < 0: it is not wanted.
  template <class Codes>
  __device__ __forceinline__ void take(const Codes& codes, const codec::Params& params, float (&x)[kChunk],
                                       std::int64_t row, int head, int chunk, bool live) const {
    const page::Part& part = p.rows.part;
    if (p.as == StagedAs::kCodes) {
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
    if (p.as == StagedAs::kCodes) {
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

struct StagePair {
  StageParams of[2];
};

template <DType kType, bool kAsymmetric>
__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas)
    stage(const __grid_constant__ StagePair pair) {
  __shared__ DequantizeShared shared;
  const StageParams& p = pair.of[blockIdx.y];
  Dequantizer<kType, kAsymmetric, false, StagedOut>(p.rows, shared, {p}).run();
}

template <DType kType, bool kAsymmetric>
const void* kernel_of(codec::Codec<kType, kAsymmetric>) {
  return reinterpret_cast<const void*>(&stage<kType, kAsymmetric>);
}

}  // namespace

int launch_stage(const StageParams& k, const StageParams& v, void* stream) {
  const auto kernel = [](const StageParams& p) {
    return codec::with_codec(p.rows.part.format, [](auto codec) { return kernel_of(codec); });
  };
  const StagePair pair{{k, v}}, only_v{{v, v}};
  if (kernel(k) == kernel(v)) return launch_over_tiles(kernel(k), k.rows, &pair, kCtas, 2, stream);
  const int status = launch_over_tiles(kernel(k), k.rows, &pair, kCtas, 1, stream);
  return status != cudaSuccess ? status : launch_over_tiles(kernel(v), v.rows, &only_v, kCtas, 1, stream);
}

}  // namespace halftone::cuda
