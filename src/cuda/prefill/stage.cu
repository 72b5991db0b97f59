#include "cuda/prefill/stage.h"

#include "cuda/dequantize/kernel.h"
#include "cuda/dequantize/launch.h"
#include "cuda/device/range.h"
#include "cuda/prefill/codes.h"
#include "cuda/prefill/stage_tiles.h"
#include "cuda/prefill/value_tiles.h"
#include "format/int8_row.h"

namespace halftone::cuda {
namespace {

template <int kHalves>
constexpr int kCtas = kHalves == 2 ? 2 : 3;  // of an SM

/// What a kernel does between the one before it and the next one. The second of two that stage begins only
/// when every block of the first has seen the end of the kernel before both, since these wait before they let
/// it start: so it may read what that one wrote, and write where that one read. What the first one writes it
/// does not touch. It ends after it, so that who waits for it has waited for both.
template <class Work>
__device__ __forceinline__ void stage_beside(const StageParams& params, const Work& work) {
  if (!params.second) wait_for_previous_kernel();
  let_next_kernel_start();
  work();
  if (params.second) wait_for_previous_kernel();
}

/// kCodes: of K as codes, of integers or of E4M3.
template <bool kCodes>
struct StagedOut {
  const StageParams& p;

  /// Of all lanes that have the row; `live` ones have chunk `chunk` of its halves. `row` < 0: it is not
  /// wanted.
  template <int kHalves, class Codes>
  __device__ __forceinline__ void take(const Codes (&codes)[kHalves], const codec::Params& params,
                                       RowChunks<kHalves>& x, std::int64_t row, int head, int chunk,
                                       bool live) const {
    const page::Part& part = p.rows.part;
    if constexpr (kCodes) {
      uint2 bytes[kHalves];
      float scale = params.scale;
      if (p.has_codes) {
        if constexpr (Codes::kBits == 8) {
#pragma unroll
          for (int h = 0; h < kHalves; ++h) bytes[h] = {codes[h].words[0], codes[h].words[1]};
        }
      } else {
        const bool e4m3 = p.as == StagedAs::kE4m3Codes;
        const int8_row::Row of = key_row(e4m3, largest<kHalves>(x));
        scale = of.scale;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
#pragma unroll
          for (int i = 0; i < kChunk; ++i) x[h][i] *= of.inverse;
          bytes[h] = e4m3 ? e4m3_codes(x[h]) : int8_codes(x[h]);
        }
      }
      if (live && row >= 0) {
        auto* const out = static_cast<std::uint8_t*>(p.rows.out);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          *reinterpret_cast<uint2*>(out + code_place(row, head, chunk + h * kHalfChunks)) = bytes[h];
        }
        if (chunk == 0) p.scales[head * p.rows.rows + row] = scale;
      }
      return;
    }
    if (part.rotated) rotate_chunks<kHalves>(part.dim, x);
    if (p.rows.channels.scale != nullptr && live) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const float* const scale =
            p.rows.channels.scale + (std::int64_t{head} * part.dim + (chunk + h * kHalfChunks) * kChunk);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[h][i] *= scale[i];
      }
    }
    if (p.as == StagedAs::kKeys) {
      const float scale = f16_scale(largest<kHalves>(x));
      divide<kHalves>(x, scale);
      if (chunk == 0 && row >= 0) p.scales[head * p.rows.rows + row] = scale;
    } else if (part.format.static_scale()) {
      divide<kHalves>(x, value_unit(p.rows.static_scale, p.rows.static_min, head * p.rows.static_stride));
    }
    if (!live || row < 0) return;
    const DType type = p.rows.out_type == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      store_values(type, p.rows.out, place(row, head, chunk + h * kHalfChunks), x[h]);
    }
  }
  __device__ __forceinline__ void zero(std::int64_t row, int head, int chunk) const {
    if constexpr (kCodes) {
      *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.rows.out) + code_place(row, head, chunk)) = {};
    } else {
      const float none[kChunk] = {};  // zeros of bf16 as well
      store_values(DType::kFloat16, p.rows.out, place(row, head, chunk), none);
    }
    if (p.as != StagedAs::kValues && chunk == 0) p.scales[head * p.rows.rows + row] = 1.0f;
  }

 private:
  __device__ __forceinline__ std::int64_t code_place(std::int64_t row, int head, int chunk) const {
    return place(row, head, p.as == StagedAs::kE4m3Codes ? code_chunk(chunk) : chunk);
  }
  __device__ __forceinline__ std::int64_t place(std::int64_t row, int head, int chunk) const {
    return row * p.rows.row_stride + head * p.rows.head_stride + chunk * kChunk;
  }
  template <int kHalves>
  __device__ __forceinline__ std::uint32_t largest(const RowChunks<kHalves>& x) const {
    return largest_of_row(x, lanes_of(p.rows.part.dim));
  }
  template <int kHalves>
  static __device__ __forceinline__ void divide(RowChunks<kHalves>& x, float by) {
    if (by == 1.0f) return;
    const float inverse = 1.0f / by;
#pragma unroll
    for (int i = 0; i < kHalves * kChunk; ++i) x[i / kChunk][i % kChunk] *= inverse;
  }
};

