#include "cuda/prefill/stage_tensors.h"

#include "cuda/device/launch.h"
#include "cuda/device/ptx.h"
#include "cuda/device/range.h"
#include "cuda/prefill/codes.h"
#include "cuda/prefill/stage.h"
#include "format/fp8_row.h"

namespace halftone::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kCtas = 3;  // of an SM
constexpr int kItemTiles = 8;                                     // of 16 tokens, which a warp stages

/// Keys of a request that there are.
__device__ std::int32_t present_keys(const StageTensorsParams& p, int request) {
  const std::int64_t first = p.cu_kv[request];
  if (first < 0 || first >= p.tokens) return 0;
  return static_cast<std::int32_t>(min(std::int64_t{p.kv_lengths[request]}, p.tokens - first));
}

/// The last request, of those before `count`, that begins at or before `at`, or request 0.
template <class Begin>
__device__ int find_request(int count, std::int64_t at, const Begin& begin) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begin(middle) <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The larger one of `most` and those magnitudes of a pair that are finite.
template <bool kBFloat16>
__device__ std::uint32_t larger_finite(std::uint32_t most, std::uint32_t pair) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t bits = magnitude_bits(half_of(pair, i, kBFloat16));
    most = bits < 0x7f800000u ? max(most, bits) : most;
  }
  return most;
}

/// Of each warp of a block that measures.
struct MeasureShared {
  std::int64_t rows[kWarps];
  std::uint32_t most[kWarps];
};

/// By one block: where the requests begin.
__device__ void place_requests(const StageTensorsParams& p, MeasureShared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::int64_t before = 0;
  for (int base = 0; base < p.batch; base += kThreads) {
    const int r = base + static_cast<int>(threadIdx.x);
    const std::int32_t keys = r < p.batch ? present_keys(p, r) : 0;
    const std::int64_t own = (std::int64_t{keys} + kTileTokens - 1) / kTileTokens * kTileTokens;
    std::int64_t sum = own;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const std::int64_t other = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += other;
    }
    if (lane == 31) s.rows[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += s.rows[w];
    const std::int64_t end = before + sum, begin = end - own;
    if (r < p.batch) {
      // What has no room is no key.
      p.first[r] = static_cast<std::int32_t>(min(begin, p.rows));
      p.present[r] = static_cast<std::int32_t>(min(std::int64_t{keys}, max(p.rows - begin, std::int64_t{0})));
      if (r == p.batch - 1) p.first[p.batch] = static_cast<std::int32_t>(min(end, p.rows));
    }
    for (const std::int64_t rows : s.rows) before += rows;
    __syncthreads();
  }
}

/// blockIdx.x: a run of a head.
template <int kLanes, bool kBFloat16>
__device__ void measure_run(const StageTensorsParams& p, MeasureShared& s) {
  const auto runs = static_cast<std::uint32_t>(value_runs(p.tokens, p.batch));
  const std::int64_t run = blockIdx.x % runs;
  const int head = static_cast<int>(blockIdx.x / runs);
  const int request = find_request(p.batch, run, [&](int r) { return first_run(max(p.cu_kv[r], 0), r); });
  const std::int64_t first = max(p.cu_kv[request], 0), own = (run - first_run(first, request)) * kValueRun;
  // Before the first request, as where cu_kv[0] is not 0, there is none.
  const std::int64_t end = own < 0 ? own : min(own + kValueRun, std::int64_t{present_keys(p, request)});
  constexpr int kRows = kThreads / kLanes, kEach = 4;
  std::uint32_t most = 0;
  const auto* const from = static_cast<const std::uint16_t*>(p.v) + first * p.v_token_stride +
                           head * p.v_head_stride + threadIdx.x % kLanes * 8;
  for (std::int64_t row = own + threadIdx.x / kLanes; row < end; row += kEach * kRows) {
    uint4 x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      x[i] = row + i * kRows < end
                 ? *reinterpret_cast<const uint4*>(from + (row + i * kRows) * p.v_token_stride)
                 : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      for (const std::uint32_t pair : {x[i].x, x[i].y, x[i].z, x[i].w})
        most = larger_finite<kBFloat16>(most, pair);
    }
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) s.most[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const std::uint32_t bits : s.most) most = max(most, bits);
    p.run_maxima[std::int64_t{head} * runs + run] = __uint_as_float(most);
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads) measure_values(const __grid_constant__ StageTensorsParams p) {
  __shared__ MeasureShared shared;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x == 0) place_requests(p, shared);
  if (p.type == DType::kBFloat16) {
    measure_run<kLanes, true>(p, shared);
  } else {
    measure_run<kLanes, false>(p, shared);
  }
}

/// What a warp knows of the request whose tiles it stages.
struct TensorTile {
  const StageTensorsParams& p;
  int head;
  std::int64_t row;    // the tile's first staged one
  std::int64_t token;  // and that one's in the tensors
  int count;           // of its tokens that there are

