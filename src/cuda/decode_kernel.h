// Decode attention for up to 16 packed query rows of a KV head: persistent CTAs, one per worker of the schedule.
//
// Each of the 8 warps owns a ring of tiles that its lane 0 refills with bulk copies, and its own softmax state:
//   load     one bulk copy per piece (kPieceTiles tiles of 16 tokens, K, V and scales together)
//   compute  S^T = K Q^T and O^T += V^T P^T, the cache as register operand A, straight from the packed words
//   finish   the eight states are merged in shared memory; output, or a partial slot for a cut unit
// Logits are in base 2 throughout; docs/kernels.md derives the bounds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/decode_config.h"
#include "cuda/device/dequant.h"
#include "cuda/device/ptx.h"
#include "cuda/params.h"
#include "format/hadamard.h"

namespace halftone::cuda {

template <DecodeConfig C>
struct DecodeTraits {
  static constexpr int kDim = C.head_dim;
  static constexpr int kBlocks = kDim / 32;
  static constexpr int kRows = 8 * C.row_tiles;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kPad = 4;  // floats: spreads the rows of `out` over the banks

  static constexpr int param_bytes(ScaleMode mode) {  // of K or V of a tile, at most (f32, asymmetric)
    return mode == ScaleMode::kStatic ? 0 : kTileTokens * 8 * (mode == ScaleMode::kToken ? 1 : kBlocks);
  }
  static constexpr int kTileBytes = kTileTokens * kDim * (dtype_bits(C.k) + dtype_bits(C.v)) / 8 +
                                    param_bytes(C.k_mode) + param_bytes(C.v_mode);

  struct Shared {
    alignas(128) std::uint8_t ring[kWarps][C.stages][C.piece_tiles * kTileBytes];
    alignas(16) float q[kRows][kDim + kPad];
    float q_sums[kRows][kBlocks];  // of the rounded, scaled Q, per block of dims
    float q_factor[kRows];         // turns a raw product into a base-2 logit
    alignas(16) float out[kWarps][kRows][kDim + kPad];
    float state[kWarps][kRows][2];  // maximum (base 2), sum
    std::uint64_t full[kWarps][C.stages];
    std::uint32_t live[kWarps][C.stages];  // bit i: tile i of the piece was loaded
    int last_arrival;
  };
};

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLazyRescale = 2.0f;  // P stays below 2^2, so that P * scale fits f16 for scales up to 16,000
inline constexpr float kMinus = -__builtin_huge_valf();

__device__ inline float load_16bit(const void* p, std::int64_t at, bool bf16) {
  return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p)[at])
              : __half2float(static_cast<const __half*>(p)[at]);
}

__device__ inline float load_scale(const std::uint8_t* plane, int index, bool f32) {
  return f32 ? reinterpret_cast<const float*>(plane)[index]
             : __half2float(reinterpret_cast<const __half*>(plane)[index]);
}

/// Two neighbouring stored scales as f16x2.
__device__ inline std::uint32_t load_scale_pair(const std::uint8_t* plane, int index, bool f32) {
  if (!f32) return *reinterpret_cast<const std::uint32_t*>(plane + 2 * index);
  const float2 pair = *reinterpret_cast<const float2*>(plane + 4 * index);
  return pack_f16x2(pair.x, pair.y);
}

/// Walks a warp's pieces over all items of a worker, ahead of the computation.
template <DecodeConfig C>
struct Loader {
  using Traits = DecodeTraits<C>;
  planning::WorkCursor cursor;
  planning::WorkItem item;
  int token;  // first token of the next piece
  bool more;

  __device__ Loader(const planning::Schedule& schedule, int worker, int warp)
      : cursor(schedule, worker), more(cursor.next(item)) {
    if (more) token = item.kv_begin + warp * C.piece_tiles * kTileTokens;
  }

