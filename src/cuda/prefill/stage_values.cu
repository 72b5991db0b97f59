#include "cuda/prefill/stage_values.h"

#include "cuda/dequantize/kernel.h"
#include "cuda/dequantize/launch.h"
#include "cuda/device/range.h"
#include "cuda/prefill/codes.h"
#include "cuda/prefill/value_tiles.h"
#include "format/fp8_row.h"

namespace halftone::cuda {
namespace {

constexpr int kClearing = 256;

/// A lane has tokens 2t, 2t + 1, 2t + 8 and 2t + 9 with t its place in its quad, and of 64 dims at a time the
/// chunk of 8 that is its quad's.
template <DType kTypeOf, bool kIsAsymmetric>
struct ValueReader {
  static constexpr DType kType = kTypeOf;
  static constexpr bool kAsymmetric = kIsAsymmetric;
  using Load = ChunkLoad<kType, kAsymmetric>;
  using Codes = typename Load::Codes;
  static constexpr bool kQuantised = Load::kBits != 16;
  static constexpr int kDims = 64;
  static constexpr int kStepBytes =
      kDims * Load::kBits / 8 * (kQuantised ? kTileTokens : 1);  // as pages have it

  const StageValuesParams& p;
  const Load load;

  __device__ __forceinline__ explicit ValueReader(const StageValuesParams& params)
      : p(params), load(p.rows.part, quad()) {}

  __device__ __forceinline__ static int quad() { return threadIdx.x % 32 / 4; }
  __device__ __forceinline__ static int place() { return threadIdx.x % 4; }
  __device__ __forceinline__ float* unit(const TilePlace& at) const {
    return p.units + at.request * p.rows.kv_heads + at.head;
  }
  /// Calls use(dim, values of the lane's tokens) for each of the lane's chunks.
  template <class Use>
  __device__ __forceinline__ void for_each(const std::uint8_t* tile, int head, const Use& use) const {
    const page::Part& part = p.rows.part;
    const std::uint8_t* data = tile + part.data_offset;
    const std::int64_t scales = std::int64_t{head} * p.rows.static_stride;
#pragma unroll 1
    for (int dim = kChunk * quad(); dim < part.dim; dim += kDims, data += kStepBytes) {
      Codes codes[kLaneRows];
      codec::Params params[kLaneRows] = {};
      load.load(data, place(), codes);
      if constexpr (kQuantised) {
        const int group = part.groups > 1 ? dim / part.format.group_size : 0;
        load_params<kAsymmetric>(part, p.rows.static_scale + scales, p.rows.static_min + scales, tile,
                                 place(), group, params);
      }
      float x[kLaneRows][kChunk];
#pragma unroll
      for (int k = 0; k < kLaneRows; ++k) codes[k].decode(params[k], x[k]);
      use(dim, x);
    }
  }
};

/// Raises the unit of a request and head to what a tile asks for. Powers of two are ordered as integers are.
template <DType kType, bool kAsymmetric>
struct ValueUnits : ValueReader<kType, kAsymmetric> {
  using Reader = ValueReader<kType, kAsymmetric>;
  using Reader::Reader;
  static constexpr int kCtas = 3;  // of an SM

  __device__ __forceinline__ void take_tile(const std::uint8_t* tile, const TilePlace& at) const {
    float most = 0.0f;
    const int first = first_seen(at);
    this->for_each(tile, at.head, [&](int, const float(&x)[kLaneRows][kChunk]) {
#pragma unroll
      for (int k = 0; k < kLaneRows; ++k) {
        const int token = lane_token(this->place(), k);
        const bool counts = token >= first && token < at.count;
#pragma unroll
        for (const float v : x[k]) {
          if (counts && fabsf(v) < INFINITY) most = fmaxf(most, fabsf(v));
        }
      }
    });
    const std::uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(most));
    if (bits == 0 || threadIdx.x % 32 != 0) return;
    const float scale = fp8_row::row_of(bits).scale;
    float* const unit = this->unit(at);
    if (scale > __ldcg(unit)) atomicMax(reinterpret_cast<unsigned*>(unit), __float_as_uint(scale));
  }
  __device__ __forceinline__ void zero_tile(std::int64_t, int) const {}

