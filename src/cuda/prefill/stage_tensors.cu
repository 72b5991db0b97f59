#include "cuda/prefill/stage_tensors.h"

#include <cstdint>
#include <type_traits>

#include "cuda/device/lanes.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.h"
#include "cuda/device/range.h"
#include "cuda/device/search.h"
#include "cuda/prefill/codes.h"
#include "cuda/prefill/stage.h"
#include "format/fp8_row.h"

namespace halftone::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocks = 2;  // of an SM
constexpr std::uint32_t kInfinity = 0x7f800000u;

/// Keys of a request that there are.
__device__ std::int32_t present_keys(const StageTensorsParams& p, int request) {
  const std::int64_t first = p.cu_kv[request];
  if (first < 0 || first >= p.tokens) return 0;
  return static_cast<std::int32_t>(min(std::int64_t{p.kv_lengths[request]}, p.tokens - first));
}

__device__ std::int64_t padded_keys(std::int64_t keys) {
  return (keys + kTileTokens - 1) / kTileTokens * kTileTokens;
}

/// Of one request value_run() tokens from token `number` times as many of it on. Runs are numbered through
/// the requests.
struct Run {
  int request;
  int number;
  std::int64_t first_row;  // of the request
  std::int32_t keys;       // likewise
};

/// Of a block.
struct StageShared {
  std::int64_t sums[kWarps];
  Run run;
  std::uint32_t most[2][kWarps];
};

/// By all of a block: the sum of what threads up to this one have. Adds all to `before`.
__device__ std::int64_t sum_up_to(std::int64_t own, std::int64_t& before, StageShared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::int64_t sum = own;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const std::int64_t other = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += other;
  }
  if (lane == 31) s.sums[warp] = sum;
  __syncthreads();
  std::int64_t all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    sum += w < warp ? s.sums[w] : 0;
    all += s.sums[w];
  }
  sum += before;
  before += all;
  __syncthreads();
  return sum;
}

/// Requests one after the other, kThreads at a time: those from `base` on come next, behind so many rows and
/// runs.
struct Scan {
  int base = 0;
  std::int64_t rows = 0, runs = 0;
};

/// By all of a block: hands each request to `use` as run 0 of it, by a thread, with the number of that among
/// all and how many it has. Ends behind the last request, or at those that run `last` is among.
template <class Use>
__device__ void scan_requests(const StageTensorsParams& p, StageShared& s, Scan& at, std::int64_t last,
                              const Use& use) {
  while (at.base < p.batch) {
    std::int64_t rows = at.rows, runs = at.runs;
    const int r = at.base + static_cast<int>(threadIdx.x);
    const std::int32_t there = r < p.batch ? present_keys(p, r) : 0;
    const std::int64_t padded = padded_keys(there), first_row = sum_up_to(padded, rows, s) - padded;
    // What has no room is no key.
    const std::int64_t room = max(p.rows - first_row, std::int64_t{0});
    const auto keys = static_cast<std::int32_t>(min(std::int64_t{there}, room));
    const std::int64_t own = (keys + value_run(p.value_dim) - 1) / value_run(p.value_dim);
    const std::int64_t first = sum_up_to(own, runs, s) - own;
    if (r < p.batch) use(Run{r, 0, first_row, keys}, first, own);
    if (last < runs) return;
    at = {at.base + kThreads, rows, runs};
  }
}

/// Run `index`, which is not before that of the call before, comes to the block's memory.
__device__ void find_run(const StageTensorsParams& p, std::int64_t index, Scan& at, StageShared& s) {
  scan_requests(p, s, at, index, [&](const Run& begin, std::int64_t first, std::int64_t runs) {
    if (index < first || index >= first + runs) return;
    s.run = begin;
    s.run.number = static_cast<int>(index - first);
  });
  __syncthreads();
}

/// By all of a block: how many runs there are. `writes`: leaves in the workspace where requests begin, and
/// which runs they have.
__device__ std::int64_t count_runs(const StageTensorsParams& p, bool writes, StageShared& s) {
  Scan at;
  scan_requests(p, s, at, INT64_MAX, [&](const Run& begin, std::int64_t first, std::int64_t) {
    if (!writes) return;
    p.first[begin.request] = static_cast<std::int32_t>(min(begin.first_row, p.rows));
    p.present[begin.request] = begin.keys;
    p.first_run[begin.request] = static_cast<std::int32_t>(first);
  });
  if (writes && threadIdx.x == 0) p.first_run[p.batch] = static_cast<std::int32_t>(at.runs);
  return at.runs;
}