  /// Called by one lane.
  __device__ void load_next(const DecodeParams& p, typename Traits::Shared& s, int warp, int stage,
                            std::uint64_t policy) {
    constexpr int kPieceTokens = C.piece_tiles * kTileTokens;
    while (more && token >= item.kv_end) {
      more = cursor.next(item);
      token = item.kv_begin + warp * kPieceTokens;
    }
    if (!more) return;
    const CacheView& c = p.cache;
    const std::int32_t* table = c.block_table + item.request * c.table_stride;
    const int page_tokens = 1 << c.page_log2;
    const int tiles = min(C.piece_tiles, (item.kv_end - token + kTileTokens - 1) / kTileTokens);
    std::uint32_t live = 0;
    int bytes = 0;
    const std::uint8_t* source[C.piece_tiles];
#pragma unroll
    for (int i = 0; i < C.piece_tiles; ++i) {
      const int at = token + i * kTileTokens;
      if (i < tiles) {
        const int page = table[at >> c.page_log2];
        if (!c.clamped || (page >= 0 && page < c.num_pages)) {
          source[i] = c.pages + page * c.page_stride + item.kv_head * c.head_bytes +
                      ((at & (page_tokens - 1)) / kTileTokens) * c.tile_bytes;
          live |= 1u << i;
          bytes += c.tile_bytes;
        } else if (p.status != nullptr) {
          atomicOr(p.status, 1);
        }
      }
    }
    s.live[warp][stage] = live;
    std::uint64_t* barrier = &s.full[warp][stage];
    barrier_expect_bytes(barrier, bytes);
    if (C.piece_tiles == 2 && live == 3 && page_tokens > kTileTokens) {
      bulk_load(s.ring[warp][stage], source[0], bytes, barrier, policy);
    } else {
#pragma unroll
      for (int i = 0; i < C.piece_tiles; ++i) {
        if (live >> i & 1) {
          bulk_load(s.ring[warp][stage] + i * c.tile_bytes, source[i], c.tile_bytes, barrier, policy);
        }
      }
    }
    token += Traits::kWarps * kPieceTokens;
  }
};

/// Reads the item's query rows into shared memory, rotated and scaled by a power of two per row so that f16 holds them.
template <DecodeConfig C>
__device__ void load_queries(const DecodeParams& p, const planning::WorkItem& item,
                             typename DecodeTraits<C>::Shared& s) {
  using Traits = DecodeTraits<C>;
  const int lane = threadIdx.x % 32, group = p.schedule.params.group;
  const int rows = item.row_end - item.row_begin;
  const std::int64_t first = p.schedule.cu_q[item.request];
  for (int row = threadIdx.x / 32; row < Traits::kRows; row += Traits::kWarps) {
    float x[Traits::kBlocks];
    const int packed = item.row_begin + row, query = packed / group;
    const int head = item.kv_head * group + packed - query * group;
    const std::int64_t at = (first + query) * p.q_token_stride + head * p.q_head_stride + lane;
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) x[b] = row < rows ? load_16bit(p.q, at + b * 32, p.q_bf16) : 0.0f;
    if (p.rotate_k) {
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) s.q[row][b * 32 + lane] = x[b];
      __syncwarp();
      if (lane == 0) hadamard::rotate(s.q[row], Traits::kDim);
      __syncwarp();
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) x[b] = s.q[row][b * 32 + lane];
    }
    float factor = p.scale_log2;
    if constexpr (C.k != DType::kBFloat16) {
      float largest = 0.0f;
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) largest = fmaxf(largest, fabsf(x[b]));
#pragma unroll
      for (int i = 16; i > 0; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
      const int exponent = largest > 0.0f && largest < INFINITY ? ilogbf(largest) : 0;
      factor = ldexpf(factor, exponent);
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) x[b] = __half2float(__float2half_rn(ldexpf(x[b], -exponent)));
    }
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      s.q[row][b * 32 + lane] = x[b];
      float sum = x[b];
#pragma unroll
      for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
      if (lane == 0) s.q_sums[row][b] = sum;
    }
    if (lane == 0) s.q_factor[row] = factor;
  }
}

