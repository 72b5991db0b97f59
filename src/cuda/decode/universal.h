// The universal decode kernel: every paged problem that the table of decode/config.h lacks. Formats, K's
// head_dim and the types of Q and O are run-time values; arithmetic is fp32.
//
// A warp takes every n-th tile of an item by itself: it turns K into floats in shared memory, computes the
// logits of all rows, turns V into floats in the same place and adds to O. At the end of an item the warps'
// states are merged as those of the teams of the other kernels are (attention/finish.h).
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/attention/logits.h"
#include "cuda/attention/pages.h"
#include "cuda/device/chunk.h"
#include "cuda/device/reduce.h"
#include "format/head_dim.h"
#include "format/status.h"

namespace halftone::cuda {

inline constexpr int kUniversalUnitRows = 8;  // packed rows of a unit
inline constexpr int kUniversalMaxWarps = 12;
inline constexpr int kUniversalPad = 4;  // floats: spreads the rows of a tile over the banks
inline constexpr int kUniversalQueryStride = kHeadDims.back() + kUniversalPad;

/// What attention/finish.h needs to know.
template <int kVDim>
struct UniversalTraits {
  static constexpr int kDim = kVDim;
  static constexpr int kQuads = (kDim + 127) / 128;
  static constexpr int kWarps = kDim > 256 ? 6 : kDim > 128 ? 8 : kUniversalMaxWarps;  // at most
  static constexpr int kRowLanes = 32;
  static constexpr bool kAnyOutput = true;
};

/// Warps that the tiles of a problem leave room for.
constexpr int universal_warps(int head_dim, int v_dim) {
  const int dim = head_dim > v_dim ? head_dim : v_dim;
  return dim > 256 ? 6 : dim > 128 ? 8 : kUniversalMaxWarps;
}

/// Floats from a row of a tile to the next.
HT_HOST_DEVICE constexpr int universal_tile_stride(int head_dim, int v_dim) {
  return (head_dim > v_dim ? head_dim : v_dim) + kUniversalPad;
}

struct UniversalShared {
  ItemQueue queue;
  alignas(16) ChunkPlace places[2][kHeadDims.back() / kChunk];  // of K and V
  RowPlace rows[kUniversalUnitRows];
  float2 states[kUniversalMaxWarps][kUniversalUnitRows];  // maximum (base 2), sum
  alignas(16) float queries[kUniversalUnitRows][kUniversalQueryStride];
  alignas(16) float probabilities[kUniversalMaxWarps][kTileTokens][kUniversalUnitRows + kUniversalPad];
  // A tile of each warp follows, [kTileTokens][universal_tile_stride()]: K, then V; its rows of O in the end.
  __device__ float* tile(int warp, int stride) {
    return reinterpret_cast<float*>(this + 1) + warp * (kTileTokens * stride);
  }
};
static_assert(sizeof(UniversalShared) % 16 == 0 && kUniversalUnitRows <= kTileTokens);

constexpr int universal_shared_bytes(int head_dim, int v_dim) {
  return static_cast<int>(sizeof(UniversalShared)) + universal_warps(head_dim, v_dim) * kTileTokens *
                                                         universal_tile_stride(head_dim, v_dim) *
                                                         int{sizeof(float)};
}

__device__ inline int universal_block_warps() { return static_cast<int>(blockDim.x) / 32; }

/// hadamard::rotate() by a warp, in shared memory.
__device__ inline void rotate_shared(float* x, int dim, int lane) {
  const int block = hadamard::block_size(dim);
  __syncwarp();
#pragma unroll 1
  for (int h = 1; h < block; h *= 2) {
#pragma unroll 1
    for (int pair = lane; pair < dim / 2; pair += 32) {
      float* at = x + (2 * pair - (pair & (h - 1)));
      const float a = at[0], b = at[h];
      at[0] = a + b;
      at[h] = a - b;
    }
    __syncwarp();
  }
#pragma unroll 1
  for (int i = lane; i < dim; i += 32) x[i] *= hadamard::factor(block);
}

/// A lane's share of a tile as floats. Tokens outside of [first, last) become zeros: a NaN there must not
/// reach O by way of a probability of zero.
template <DType kType, bool kAsymmetric>
__device__ inline void unpack_tile(const page::Part& part, const float* static_scale, const float* static_min,
                                   const ChunkPlace* places, const std::uint8_t* tile, int first, int last,
                                   float* rows, int stride, int lane) {
  using Load = ChunkLoad<kType, kAsymmetric>;
  const int lanes = lanes_of(part.dim);
#pragma unroll 1
  for (int chunk = lane & (lanes - 1); chunk < part.dim / kChunk; chunk += lanes) {
    const Load load(places[chunk]);
    const int group = part.groups > 1 ? chunk * kChunk / part.format.group_size : 0;
#pragma unroll 1
    for (int t = lane / lanes; t < 4; t += 32 / lanes) {
      typename Load::Codes codes[kLaneRows];
      codec::Params params[kLaneRows];
      load.load(tile + part.data_offset, t, codes);
      if constexpr (Load::kBits != 16) {
        load_params<kAsymmetric>(part, static_scale, static_min, tile, t, group, params);
      }
#pragma unroll
      for (int k = 0; k < kLaneRows; ++k) {
        const int token = lane_token(t, k);
        float x[kChunk];
        codes[k].decode(params[k], x);
        const bool seen = token >= first && token < last;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = seen ? x[i] : 0.0f;
        float4* to = reinterpret_cast<float4*>(rows + token * stride + chunk * kChunk);
        to[0] = {x[0], x[1], x[2], x[3]};
        to[1] = {x[4], x[5], x[6], x[7]};
      }
    }
  }
}

/// An item as one warp sees it: lane l has the logits of token l % 16 of a tile with rows 2 i + l / 16, and
/// the dims 4 l + 128 j + 0..3 of all rows of O.
template <int kVDim>
struct UniversalWarp {
  using Traits = UniversalTraits<kVDim>;
  using Dims = Row<kVDim, Traits::kRowLanes>;
  static constexpr int kPairs = kUniversalUnitRows / 2;

