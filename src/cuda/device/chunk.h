// Codes and scales of a tile, from global memory to a lane's registers. As in append, a lane has a chunk of 8
// dims of the 4 tokens whose codes share words of V.
#pragma once

#include "cuda/device/lanes.h"
#include "cuda/device/ptx.h"
#include "cuda/device/values.h"
#include "format/codec.h"
#include "format/page.h"
#include "format/part.h"

namespace halftone::cuda {

inline constexpr int kLaneRows = 4;

/// Row k of the lane with tokens 2t, 2t + 1, 2t + 8 and 2t + 9.
__device__ __forceinline__ int lane_token(int t, int k) { return 2 * t + k % 2 + k / 2 * 8; }

/// The values of adjacent codes, packed from the lowest bits on.
template <DType kType, bool kAsymmetric, int kCount>
__device__ __forceinline__ void decode_codes(const std::uint32_t* words, const codec::Params& params,
                                             float (&x)[kCount]) {
  constexpr int kBits = dtype_bits(kType);
  if constexpr (kBits == 16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = half_of(words[i / 2], i % 2, kType == DType::kBFloat16);
  } else if constexpr (kType == DType::kFloat8E4M3) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {  // f16 holds every e4m3 value
      const std::uint32_t pair = e4m3x2_to_f16x2(words[i / 4] >> 8 * (i % 4));
      x[i] = codec::ht_mul(half_of(pair, false, false), params.scale);
      x[i + 1] = codec::ht_mul(half_of(pair, true, false), params.scale);
    }
  } else {
    using Codec = codec::Codec<kType, kAsymmetric>;
    constexpr int kPerWord = 32 / kBits;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::uint32_t code = words[i / kPerWord] >> kBits * (i % kPerWord) & ((1u << kBits) - 1);
      x[i] = Codec::decode(params, static_cast<typename Codec::Code>(code));
    }
  }
}

/// Of 16 bytes of a string of V in 8 bits, whose words hold 2 dims of two tokens and alternate between the
/// pairs of tokens: the four codes of the lane's token k.
template <DType kType>
__device__ __forceinline__ std::uint32_t value_bytes(const uint4& w, int k) {
  constexpr bool kBytes = page::v_order(kType) == page::VOrder::kBytes;
  constexpr unsigned kFirst = kBytes ? 0x5410 : 0x6420, kSecond = kBytes ? 0x7632 : 0x7531;
  const unsigned places = k % 2 == 0 ? kFirst : kSecond;
  return k < 2 ? __byte_perm(w.x, w.z, places) : __byte_perm(w.y, w.w, places);
}

/// The codes of a chunk, packed in the order of dims.
template <DType kType, bool kAsymmetric>
struct Chunk {
  static constexpr int kBits = dtype_bits(kType);
  std::uint32_t words[kBits / 4];

  __device__ __forceinline__ void decode(const codec::Params& params, float (&x)[kChunk]) const {
    decode_codes<kType, kAsymmetric>(words, params, x);
  }
};

/// Where a lane's chunk lies in the tiles of a part. It is cut into pieces of adjacent dims that one access
/// reads: 1 of K, 2 of V (4 tokens at once); twice as many in a last block of 16 dims.
struct ChunkPlace {
  bool by_token;   // K, and 16-bit V: a token's codes lie apart from those of other tokens
  bool tail;       // in a last block of 16 dims
  int first;       // bytes from the part's data to the chunk of token 0
  int token_step;  // to the next token; of packed V to the next t
  int piece_step;

  ChunkPlace() = default;
  /// `bits`: of an element of the part.
  __device__ __forceinline__ ChunkPlace(const page::Part& part, int chunk, int bits) {
    const int d = chunk * kChunk;
    by_token = bits == 16 || part.which == KvPart::kK;
    tail = bits != 16 && part.dim - d / 32 * 32 < 32;
    const int piece = (by_token ? 8 : 4) >> (tail ? 1 : 0);
    first = part.place(0, d).byte;
    token_step = part.place(by_token ? 1 : 2, d).byte - first;
    piece_step = piece < kChunk ? part.place(0, d + piece).byte - first : 0;
  }
};

template <DType kType, bool kAsymmetric>
struct ChunkLoad : ChunkPlace {
  using Codes = Chunk<kType, kAsymmetric>;
  static constexpr int kBits = Codes::kBits;

  __device__ __forceinline__ explicit ChunkLoad(const ChunkPlace& place) : ChunkPlace(place) {}
  __device__ __forceinline__ ChunkLoad(const page::Part& part, int chunk) : ChunkPlace(part, chunk, kBits) {}