/// What a warp holds of the current item: Q fragments, softmax state and accumulators.
template <DecodeConfig C>
struct Warp {
  using Traits = DecodeTraits<C>;
  using K = KReader<C.k, Traits::kDim>;
  using V = VReader<C.v, Traits::kDim>;
  static constexpr int kBlocks = Traits::kBlocks;
  static constexpr int N = C.row_tiles;
  static constexpr bool kSplitP = C.v == DType::kBFloat16;  // P as bf16 high + low
  static constexpr bool kVBias = is_integer(C.v);
  static constexpr int kBiases = C.k_mode == ScaleMode::kBlock ? kBlocks : 1;

  std::uint32_t q[kBlocks][2][N][2];  // B fragments of S^T
  std::uint32_t q_low[C.k == DType::kBFloat16 ? kBlocks : 1][2][N][2];  // rest of an f16 Q that bf16 cannot hold
  float bias[kBiases][N][2];          // what an accumulator of K starts from
  std::uint32_t q_sums[2][N];         // B fragment of the product with K's mins
  float total[N][2];                  // sum of Q over all dims
  float factor[N][2];                 // raw product -> base-2 logit
  float max[N][2];                    // of columns 2t, 2t + 1
  float sum[N][2];                    // this lane's share
  float out[kBlocks][2][N][4];        // O^T
  float extra[N][4];                  // row g: sum over tokens of P * min, or of P * scale, of group g
  int lane, g, t;

  __device__ void begin(const DecodeParams& p, const planning::WorkItem& item, const typename Traits::Shared& s);
  __device__ void scores(const DecodeParams& p, const std::uint8_t* tile, float (&x)[N][4]) const;
  __device__ void logits(const DecodeParams& p, const planning::WorkItem& item, int token, bool boundary,
                         bool live, float (&x)[N][4]) const;
  __device__ void rescale(float (&x)[C.piece_tiles][N][4]);
  __device__ void accumulate(const DecodeParams& p, const std::uint8_t* tile, int dead_from, float (&x)[N][4]);
  __device__ void end(const DecodeParams& p, const planning::WorkItem& item, typename Traits::Shared& s, int warp);
};

template <DecodeConfig C>
__device__ inline void Warp<C>::begin(const DecodeParams& p, const planning::WorkItem& item,
                                      const typename Traits::Shared& s) {
  const float k_static = p.k.static_scale == nullptr ? 1.0f : p.k.static_scale[item.kv_head * p.k.static_stride];
  const float unit = C.k == DType::kBFloat16 ? 1.0f : ldexpf(1.0f, -K::kScaleLog2);
  // Codes stand as q + offset; a static min is one more constant per column.
  float offset = !is_integer(C.k) || p.k.asymmetric ? 0.0f : C.k == DType::kInt8 ? -128.0f : -8.0f;
  if (p.k.static_min != nullptr) offset = p.k.static_min[item.kv_head * p.k.static_stride] / k_static;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float* row = s.q[n * 8 + g];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        float x[4];
#pragma unroll
        for (int slot = 0; slot < 4; ++slot) {
          x[slot] = row[b * 32 + t * 8 + K::q_dim(step, slot)] * (K::q_shift(slot) ? 1.0f / 16.0f : 1.0f);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (C.k == DType::kBFloat16) {
            q[b][step][n][i] = pack_bf16x2(x[2 * i], x[2 * i + 1]);
            const float low0 = x[2 * i] - __bfloat162float(__float2bfloat16_rn(x[2 * i]));
            const float low1 = x[2 * i + 1] - __bfloat162float(__float2bfloat16_rn(x[2 * i + 1]));
            q_low[b][step][n][i] = pack_bf16x2(low0, low1);
          } else {
            q[b][step][n][i] = pack_f16x2(x[2 * i], x[2 * i + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + 2 * t + i;
      factor[n][i] = s.q_factor[column] * k_static / unit;
      total[n][i] = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        total[n][i] += s.q_sums[column][b];
        if constexpr (kBiases > 1) bias[b][n][i] = s.q_sums[column][b] * offset * unit;
      }
      if constexpr (kBiases == 1) bias[0][n][i] = total[n][i] * offset * unit;
      max[n][i] = kMinus;
      sum[n][i] = 0.0f;
    }
    if constexpr (C.k_mode == ScaleMode::kBlock) {  // group 4 i + t, split into f16 high and low parts
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float value = 0.0f;
        for (int b = 0; b < kBlocks; ++b) {
          if (b >> p.k.block_shift == 4 * i + t) value += s.q_sums[n * 8 + g][b];
        }
        const float high = __half2float(__float2half_rn(value));
        q_sums[i][n] = pack_f16x2(high, value - high);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) extra[n][i] = 0.0f;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[b][j][n][i] = 0.0f;
      }
    }
  }
}