  const AttentionParams& p;
  UniversalShared& s;
  float max[kPairs], sum[kPairs];
  float4 out[kUniversalUnitRows][Traits::kQuads];

  /// All tiles of the item that are this warp's.
  __device__ void attend(const DeviceItem& item) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) max[i] = kMinus, sum[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kUniversalUnitRows; ++r) {
#pragma unroll
      for (int j = 0; j < Traits::kQuads; ++j) out[r][j] = {};
    }
    const planning::WorkItem& work = item.work;
    int token = work.kv_begin + thread_index() / 32 * kTileTokens;
    const std::uint8_t* at = find(work, token);
#pragma unroll 1
    while (token < work.kv_end) {
      const int next_token = token + universal_block_warps() * kTileTokens;
      const std::uint8_t* next = find(work, next_token);
      for (int i = thread_index() % 32 * 128; next != nullptr && i < p.cache.tile_bytes; i += 32 * 128) {
        prefetch_to_l2(next + i);
      }
      if (at != nullptr) take(work, at, token);
      token = next_token;
      at = next;
    }
    leave();
  }

 private:
  // Read and computed anew wherever they are asked for: registers are scarce.
  static __device__ int lane() { return thread_index() % 32; }
  __device__ int stride() const { return universal_tile_stride(p.parts[0].dim, kVDim); }
  __device__ float* tile() const { return s.tile(thread_index() / 32, stride()); }  // floats of K, then of V

  /// The tile of token `token`; null beyond the item and where the table has no page.
  __device__ const std::uint8_t* find(const planning::WorkItem& work, int token) const {
    if (token >= work.kv_end) return nullptr;
    const CacheView& c = p.cache;
    const int page = page_entry(c, table_row(c, work.request), token >> c.page_log2);
    if (!has_page(p, page)) return nullptr;
    const int index = (token & ((1 << c.page_log2) - 1)) / kTileTokens;
    return page_head(c, page, work.kv_head) + index * c.tile_bytes;
  }

  /// One tile: its K, the probabilities, its V, O.
  __device__ void take(const planning::WorkItem& work, const std::uint8_t* at, int token) {
    const int first = s.rows[0].position - token - p.window_left, last = work.kv_end - token;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {  // one copy of the code of all formats
      __syncwarp();
      unpack(which, work.kv_head, at, first, last);
      __syncwarp();
      if (which == 0) {
        weigh(token, work.kv_end);
      } else {
        accumulate();
      }
    }
  }

  __device__ void unpack(int which, int head, const std::uint8_t* at, int first, int last) {
    const page::Part& part = p.parts[which];
    const ParamView& view = which == 0 ? p.k : p.v;
    const float* scale = view.static_scale + head * view.static_stride;
    const float* min = view.static_min + head * view.static_stride;
    const ChunkPlace* places = s.places[which];
    const auto unpack_as = [&]<DType kType, bool kAsymmetric>() {
      unpack_tile<kType, kAsymmetric>(part, scale, min, places, at, first, last, tile(), stride(), lane());
    };
    switch (part.format.dtype) {
      case DType::kFloat16:
        return unpack_as.template operator()<DType::kFloat16, false>();
      case DType::kFloat8E4M3:
        return unpack_as.template operator()<DType::kFloat8E4M3, false>();
      case DType::kInt8:
        return part.format.asymmetric ? unpack_as.template operator()<DType::kInt8, true>()
                                      : unpack_as.template operator()<DType::kInt8, false>();
      case DType::kInt4:
        return part.format.asymmetric ? unpack_as.template operator()<DType::kInt4, true>()
                                      : unpack_as.template operator()<DType::kInt4, false>();
      default:
        return unpack_as.template operator()<DType::kBFloat16, false>();
    }
  }

  static __device__ float dot(const float4& a, const float4& b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  }

  /// Logits of all rows with the tile that begins at `token`, and their probabilities.
  __device__ void weigh(int token, int end) {
    const int at = lane() % 16, half = lane() / 16;
    const float *key = tile() + at * stride(), *query = s.queries[half];
    float x[kPairs] = {}, odd[kPairs] = {};  // two sums each: shorter chains
#pragma unroll 1
    for (int d = 0; d < p.parts[0].dim; d += 8) {
      const float4 low = *reinterpret_cast<const float4*>(key + d);
      const float4 high = *reinterpret_cast<const float4*>(key + d + 4);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float4* q = reinterpret_cast<const float4*>(query + 2 * i * kUniversalQueryStride + d);
        x[i] = dot(low, q[0], x[i]);
        odd[i] = dot(high, q[1], odd[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) x[i] += odd[i];
    const auto position = [&](int row) { return s.rows[2 * row + half].position; };
    const auto slope = [&](int row) { return s.rows[2 * row + half].slope; };
    cap_logits<OneKey>(
        p, ExactSoftcap(p), [&](int) { return p.scale_log2; }, x);
    bias_logits<OneKey>(position, slope, token + at, x);  // without ALiBi slopes are 0
    mask_unseen<OneKey>(p, position, token + at, end, x);
    float raised[kPairs];
    bool rises = false;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      raised[i] = fmaxf(max[i], largest_of_lanes<1, 16>(x[i]));
      rises |= raised[i] > max[i];
    }
    if (__any_sync(~0u, rises)) rescale(raised);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float probability = exp2_approx(x[i] - (max[i] == kMinus ? 0.0f : max[i]));
      sum[i] += probability;
      s.probabilities[thread_index() / 32][at][2 * i + half] = probability;
    }
  }

  __device__ void rescale(const float (&raised)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float weight = raised[i] == kMinus ? 1.0f : exp2_approx(max[i] - raised[i]);
      max[i] = raised[i];
      sum[i] *= weight;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float w = __shfl_sync(~0u, weight, 16 * half);
#pragma unroll
        for (int j = 0; j < Traits::kQuads; ++j) {
          float4& o = out[2 * i + half][j];
          o.x *= w, o.y *= w, o.z *= w, o.w *= w;
        }
      }
    }
  }

  /// O += P V over the tile.
  __device__ void accumulate() {
    const float* rows = tile();
    const int dims = lane() * 4, step = stride();
#pragma unroll 2
    for (int t = 0; t < kTileTokens; ++t) {
      float4 v[Traits::kQuads];
#pragma unroll
      for (int j = 0; j < Traits::kQuads; ++j) {  // lanes beyond the dims repeat the last ones
        v[j] = *reinterpret_cast<const float4*>(rows + t * step + min(dims + j * 128, kVDim - 4));
      }
      const float4* quads = reinterpret_cast<const float4*>(s.probabilities[thread_index() / 32][t]);
#pragma unroll
      for (int r = 0; r < kUniversalUnitRows; r += 4) {
        const float4 w = quads[r / 4];
#pragma unroll
        for (int j = 0; j < Traits::kQuads; ++j) {
          add(out[r][j], v[j], w.x), add(out[r + 1][j], v[j], w.y);
          add(out[r + 2][j], v[j], w.z), add(out[r + 3][j], v[j], w.w);
        }
      }
    }
  }
  static __device__ void add(float4& x, const float4& y, float w) {
    x.x = fmaf(y.x, w, x.x), x.y = fmaf(y.y, w, x.y), x.z = fmaf(y.z, w, x.z), x.w = fmaf(y.w, w, x.w);
  }

  /// The state of the item, for those who merge it.
  __device__ void leave() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      sum[i] = sum_of_lanes<1, 16>(sum[i]);
      if (lane() % 16 == 0) s.states[thread_index() / 32][2 * i + lane() / 16] = {max[i], sum[i]};
    }
    __syncwarp();
    float* rows = tile() + lane() * 4;
    const int step = stride();
