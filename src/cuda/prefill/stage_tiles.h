// Staging of whole tiles of 16 tokens in the order in which a page packs them: a lane reads strings 16 bytes
// at a time and turns each piece into what it becomes. For codes of 8 and 4 bits in rows of 128 dims, neither
// rotated nor with scales of channels, whose own scales are static or in f16.
#pragma once

#include "cuda/device/chunk.h"
#include "cuda/device/range.h"
#include "cuda/device/reduce.h"
#include "cuda/prefill/codes.h"
#include "cuda/prefill/stage.h"
#include "format/int8_row.h"

namespace halftone::cuda {

inline constexpr int kTileDims = 128;

template <DType kType, bool kAsymmetric>
struct TileStager {
  static constexpr int kDim = kTileDims;
  static constexpr int kBits = dtype_bits(kType);
  static constexpr int kPieces = kDim * kBits / 512;    // of 16 bytes, of a string of K; V has twice as many
  static constexpr int kBlocks = 128 / kBits / kChunk;  // of 32 dims in a piece of K; of V half as many
  static_assert(kBits == 8 || kBits == 4);
  using Codes = Chunk<kType, kAsymmetric>;

  const StageParams& p;
  const std::uint8_t* tile;
  std::int64_t row;  // of the first token
  int count;         // of its tokens that are wanted
  int head;
  const page::Part& part = p.rows.part;

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int group() { return lane() / 4; }
  __device__ static int place() { return lane() % 4; }
  __device__ const uint4* piece(int index, int strings, int string) const {
    return reinterpret_cast<const uint4*>(tile + part.data_offset) + index * strings + string;
  }
  __device__ bool is_static() const { return part.format.static_scale(); }
  __device__ int group_of(int dim) const { return part.groups > 1 ? dim / part.format.group_size : 0; }
  template <class T>
  __device__ T* out(int token, int dim) const {
    return static_cast<T*>(p.rows.out) + (row + token) * p.rows.row_stride + head * p.rows.head_stride + dim;
  }
  /// Of a token of K.
  __device__ codec::Params params(int token, int of) const {
    codec::Params x;
    if (is_static()) {
      x.scale = __ldg(p.rows.static_scale + head * p.rows.static_stride);
      if (kAsymmetric) x.min = __ldg(p.rows.static_min + head * p.rows.static_stride);
    } else {
      x.scale = load_param(DType::kFloat16, tile + part.scale_offset(token, of));
      if (kAsymmetric) x.min = load_param(DType::kFloat16, tile + part.min_offset(token, of));
    }
    return x;
  }
  __device__ void store_scale(int token, float scale) const {
    if (place() == 0 && token < count) p.scales[head * p.rows.rows + row + token] = scale;
  }

  /// K as the cache has it. Lane (g, t) has pieces of dims 8 t and 32 + 8 t of tokens g and g + 8: two of a
  /// quad trade halves, so that each has 16 dims.
  __device__ void copy_keys() const {
    uint4 own[2][kPieces];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) own[h][i] = __ldg(piece(i, 64, 32 * h + lane()));
    }
    const bool odd = lane() & 1;
    const int dim = odd ? 32 + 8 * (place() - 1) : 8 * place();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = group() + 8 * h;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint4 x = own[h][i];
        const std::uint32_t a = __shfl_xor_sync(~0u, odd ? x.x : x.z, 1),
                            b = __shfl_xor_sync(~0u, odd ? x.y : x.w, 1);
        const uint4 both = odd ? uint4{a, b, x.z, x.w} : uint4{x.x, x.y, a, b};
        if (token < count) *reinterpret_cast<uint4*>(out<std::uint8_t>(token, 64 * i + dim)) = both;
      }
      store_scale(token, params(token, 0).scale);
    }
  }
  /// K of its values: in f16, or in codes, integers or E4M3, which is in the order of code_chunk().
  template <StagedAs kAs>
  __device__ void convert_keys() const {
    constexpr bool kF16 = kAs == StagedAs::kKeys, kE4m3 = kAs == StagedAs::kE4m3Codes;
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const int token = group() + 8 * h;
      KeyRow x;
      const std::uint32_t most = largest_key<!kF16>(token, h, x);
      const float f16 = f16_scale(most);
      const int8_row::Row of = kF16 ? int8_row::Row{f16, inverse_power(f16)} : key_row(kE4m3, most);
      store_scale(token, of.scale);
      if (token >= count) continue;
#pragma unroll
      for (int b = 0; b < kDim / 32; ++b) {
        float(&v)[kChunk] = x[b];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) v[i] *= of.inverse;
        const int chunk = 4 * b + place();
        if constexpr (kF16) {
          *reinterpret_cast<uint4*>(out<std::uint16_t>(token, kChunk * chunk)) = {
              pack_f16x2(v[0], v[1]), pack_f16x2(v[2], v[3]), pack_f16x2(v[4], v[5]), pack_f16x2(v[6], v[7])};
        } else {
          auto* const to = out<std::uint8_t>(token, kChunk * (kE4m3 ? code_chunk(chunk) : chunk));
          *reinterpret_cast<uint2*>(to) = kE4m3 ? e4m3_codes(v) : int8_codes(v);
        }
      }
    }
  }
  /// V in f16. Lane (g, t) has dims 4 g of each block of 32, of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
  __device__ void convert_values() const {
    constexpr int kEach = kBlocks / 2;  // blocks of a piece
    uint4 own[2 * kPieces];
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i) own[i] = __ldg(piece(i, 32, lane()));
    codec::Params of[kLaneRows];
    load(0, of);
    if (is_static()) {  // O is multiplied by the unit
      const std::int64_t at = std::int64_t{head} * p.rows.static_stride;
      const float inverse = 1.0f / value_unit(p.rows.static_scale, p.rows.static_min, at);
#pragma unroll
      for (auto& x : of) x.scale *= inverse, x.min *= inverse;
    }