/// x = raw products of the tile's tokens g, g + 8 (x[0..1], x[2..3]) with columns 2t, 2t + 1.
template <DecodeConfig C>
__device__ inline void Warp<C>::scores(const DecodeParams& p, const std::uint8_t* tile, float (&x)[N][4]) const {
  K k;
  k.load(tile, lane);
  const std::uint32_t flip = p.k.asymmetric ? 0u : 0x00800080u;
  const std::uint8_t* scales = tile + p.cache.k_param_offset;
  const int plane = kTileTokens * p.k.groups * (p.k.f32 ? 4 : 2);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = C.k_mode == ScaleMode::kBlock ? 0.0f : bias[0][n][i % 2];
  }
  float low = 1.0f, high = 1.0f;
  if constexpr (C.k_mode == ScaleMode::kToken) {
    low = load_scale(scales, g, p.k.f32);
    high = load_scale(scales, g + 8, p.k.f32);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float dot[N][4];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dot[n][i] = C.k_mode == ScaleMode::kBlock ? bias[b % kBiases][n][i % 2] : x[n][i];
      }
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      std::uint32_t a[4];
      k.fragment(b, step, flip, a);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (C.k == DType::kBFloat16) {
          mma_bf16(dot[n], a, q[b][step][n][0], q[b][step][n][1]);
          if (!p.q_bf16) mma_bf16(dot[n], a, q_low[b][step][n][0], q_low[b][step][n][1]);
        } else {
          mma_f16(dot[n], a, q[b][step][n][0], q[b][step][n][1]);
        }
      }
    }
    if constexpr (C.k_mode == ScaleMode::kBlock) {
      const int group = b >> p.k.block_shift;
      low = load_scale(scales, g * p.k.groups + group, p.k.f32);
      high = load_scale(scales, (g + 8) * p.k.groups + group, p.k.f32);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] = C.k_mode == ScaleMode::kBlock ? fmaf(i < 2 ? low : high, dot[n][i], x[n][i]) : dot[n][i];
      }
    }
  }
  if constexpr (C.k_mode == ScaleMode::kToken) {
    const float min_low = p.k.asymmetric ? load_scale(scales + plane, g, p.k.f32) * 0x1p-24f : 0.0f;
    const float min_high = p.k.asymmetric ? load_scale(scales + plane, g + 8, p.k.f32) * 0x1p-24f : 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] = fmaf(i < 2 ? low : high, x[n][i], (i < 2 ? min_low : min_high) * total[n][i % 2]);
      }
    }
  }
  if constexpr (C.k_mode == ScaleMode::kBlock) {
    if (p.k.asymmetric) {  // S += mins * sums of Q, one k-step over groups
      std::uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = 4 * (i / 2) + t, token = g + 8 * (i % 2);
        const float min = group < p.k.groups ? load_scale(scales + plane, token * p.k.groups + group, p.k.f32) : 0.0f;
        a[i] = pack_f16x2(min, min);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float dot[4] = {};
        mma_f16(dot, a, q_sums[0][n], q_sums[1][n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = fmaf(dot[i], 0x1p-24f, x[n][i]);
      }
    }
  }
}