/// Of a tile of 16 tokens of a head up to 128 dims of V, and as large a part of the rows of K, by a warp.
template <int kValueDim, bool kBFloat16>
struct TensorTile {
  static constexpr int kParts = value_parts(kValueDim), kDims = kValueDim / kParts;
  static constexpr int kPairs = (kDims + 63) / 64;  // of dims of V, of a lane; some lanes may have none
  static_assert(kPairs == 1 || kPairs == 2);
  static constexpr int kValues = kValueDim;
  const StageTensorsParams& p;
  int head, part;
  std::int64_t row;    // its first staged one
  std::int64_t token;  // and that one's in the tensors
  int count;           // of its tokens that there are

  /// V: two or four dims of all tokens a lane.
  using Pairs = std::conditional_t<kPairs == 2, uint2, std::uint32_t>;
  using Values = Pairs[kTileTokens];
  __device__ int first_dim() const { return part * kDims + threadIdx.x % 32 * (2 * kPairs); }
  __device__ static bool has_values() {
    return threadIdx.x % 32 < static_cast<unsigned>(kDims / (2 * kPairs));
  }
  static __device__ std::uint32_t pair(const Pairs& x, int i) {
    if constexpr (kPairs == 2) {
      return i == 0 ? x.x : x.y;
    } else {
      return x;
    }
  }
  __device__ void load_values(Values& x) const {
    const auto* const from = static_cast<const std::uint16_t*>(p.v) + token * p.v_token_stride +
                             head * p.v_head_stride + first_dim();
#pragma unroll
    for (int t = 0; t < kTileTokens; ++t) {
      const bool wanted = t < count && has_values();
      x[t] = wanted ? *reinterpret_cast<const Pairs*>(from + t * p.v_token_stride) : Pairs{};
    }
  }
  /// Bits of the lane's largest magnitude that is finite.
  static __device__ std::uint32_t largest(const Values& x) {
    std::uint32_t larger = 0;
#pragma unroll
    for (const Pairs& own : x) {
      larger = larger_pair<kBFloat16, false>(
          larger, larger_pair<kBFloat16, false>(pair(own, 0), pair(own, kPairs - 1)));
    }
    std::uint32_t most = larger_bits<kBFloat16>(larger);
    if (most < kInfinity) return most;
    most = 0;
#pragma unroll
    for (const Pairs& own : x) {
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        const std::uint32_t bits = magnitude_bits(half_of(pair(own, i / 2), i % 2, kBFloat16));
        most = bits < kInfinity ? max(most, bits) : most;
      }
    }
    return most;
  }
  __device__ void store_values(const Values& x, float inverse) const {
    if (!has_values()) return;
    auto* const to = reinterpret_cast<uint4*>(p.v_tiles) +
                     (head * (p.rows / kTileTokens) + row / kTileTokens) * kValueDim + first_dim();
#pragma unroll
    for (int d = 0; d < 2 * kPairs; ++d) {
      const auto value = [&](int t) {
        return divided_value(half_of(pair(x[t], d / 2), d % 2, kBFloat16), inverse);
      };
      const auto quad = [&](int t) {
        return pack_e4m3x4(value(2 * t), value(2 * t + 1), value(2 * t + 8), value(2 * t + 9));
      };
      to[d] = {quad(0), quad(1), quad(2), quad(3)};
    }
  }

  /// K by rows of so many lanes, of which some may be left over.
  template <int kKeyDim>
  __device__ void stage_keys() const {
    constexpr int kLanes = lanes_of(kKeyDim);
    constexpr int kHalves = is_wide(kKeyDim) ? 2 : 1;
    constexpr int kRows = 32 / kLanes, kEach = 4, kOwn = kTileTokens / kParts;
    static_assert(kOwn % (kEach * kRows) == 0);
    const int lane = threadIdx.x % 32, chunk = lane % kLanes;
    const bool live = kKeyDim >= 8 * kLanes || chunk < kKeyDim / 8;
    const auto* const from = static_cast<const std::uint16_t*>(p.k) + head * p.k_head_stride + chunk * 8;
    const int begin = part * kOwn + lane / kLanes;
#pragma unroll 1
    for (int first = begin; first < begin + kOwn; first += kEach * kRows) {
      uint4 x[kEach][kHalves];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int own = first + i * kRows;
        const auto* const at = reinterpret_cast<const uint4*>(from + (token + own) * p.k_token_stride);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) x[i][h] = own < count && live ? at[h * kHalfChunks] : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        std::uint32_t larger = larger_pair<kBFloat16>(x[i][0]);
#pragma unroll
        for (int h = 1; h < kHalves; ++h) {
          larger = larger_pair<kBFloat16>(larger, larger_pair<kBFloat16>(x[i][h]));
        }
#pragma unroll
        for (int away = kLanes / 2; away > 0; away /= 2) {
          larger = larger_pair<kBFloat16>(larger, __shfl_xor_sync(~0u, larger, away));
        }
        const float scale = e4m3_scale(larger_bits<kBFloat16>(larger));
        const float inverse = inverse_power(scale);
        if (!live) continue;
        const std::int64_t at = row + first + i * kRows;
        auto* const to = reinterpret_cast<uint2*>(p.k_codes + (at * p.heads + head) * kKeyDim);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          float v[8];
          unpack(x[i][h], kBFloat16, v);
#pragma unroll
          for (float& y : v) y *= inverse;
          to[code_chunk(chunk) + h * kHalfChunks] = e4m3_codes(v);
        }
        if (chunk == 0) p.k_scales[head * p.rows + at] = scale;
      }
    }
  }
};