#pragma unroll
    for (int b = 0; b < kDim / 32; ++b) {
      if (part.groups > 1 && b > 0) load(group_of(32 * b), of);
      const uint4& w = own[b / kEach];
#pragma unroll
      for (int k = 0; k < kLaneRows; ++k) {
        float x[4];
        decode(w, b % kEach, k, of[k], x);
        const int token = lane_token(place(), k);
        if (token < count) {
          *reinterpret_cast<uint2*>(out<std::uint16_t>(token, 32 * b + 4 * group())) = {
              pack_f16x2(x[0], x[1]), pack_f16x2(x[2], x[3])};
        }
      }
    }
  }

 private:
  /// Of each 32 dims of a token a lane's eight.
  using KeyRow = float[kDim / 32][kChunk];

  /// Values of a token, group() + 8 h, and the bits of the largest magnitude of its row; `kNan`: a NaN's if
  /// there is one.
  template <bool kNan>
  __device__ std::uint32_t largest_key(int token, int h, KeyRow& x) const {
    uint4 own[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) own[i] = __ldg(piece(i, 64, 32 * h + lane()));
    float most = 0.0f;
    std::uint32_t bits = 0;
    codec::Params of = params(token, 0);
#pragma unroll
    for (int b = 0; b < kPieces * kBlocks; ++b) {
      const std::uint32_t words[] = {own[b / kBlocks].x, own[b / kBlocks].y, own[b / kBlocks].z,
                                     own[b / kBlocks].w};
      Codes codes;
#pragma unroll
      for (int w = 0; w < kBits / 4; ++w) codes.words[w] = words[b % kBlocks * (kBits / 4) + w];
      if (part.groups > 1 && b > 0) of = params(token, group_of(32 * b));
      codes.decode(of, x[b]);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (kNan) {
          bits = max(bits, magnitude_bits(x[b][i]));
        } else {
          most = fmaxf(most, fabsf(x[b][i]));
        }
      }
    }
    if (!kNan) return __float_as_uint(largest_of_lanes<1, 4>(most));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    return max(bits, __shfl_xor_sync(~0u, bits, 2));
  }

  /// Of the lane's tokens of V, which are pairs of neighbours.
  __device__ void load(int of_group, codec::Params (&of)[kLaneRows]) const {
#pragma unroll
    for (int k = 0; k < kLaneRows; k += 2) {
      const int token = lane_token(place(), k);
      if (is_static()) {
        of[k] = of[k + 1] = params(token, 0);
        continue;
      }
      const auto pair = [&](std::int64_t at) { return __ldg(reinterpret_cast<const unsigned*>(tile + at)); };
      const std::uint32_t scales = pair(part.scale_offset(token, of_group));
      of[k].scale = half_of(scales, false, false), of[k + 1].scale = half_of(scales, true, false);
      if constexpr (kAsymmetric) {
        const std::uint32_t mins = pair(part.min_offset(token, of_group));
        of[k].min = half_of(mins, false, false), of[k + 1].min = half_of(mins, true, false);
      }
    }
  }
  /// Four dims of token k of the lane, from block `block` of a piece of V.
  __device__ static void decode(const uint4& w, int block, int k, const codec::Params& of, float (&x)[4]) {
    std::uint32_t codes;
    if constexpr (kBits == 8) {
      codes = value_bytes<kType>(w, k);
    } else {
      const std::uint32_t pair = block == 0 ? (k < 2 ? w.x : w.y) : (k < 2 ? w.z : w.w);
      codes = k % 2 == 0 ? pair & 0xffffu : pair >> 16;
    }
    decode_codes<kType, kAsymmetric>(&codes, of, x);
  }
};

}  // namespace halftone::cuda