/// Whole tiles, as K or V.
template <DType kType, bool kAsymmetric, bool kCodes>
struct StagedTiles : StagedOut<kCodes> {
  __device__ __forceinline__ void take_tile(const std::uint8_t* tile, const TilePlace& at) const {
    const TileStager<kType, kAsymmetric> stager{this->p, tile, at.row, at.count, at.head};
    if constexpr (kCodes) {
      if (this->p.as == StagedAs::kE4m3Codes) {
        stager.template convert_keys<StagedAs::kE4m3Codes>();
      } else if (kType == DType::kInt8 && this->p.has_codes) {
        stager.copy_keys();
      } else {
        stager.template convert_keys<StagedAs::kCodes>();
      }
    } else if (this->p.as == StagedAs::kKeys) {
      stager.template convert_keys<StagedAs::kKeys>();
    } else {
      stager.convert_values();
    }
  }
};

/// A token's one scale of K, by a lane each.
struct StagedScales {
  const StageParams& p;

  __device__ __forceinline__ void take_tile(const std::uint8_t* tile, const TilePlace& at) const {
    const int token = threadIdx.x % 32;
    const page::Part& part = p.rows.part;
    if (token < at.count) {
      out(at.row + token, at.head) = load_param(part.format.scale_dtype, tile + part.scale_offset(token, 0));
    }
  }
  __device__ __forceinline__ void zero(std::int64_t row, int head, int chunk) const {
    if (chunk == 0) out(row, head) = 1.0f;
  }

 private:
  __device__ __forceinline__ float& out(std::int64_t row, int head) const {
    return p.scales[head * p.rows.rows + row];
  }
};

template <DType kType, bool kAsymmetric, bool kCodes, int kHalves>
__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas<kHalves>)
    stage(const __grid_constant__ StageParams params) {
  __shared__ DequantizeShared shared;
  using Work = Dequantizer<kType, kAsymmetric, false, StagedOut<kCodes>, kHalves>;
  stage_beside(params, [&] { Work(params.rows, shared, {params}).run(); });
}

template <DType kType, bool kAsymmetric, bool kCodes>
__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas<1>)
    stage_tiles(const __grid_constant__ StageParams params) {
  __shared__ DequantizeShared shared;
  using Out = StagedTiles<kType, kAsymmetric, kCodes>;
  using Work = Dequantizer<kType, kAsymmetric, false, Out>;
  stage_beside(params, [&] { Work(params.rows, shared, Out{{params}}).run(); });
}

__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas<1>)
    stage_values(const __grid_constant__ StageParams params) {
  __shared__ DequantizeShared shared;
  using Work = Dequantizer<DType::kFloat8E4M3, false, false, ValueTiles>;
  stage_beside(params, [&] { Work(params.rows, shared, {params}).run(); });
}

__global__ void __launch_bounds__(kDequantizeWarps * 32, kCtas<1>)
    stage_scales(const __grid_constant__ StageParams params) {
  __shared__ DequantizeShared shared;
  using Work = Dequantizer<DType::kFloat8E4M3, false, false, StagedScales>;
  stage_beside(params, [&] { Work(params.rows, shared, {params}).run(); });
}

template <bool kCodes, int kHalves, DType kType, bool kAsymmetric>
const void* kernel_of(codec::Codec<kType, kAsymmetric>) {
  return reinterpret_cast<const void*>(&stage<kType, kAsymmetric, kCodes, kHalves>);
}
template <bool kCodes, int kHalves>
int launch(const StageParams& params, void* stream) {
  const void* kernel = codec::with_codec(params.rows.part.format,
                                         [](auto codec) { return kernel_of<kCodes, kHalves>(codec); });
  return launch_over_tiles(kernel, params.rows, &params, kCtas<kHalves>, stream, true);
}

/// The kernel that stages whole tiles; null: none.
const void* tiles_kernel_of(const StageParams& params) {
  if (params.as == StagedAs::kE4m3Values) return reinterpret_cast<const void*>(&stage_values);
  if (params.as == StagedAs::kScales) return reinterpret_cast<const void*>(&stage_scales);
  const page::Part& part = params.rows.part;
  const bool codes = params.as == StagedAs::kCodes || params.as == StagedAs::kE4m3Codes;
  if (part.dim != kTileDims || part.rotated || params.rows.channels.scale != nullptr) return nullptr;
  if (!part.format.static_scale() && part.format.scale_dtype != DType::kFloat16) return nullptr;
  const auto kernel = [&]<DType kType, bool kAsymmetric>() {
    return codes ? reinterpret_cast<const void*>(&stage_tiles<kType, kAsymmetric, true>)
                 : reinterpret_cast<const void*>(&stage_tiles<kType, kAsymmetric, false>);
  };
  const KvFormat& format = part.format;
  if (format.dtype == DType::kFloat8E4M3) return kernel.template operator()<DType::kFloat8E4M3, false>();
  if (format.dtype == DType::kInt8 && !format.asymmetric)
    return kernel.template operator()<DType::kInt8, false>();
  if (format.dtype == DType::kInt4 && format.asymmetric)
    return kernel.template operator()<DType::kInt4, true>();
  return nullptr;
}

}  // namespace

int launch_stage(const StageParams& params, void* stream) {
  if (const void* const kernel = tiles_kernel_of(params); kernel != nullptr) {
    return launch_over_tiles(kernel, params.rows, &params, kCtas<1>, stream, true);
  }
  const bool wide = is_wide(params.rows.part.dim);
  if (params.as == StagedAs::kCodes || params.as == StagedAs::kE4m3Codes) {
    return wide ? launch<true, 2>(params, stream) : launch<true, 1>(params, stream);
  }
  return wide ? launch<false, 2>(params, stream) : launch<false, 1>(params, stream);
}

}  // namespace halftone::cuda