#pragma unroll
    for (int r = 0; r < kUniversalUnitRows; ++r) {
#pragma unroll
      for (int j = 0; j < Traits::kQuads; ++j) {
        if (Dims::has(j, lane())) *reinterpret_cast<float4*>(rows + r * step + j * 128) = out[r][j];
      }
    }
  }
};

/// Brings the rows of an item, in the basis in which K is stored; rows that it does not have are zeros.
__device__ inline void load_queries(const AttentionParams& p, const DeviceItem& item, UniversalShared& s,
                                    int warp, int warps) {
  const int lane = thread_index() % 32;
  const int dim = p.parts[0].dim, rows = item.work.row_end - item.work.row_begin;
#pragma unroll 1
  for (int row = warp; row < kUniversalUnitRows; row += warps) {
    RowPlace place = place_of(p, item, row);
    float* query = s.queries[row];
    const std::int64_t at = place.token * p.q_token_stride + place.head * p.q_head_stride;
#pragma unroll 1
    for (int d = lane; d < dim; d += 32) {
      query[d] = row < rows ? load_value(p.q_type, p.q, at + d) : 0.0f;
      query[d] = p.channels.folded(query[d], item.work.kv_head * dim + d);
    }
    if (p.rotate_k) rotate_shared(query, dim, lane);
    if (row < rows) place.slope = slope_of(p, place.head);
    if (lane == 0) s.rows[row] = place;
  }
}