/// Base-2 logits of the tile that begins at `token`, masked.
template <DecodeConfig C>
__device__ inline void Warp<C>::logits(const DecodeParams& p, const planning::WorkItem& item, int token,
                                       bool boundary, bool live, float (&x)[N][4]) const {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] *= factor[n][i % 2];
  }
  if (p.softcap > 0.0f) {
    const float cap = p.softcap * kLog2e;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = cap * tanhf(x[n][i] / cap);
    }
  }
  if (!boundary && p.alibi_slopes == nullptr) return;
  const int group = p.schedule.params.group;
  const int queries = p.schedule.cu_q[item.request + 1] - p.schedule.cu_q[item.request];
  const int keys = p.schedule.kv_lengths[item.request];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int packed = item.row_begin + n * 8 + 2 * t + c, query = packed / group;
      const int position = query + keys - queries;
      const float slope = p.alibi_slopes != nullptr && packed < item.row_end
                              ? p.alibi_slopes[item.kv_head * group + packed - query * group] * kLog2e
                              : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = token + g + 8 * half;
        const bool visible = live && key < item.kv_end && key <= position + p.causal_right &&
                             key >= position - p.window_left;
        float& logit = x[n][2 * half + c];
        logit = visible ? logit - slope * abs(position - key) : kMinus;
      }
    }
  }
}

/// Raises the maxima if a logit exceeds one by more than kLazyRescale, then turns logits into probabilities.
template <DecodeConfig C>
__device__ inline void Warp<C>::rescale(float (&x)[C.piece_tiles][N][4]) {
  bool exceeds = false;
  float top[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top[n][c] = fmaxf(x[0][n][c], x[0][n][2 + c]);
#pragma unroll
      for (int i = 1; i < C.piece_tiles; ++i) top[n][c] = fmaxf(top[n][c], fmaxf(x[i][n][c], x[i][n][2 + c]));
      exceeds |= top[n][c] > max[n][c] + kLazyRescale;
    }
  }
  if (__any_sync(~0u, exceeds)) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int i = 4; i < 32; i *= 2) top[n][c] = fmaxf(top[n][c], __shfl_xor_sync(~0u, top[n][c], i));
        const float raised = fmaxf(max[n][c], top[n][c]);
        const float weight = raised == kMinus ? 1.0f : exp2_approx(max[n][c] - raised);
        max[n][c] = raised;
        sum[n][c] *= weight;
        extra[n][c] *= weight;
        extra[n][2 + c] *= weight;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            out[b][j][n][c] *= weight;
            out[b][j][n][2 + c] *= weight;
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float base = max[n][c] == kMinus ? 0.0f : max[n][c];
#pragma unroll
      for (int i = 0; i < C.piece_tiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& value = x[i][n][2 * half + c];
          value = exp2_approx(value - base);
          sum[n][c] += value;
        }
      }
    }
  }
}