  /// `data`: the part's data in a tile.
  __device__ __forceinline__ void load(const std::uint8_t* data, int t, Codes (&codes)[kLaneRows]) const {
    data += first;
    if constexpr (kBits == 16) {
      load_tokens(data, t, codes);
    } else {
      if (by_token) {
        load_tokens(data, t, codes);
      } else if (kBits == 4) {
        load_nibbles(data + t * token_step, codes);
      } else {
        load_bytes(data + t * token_step, codes);
      }
    }
  }

 private:
  template <class T>
  static __device__ __forceinline__ T read(const std::uint8_t* at) {
    return __ldg(reinterpret_cast<const T*>(at));
  }

  __device__ __forceinline__ void load_tokens(const std::uint8_t* data, int t,
                                              Codes (&codes)[kLaneRows]) const {
#pragma unroll
    for (int k = 0; k < kLaneRows; ++k) {
      const std::uint8_t* at = data + lane_token(t, k) * token_step;
      std::uint32_t(&words)[kBits / 4] = codes[k].words;
      if constexpr (kBits == 16) {
        const uint4 row = read<uint4>(at);
        words[0] = row.x, words[1] = row.y, words[2] = row.z, words[3] = row.w;
      } else if constexpr (kBits == 8) {
        const uint2 pair =
            tail ? uint2{read<unsigned>(at), read<unsigned>(at + piece_step)} : read<uint2>(at);
        words[0] = pair.x, words[1] = pair.y;
      } else {
        words[0] = tail ? read<unsigned short>(at) | unsigned{read<unsigned short>(at + piece_step)} << 16
                        : read<unsigned>(at);
      }
    }
  }

  /// int4 V: a word holds 4 dims of two tokens or, in the tail, 2 dims of all four.
  __device__ __forceinline__ void load_nibbles(const std::uint8_t* at, Codes (&codes)[kLaneRows]) const {
    if (tail) {
      std::uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = read<unsigned>(at + i * piece_step);
#pragma unroll
      for (int k = 0; k < kLaneRows; ++k) {
        const unsigned byte = k | (4 + k) << 4;
        codes[k].words[0] = __byte_perm(__byte_perm(w[0], w[1], byte), __byte_perm(w[2], w[3], byte), 0x5410);
      }
    } else {
      const uint2 low = read<uint2>(at), high = read<uint2>(at + piece_step);
      codes[0].words[0] = __byte_perm(low.x, high.x, 0x5410);
      codes[1].words[0] = __byte_perm(low.x, high.x, 0x7632);
      codes[2].words[0] = __byte_perm(low.y, high.y, 0x5410);
      codes[3].words[0] = __byte_perm(low.y, high.y, 0x7632);
    }
  }

  /// 8-bit V.
  __device__ __forceinline__ void load_bytes(const std::uint8_t* at, Codes (&codes)[kLaneRows]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 w;
      if (tail) {
        const uint2 low = read<uint2>(at + 2 * half * piece_step);
        const uint2 high = read<uint2>(at + (2 * half + 1) * piece_step);
        w = {low.x, low.y, high.x, high.y};
      } else {
        w = read<uint4>(at + half * piece_step);
      }
#pragma unroll
      for (int k = 0; k < kLaneRows; ++k) codes[k].words[half] = value_bytes<kType>(w, k);
    }
  }
};

__device__ __forceinline__ float load_param(DType type, const std::uint8_t* at) {
  if (type == DType::kFloat32) return __ldg(reinterpret_cast<const float*>(at));
  if (type == DType::kFloat8E8M0) return codec::f32_from_e8m0(__ldg(at));
  return __half2float(__ushort_as_half(__ldg(reinterpret_cast<const unsigned short*>(at))));
}

/// Scale and min of a lane's 4 tokens; `static_scale` and `static_min` are those of the KV head, if any.
template <bool kAsymmetric>
__device__ __forceinline__ void load_params(const page::Part& part, const float* static_scale,
                                            const float* static_min, const std::uint8_t* tile, int t,
                                            int group, codec::Params (&params)[kLaneRows]) {
  if (part.format.static_scale()) {
    codec::Params all;
    all.scale = __ldg(static_scale);
    if (kAsymmetric) all.min = __ldg(static_min);
#pragma unroll
    for (int k = 0; k < kLaneRows; ++k) params[k] = all;
  } else {
#pragma unroll
    for (int k = 0; k < kLaneRows; ++k) {
      const int token = lane_token(t, k);
      params[k].scale = load_param(part.format.scale_dtype, tile + part.scale_offset(token, group));
      if (kAsymmetric) {
        params[k].min = load_param(part.format.scale_dtype, tile + part.min_offset(token, group));
      }
    }
  }
}

}  // namespace halftone::cuda