/// One worker of the schedule: a thread block.
template <int kVDim>
__device__ inline void universal_worker(const AttentionParams& p, UniversalShared& s) {
  using Traits = UniversalTraits<kVDim>;
  const int warps = universal_block_warps(), worker = static_cast<int>(blockIdx.x);
  for (int i = thread_index(); i < 2 * kHeadDims.back() / kChunk; i += static_cast<int>(blockDim.x)) {
    const int chunk = i / 2;
    const page::Part& part = p.parts[i % 2];
    if (chunk < part.dim / kChunk) {
      s.places[i % 2][chunk] = ChunkPlace(part, chunk, dtype_bits(part.format.dtype));
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (thread_index() < 32) {
    const int lane = thread_index();
    s.queue.start(ItemQueue::fetch(p.list, worker, lane), bounds_of(p), lane);
    check_inputs(p, worker, lane);
  }
#pragma unroll 1
  for (int index = 0;; ++index) {
    __syncthreads();  // the item before is finished
    if (thread_index() == 0) {
      s.queue.current = index;
      s.queue.extend(index, p.schedule, bounds_of(p), worker);
    }
    __syncthreads();
    if (!s.queue.has(index)) return;
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    load_queries(p, item, s, thread_index() / 32, warps);
    __syncthreads();
    UniversalWarp<kVDim>{p, s}.attend(item);
    __syncthreads();
    const auto states_of = [&](int row) -> Parts {
      const int stride = universal_tile_stride(p.parts[0].dim, kVDim);
      return {&s.states[0][row], s.tile(0, stride) + row * stride, kUniversalUnitRows, kTileTokens * stride,
              warps};
    };
    finish_item<Traits, 1>(p, item, states_of, thread_index() / 32, warps, thread_index() % 32);
  }
}

}  // namespace halftone::cuda