  /// K by rows of kLanes lanes.
  template <int kLanes, bool kBFloat16>
  __device__ void stage_keys() const {
    constexpr int kRows = 32 / kLanes, kEach = 4;
    const int lane = threadIdx.x % 32, chunk = lane % kLanes;
    const auto* const from = static_cast<const std::uint16_t*>(p.k) + head * p.k_head_stride + chunk * 8;
#pragma unroll 1
    for (int first = lane / kLanes; first < kTileTokens; first += kEach * kRows) {
      uint4 x[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int own = first + i * kRows;
        x[i] =
            own < count ? *reinterpret_cast<const uint4*>(from + (token + own) * p.k_token_stride) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        float v[8];
        unpack(x[i], kBFloat16, v);
        const float scale = e4m3_scale(largest_of_row<kLanes>(v)), inverse = 1.0f / scale;
#pragma unroll
        for (float& y : v) y *= inverse;
        const std::int64_t at = row + first + i * kRows;
        *reinterpret_cast<uint2*>(p.k_codes + (at * p.heads + head) * (8 * kLanes) + 8 * code_chunk(chunk)) =
            e4m3_codes(v);
        if (chunk == 0) p.k_scales[head * p.rows + at] = scale;
      }
    }
  }
  /// V by four dims of all tokens a lane.
  template <int kLanes, bool kBFloat16>
  __device__ void stage_values(float inverse) const {
    constexpr int kDim = 8 * kLanes;
    const auto* const from = static_cast<const std::uint16_t*>(p.v) + head * p.v_head_stride;
    auto* const to =
        reinterpret_cast<uint4*>(p.v_tiles) + (head * (p.rows / kTileTokens) + row / kTileTokens) * kDim;
#pragma unroll 1
    for (int dim = threadIdx.x % 32 * 4; dim < kDim; dim += 128) {
      uint2 x[kTileTokens];
#pragma unroll
      for (int t = 0; t < kTileTokens; ++t) {
        x[t] = t < count ? *reinterpret_cast<const uint2*>(from + (token + t) * p.v_token_stride + dim)
                         : uint2{};
      }
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const auto value = [&](int t) {
          const float y = half_of(d / 2 == 0 ? x[t].x : x[t].y, d % 2, kBFloat16);
          return fmaf(0.0f, y, y * inverse);  // NaN of an infinity
        };
        const auto quad = [&](int t) {
          return pack_e4m3x4(value(2 * t), value(2 * t + 1), value(2 * t + 8), value(2 * t + 9));
        };
        to[dim + d] = {quad(0), quad(1), quad(2), quad(3)};
      }
    }
  }
};

/// The power of two of a request's V, by a warp.
__device__ fp8_row::Row value_row(const StageTensorsParams& p, int request, int head) {
  const std::int64_t begin = first_run(p.cu_kv[request], request);
  const int runs = (p.present[request] + kValueRun - 1) / kValueRun;
  const float* const maxima = p.run_maxima + head * value_runs(p.tokens, p.batch) + begin;
  std::uint32_t most = 0;
  for (int i = threadIdx.x % 32; i < runs; i += 32) most = max(most, __float_as_uint(maxima[i]));
  return fp8_row::row_of(__reduce_max_sync(~0u, most));
}

template <int kLanes, bool kBFloat16>
__device__ void stage_item(const StageTensorsParams& p, std::int64_t first_row, int head) {
  int request = -1;
  fp8_row::Row unit{};
  const std::int64_t end = min(first_row + kItemTiles * kTileTokens, std::int64_t{p.first[p.batch]});
#pragma unroll 1
  for (std::int64_t row = first_row; row < end; row += kTileTokens) {
    if (request < 0 || row >= p.first[request + 1]) {
      request = find_request(p.batch, row, [&](int r) { return std::int64_t{p.first[r]}; });
      unit = value_row(p, request, head);
    }
    const std::int64_t own = row - p.first[request];
    const TensorTile tile{p, head, row, p.cu_kv[request] + own,
                          static_cast<int>(min(p.present[request] - own, std::int64_t{kTileTokens}))};
    if (own == 0 && threadIdx.x % 32 == 0) p.v_units[request * p.heads + head] = unit.scale;
    tile.stage_keys<kLanes, kBFloat16>();
    tile.stage_values<kLanes, kBFloat16>(unit.inverse);
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads, kCtas)
    stage_tensors(const __grid_constant__ StageTensorsParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  constexpr int kRows = kItemTiles * kTileTokens;
  const std::int64_t per_head = (std::int64_t{p.first[p.batch]} + kRows - 1) / kRows;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; item < per_head * p.heads;
       item += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t first_row = item / p.heads * kRows;
    const int head = static_cast<int>(item % p.heads);
    if (p.type == DType::kBFloat16) {
      stage_item<kLanes, true>(p, first_row, head);
    } else {
      stage_item<kLanes, false>(p, first_row, head);
    }
  }
}

}  // namespace

int launch_stage_tensors(const StageTensorsParams& p, void* stream) {
  const bool narrow = p.dim == 128;
  const void* argument = &p;
  const dim3 runs(static_cast<unsigned>(value_runs(p.tokens, p.batch) * p.heads));
  const void* const measure = narrow ? reinterpret_cast<const void*>(&measure_values<16>)
                                     : reinterpret_cast<const void*>(&measure_values<32>);
  cudaError_t status = launch_early(measure, runs, dim3(kThreads), &argument, stream);
  if (status != cudaSuccess) return status;
  const std::int64_t items = (p.rows + kItemTiles * kTileTokens - 1) / (kItemTiles * kTileTokens) * p.heads;
  unsigned blocks = 0;
  status = limit_blocks((items + kWarps - 1) / kWarps, kCtas, blocks);
  if (status != cudaSuccess) return status;
  const void* const stage = narrow ? reinterpret_cast<const void*>(&stage_tensors<16>)
                                   : reinterpret_cast<const void*>(&stage_tensors<32>);
  return launch_early(stage, dim3(blocks), dim3(kThreads), &argument, stream);
}

}  // namespace halftone::cuda