/// O^T += V^T P^T over one tile. Tokens from `dead_from` on (16: none) are not live: nothing of theirs may be used.
template <DecodeConfig C>
__device__ inline void Warp<C>::accumulate(const DecodeParams& p, const std::uint8_t* tile, int dead_from,
                                           float (&x)[N][4]) {
  constexpr bool kBf16 = C.v == DType::kBFloat16;
  std::uint32_t prob[N][2], prob_low[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float first = x[n][2 * half], second = x[n][2 * half + 1];
      prob[n][half] = transpose8x8(kBf16 ? pack_bf16x2(first, second) : pack_f16x2(first, second));
      if constexpr (kSplitP) {
        prob_low[n][half] = transpose8x8(pack_bf16x2(first - __bfloat162float(__float2bfloat16_rn(first)),
                                                     second - __bfloat162float(__float2bfloat16_rn(second))));
      }
    }
  }
  V v;
  v.load(tile + p.cache.v_data_offset, lane);
  if constexpr (C.v == DType::kFloat8E4M3) {
    if (dead_from < kTileTokens) {  // word 2j + p of a block pairs tokens A = 2t + 8p (even bytes) and A + 1
#pragma unroll
      for (int w = 0; w < V::kWords; ++w) {
        const int token = 2 * t + w % 2 * 8;
        v.words[w] &= (token < dead_from ? 0x00ff00ffu : 0u) | (token + 1 < dead_from ? 0xff00ff00u : 0u);
      }
    }
  }
  const std::uint32_t flip = p.v.asymmetric ? 0u : 0x00800080u;
  const std::uint8_t* scales = tile + p.cache.v_param_offset;
  const int plane = kTileTokens * p.v.groups * (p.v.f32 ? 4 : 2);
  constexpr std::uint32_t kOnes = 0x3c003c00u;
  const bool symmetric_bias = kVBias && !p.v.asymmetric;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    std::uint32_t weighted[N][2];
    const int group = C.v_mode == ScaleMode::kBlock ? b >> p.v.block_shift : 0;
    std::uint32_t pair[2] = {kOnes, kOnes};
    if constexpr (C.v_mode != ScaleMode::kStatic) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pair[half] = load_scale_pair(scales, group * kTileTokens + 2 * t + 8 * half, p.v.f32);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weighted[n][half] =
            C.v_mode == ScaleMode::kStatic ? prob[n][half] : mul_f16x2(prob[n][half], pair[half]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      std::uint32_t a[4];
      v.fragment(b, j, flip, a);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (kBf16) {
          mma_bf16(out[b][j][n], a, prob[n][0], prob[n][1]);
          mma_bf16(out[b][j][n], a, prob_low[n][0], prob_low[n][1]);
        } else {
          mma_f16(out[b][j][n], a, weighted[n][0], weighted[n][1]);
        }
      }
    }
    if constexpr (kVBias) {  // signed codes stand as q + 128 or q + 8: row `group` sums what that adds
      const bool first_of_group = C.v_mode == ScaleMode::kBlock ? (b & ((1 << p.v.block_shift) - 1)) == 0 : b == 0;
      if (symmetric_bias && first_of_group) {
        const std::uint32_t one = g == group ? kOnes : 0u;
        const std::uint32_t a[4] = {one, 0u, one, 0u};
#pragma unroll
        for (int n = 0; n < N; ++n) mma_f16(extra[n], a, weighted[n][0], weighted[n][1]);
      }
    }
  }
  if constexpr (kVBias && C.v_mode != ScaleMode::kStatic) {
    if (p.v.asymmetric) {
      std::uint32_t a[4] = {0u, 0u, 0u, 0u};
      if (g < p.v.groups) {
        a[0] = load_scale_pair(scales + plane, g * kTileTokens + 2 * t, p.v.f32);
        a[2] = load_scale_pair(scales + plane, g * kTileTokens + 2 * t + 8, p.v.f32);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) mma_f16(extra[n], a, prob[n][0], prob[n][1]);
    }
  }
}

/// Puts the warp's state into shared memory, in real units.
template <DecodeConfig C>
__device__ inline void Warp<C>::end(const DecodeParams& p, const planning::WorkItem& item,
                                    typename Traits::Shared& s, int warp) {
  const float v_static = p.v.static_scale == nullptr ? 1.0f : p.v.static_scale[item.kv_head * p.v.static_stride];
  const float v_min = p.v.static_min == nullptr ? 0.0f : p.v.static_min[item.kv_head * p.v.static_stride];
  const float unit = ldexpf(v_static, V::kScaleLog2);
  const float odd_unit = V::kOddShift == 4 ? unit * (1.0f / 16.0f) : unit;
  const float offset = C.v == DType::kInt8 ? -128.0f : -8.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = n * 8 + 2 * t + c;
#pragma unroll
      for (int i = 4; i < 32; i *= 2) sum[n][c] += __shfl_xor_sync(~0u, sum[n][c], i);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float shift = v_min * sum[n][c];
        if constexpr (kVBias) {
          const int group = C.v_mode == ScaleMode::kBlock ? b >> p.v.block_shift : 0;
          const float value = __shfl_sync(~0u, extra[n][c], group * 4 + t);
          if (!p.v.asymmetric) {
            shift = value * offset * v_static;
          } else if (C.v_mode != ScaleMode::kStatic) {
            shift = value;
          }
        }
        float4 x;
        x.x = fmaf(out[b][0][n][c], unit, shift);
        x.y = fmaf(out[b][0][n][2 + c], odd_unit, shift);
        x.z = fmaf(out[b][1][n][c], unit, shift);
        x.w = fmaf(out[b][1][n][2 + c], odd_unit, shift);
        *reinterpret_cast<float4*>(&s.out[warp][row][b * 32 + g * 4]) = x;
      }
      if (g == 0) {
        s.state[warp][row][0] = max[n][c];
        s.state[warp][row][1] = sum[n][c];
      }
    }
  }
}

}  // namespace halftone::cuda