/// What warp `number` has of a run.
template <class Tile>
__device__ Tile tile_of(const StageTensorsParams& p, const Run& run, int head, int number) {
  constexpr int kParts = Tile::kParts;
  static_assert(value_run(Tile::kValues) * kParts == kWarps * kTileTokens);
  const int own = (run.number * (kWarps / kParts) + number / kParts) * kTileTokens;  // token of the request
  return {p,
          head,
          number % kParts,
          run.first_row + own,
          p.cu_kv[run.request] + std::int64_t{own},
          min(run.keys - own, kTileTokens)};
}

/// A run of a head by a block. V as if the largest value of the run were that of all.
template <int kKeyDim, class Tile>
__device__ void stage_run(const StageTensorsParams& p, const Run& run, int index, int head,
                          std::uint32_t (&most)[kWarps]) {
  const Tile tile = tile_of<Tile>(p, run, head, threadIdx.x / 32);
  typename Tile::Values values = {};
  if (tile.count > 0) {
    tile.load_values(values);
    tile.template stage_keys<kKeyDim>();
  }
  const std::uint32_t own = __reduce_max_sync(~0u, Tile::largest(values));
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own;
  __syncthreads();
  std::uint32_t of_run = 0;
  for (const std::uint32_t bits : most) of_run = max(of_run, bits);
  if (tile.count > 0) tile.store_values(values, fp8_row::row_of(of_run).inverse);
  if (threadIdx.x == 0)
    p.run_maxima[head * value_runs(p.rows, p.batch, p.value_dim) + index] = __uint_as_float(of_run);
}

/// Blocks have equally many runs, of one head after the other.
template <int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kThreads, kBlocks)
    stage_tensors(const __grid_constant__ StageTensorsParams p) {
  __shared__ StageShared shared;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t runs = count_runs(p, blockIdx.x == 0, shared);
  const std::int64_t all = runs * p.heads, first = all * blockIdx.x / gridDim.x;
  int left = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first);
  int index = static_cast<int>(first / p.heads), head = static_cast<int>(first % p.heads);
  bool found = false;
  Scan at;
#pragma unroll 1
  for (; left > 0; --left) {
    if (!found) find_run(p, index, at, shared);
    if (p.type == DType::kBFloat16) {
      stage_run<kKeyDim, TensorTile<kValueDim, true>>(p, shared.run, index, head, shared.most[left % 2]);
    } else {
      stage_run<kKeyDim, TensorTile<kValueDim, false>>(p, shared.run, index, head, shared.most[left % 2]);
    }
    found = ++head < p.heads;
    if (!found) head = 0, ++index;
  }
}