 private:
  /// Token of the tile from which on some query sees them: pages that a window has passed may be anything.
  __device__ __forceinline__ int first_seen(const TilePlace& at) const {
    const StageValuesParams& p = this->p;
    if (p.window_left < 0) return 0;
    const std::int64_t keys = __ldg(p.rows.lengths + at.request),
                       queries = __ldg(p.cu_q + at.request + 1) - __ldg(p.cu_q + at.request);
    const std::int64_t first = keys - queries - p.window_left - at.position;
    return static_cast<int>(min(max(first, std::int64_t{0}), std::int64_t{kTileTokens}));
  }
};

/// Writes tiles as value_tiles.h has them.
template <DType kType, bool kAsymmetric>
struct ValueCodes : ValueReader<kType, kAsymmetric> {
  using Reader = ValueReader<kType, kAsymmetric>;
  using Reader::Reader;
  static constexpr int kCtas = 2;

  __device__ __forceinline__ void take_tile(const std::uint8_t* tile, const TilePlace& at) const {
    const float unit = *this->unit(at), inverse = unit > 0.0f ? inverse_power(unit) : 0.0f;
    const std::uint32_t keep = bytes_of_tokens(this->place(), at.count);
    uint4* const to = value_tile(this->p.rows, at.row, at.head);
    this->for_each(tile, at.head, [&](int dim, const float(&x)[kLaneRows][kChunk]) {
#pragma unroll
      for (int d = 0; d < kChunk; d += 4) {  // a quad trades four dims for all tokens of one each
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto value = [&](int k) { return divided_value(x[k][d + i], inverse); };
          words[i] = pack_e4m3x4(value(0), value(1), value(2), value(3)) & keep;
        }
        transpose_quad(words, threadIdx.x % 32);
        to[dim + d + this->place()] = {words[0], words[1], words[2], words[3]};
      }
    });
  }
  __device__ __forceinline__ void zero_tile(std::int64_t row, int head) const {
    zero_value_tile(this->p.rows, row, head);
  }
};

__global__ void clear_units(const __grid_constant__ StageValuesParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t i = std::int64_t{blockIdx.x} * kClearing + threadIdx.x;
  if (i < std::int64_t{p.rows.batch} * p.rows.kv_heads) p.units[i] = 0.0f;
}

template <class Out>
__global__ void __launch_bounds__(kDequantizeWarps * 32, Out::kCtas)
    over_values(const __grid_constant__ StageValuesParams p) {
  __shared__ DequantizeShared shared;
  wait_for_previous_kernel();
  let_next_kernel_start();
  Dequantizer<Out::kType, Out::kAsymmetric, false, Out>(p.rows, shared, Out(p)).run();
}

template <class Out>
int launch(const StageValuesParams& p, void* stream) {
  return launch_over_tiles(reinterpret_cast<const void*>(&over_values<Out>), p.rows, &p, Out::kCtas, stream,
                           true);
}

/// Both over all tiles.
template <DType kType, bool kAsymmetric>
int launch_both(codec::Codec<kType, kAsymmetric>, const StageValuesParams& p, void* stream) {
  const int status = launch<ValueUnits<kType, kAsymmetric>>(p, stream);
  return status != cudaSuccess ? status : launch<ValueCodes<kType, kAsymmetric>>(p, stream);
}

}  // namespace

int launch_stage_values(const StageValuesParams& p, void* stream) {
  const void* argument = &p;
  const auto blocks =
      static_cast<unsigned>((std::int64_t{p.rows.batch} * p.rows.kv_heads + kClearing - 1) / kClearing);
  const cudaError_t cleared = launch_early(reinterpret_cast<const void*>(&clear_units), dim3(blocks),
                                           dim3(kClearing), &argument, stream);
  if (cleared != cudaSuccess) return cleared;
  return codec::with_codec(p.rows.part.format, [&](auto codec) { return launch_both(codec, p, stream); });
}

}  // namespace halftone::cuda