/// The power of two of V of a request and head, by a warp.
__device__ fp8_row::Row value_row(const float* maxima, int runs) {
  std::uint32_t most = 0;
  for (int i = threadIdx.x % 32; i < runs; i += 32) most = max(most, __float_as_uint(maxima[i]));
  return fp8_row::row_of(__reduce_max_sync(~0u, most));
}

/// What a warp finds of a run of a head.
struct Settled {
  Run run;
  int head;
  float inverse;  // of the power of two of V; 0: that of the run is the same
};

__device__ Settled settle_run(const StageTensorsParams& p, int index, int head) {
  const int request = last_begun(p.first_run, p.batch, index), first = p.first_run[request];
  const float* const maxima = p.run_maxima + head * value_runs(p.rows, p.batch, p.value_dim) + first;
  const int number = index - first;
  const fp8_row::Row unit = value_row(maxima, p.first_run[request + 1] - first),
                     own = fp8_row::row_of(__float_as_uint(maxima[number]));
  if (number == 0 && threadIdx.x % 32 == 0) p.v_units[request * p.heads + head] = unit.scale;
  return {{request, number, p.first[request], p.present[request]},
          head,
          own.scale == unit.scale ? 0.0f : unit.inverse};
}

/// V anew of runs whose largest value is of another power of two than that of all of the request. A run by
/// each warp, what is to be done by all of the block.
template <int kValueDim>
__global__ void __launch_bounds__(kThreads, kBlocks)
    settle_values(const __grid_constant__ StageTensorsParams p) {
  __shared__ Settled settled[kWarps];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int warp = threadIdx.x / 32;
  const std::int64_t item = std::int64_t{blockIdx.x} * kWarps + warp;
  Settled own{};
  if (item < std::int64_t{p.first_run[p.batch]} * p.heads) {
    own = settle_run(p, static_cast<int>(item / p.heads), static_cast<int>(item % p.heads));
  }
  if (threadIdx.x % 32 == 0) settled[warp] = own;
  __syncthreads();
  const auto restage = [&]<bool kBFloat16>(const Settled& of) {
    using Tile = TensorTile<kValueDim, kBFloat16>;
    const Tile tile = tile_of<Tile>(p, of.run, of.head, warp);
    if (tile.count <= 0) return;
    typename Tile::Values values;
    tile.load_values(values);
    tile.store_values(values, of.inverse);
  };
#pragma unroll 1
  for (const Settled& of : settled) {
    if (of.inverse == 0.0f) continue;
    if (p.type == DType::kBFloat16) {
      restage.template operator()<true>(of);
    } else {
      restage.template operator()<false>(of);
    }
  }
}

struct Kernels {
  const void *stage, *settle;
};
template <int kKeyDim, int kValueDim>
Kernels kernels_of() {
  return {reinterpret_cast<const void*>(&stage_tensors<kKeyDim, kValueDim>),
          reinterpret_cast<const void*>(&settle_values<kValueDim>)};
}

}  // namespace

int launch_stage_tensors(const StageTensorsParams& p, void* stream) {
  const Kernels kernels = p.key_dim == 64      ? kernels_of<64, 64>()
                          : p.key_dim == 128   ? kernels_of<128, 128>()
                          : p.key_dim == 256   ? kernels_of<256, 256>()
                          : p.key_dim == 512   ? kernels_of<512, 512>()
                          : p.value_dim == 128 ? kernels_of<192, 128>()
                                               : kernels_of<192, 192>();
  const void* argument = &p;
  const std::int64_t items = value_runs(p.rows, p.batch, p.value_dim) * p.heads;
  unsigned blocks = 0;
  const cudaError_t status = limit_blocks(items, kBlocks, blocks);
  if (status != cudaSuccess) return status;
  const cudaError_t staged = launch_early(kernels.stage, dim3(blocks), dim3(kThreads), &argument, stream);
  if (staged != cudaSuccess) return staged;
  const auto checked = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  return launch_early(kernels.settle, dim3(checked), dim3(kThreads), &argument, stream);
}

}  // namespace halftone::cuda
