// Codes of an append, from a lane's registers to the tile.
#pragma once

#include "cuda/append_row.h"
#include "format/page.h"

namespace halftone::cuda {

/// Where a lane's chunk lies in the tiles of a part, and how to write it.
template <class Codec, DType kType>
struct ChunkStore {
  using Codes = ChunkCodes<Codec, kType>;
  static constexpr int kBits = Codes::kBits;
  static constexpr page::VOrder kOrder = page::v_order(kType);

  const page::Part& part;
  int chunk;
  bool tail;  // in a last block of 16 dims, whose layout differs: written element by element
  int first;  // K: bytes from the part's data to token 0; V: to lane (g, t = 0) of the first 4 dims
  int step;   // bytes from a string to the next one

  __device__ __forceinline__ ChunkStore(const page::Part& of, int at) : part(of), chunk(at) {
    const int block = chunk / 4, dim = part.dim;
    tail = kBits != 16 && dim - block * 32 < 32;
    if (kBits == 16 || tail) return;
    const bool k = part.which == KvPart::kK;
    const int strings = k ? 64 : 32, length = dim * kBits * 16 / 8 / strings,
              pos = block * 64 * kBits / strings;
    const int index = k ? chunk % 4 : chunk % 4 * 8;
    const int origin = page::chunked(0, strings, length, pos);
    step = page::chunked(1, strings, length, pos) - origin;
    first = origin + index * step;
  }

  /// Writes the bytes that belong to token `place` of the tile alone.
  __device__ __forceinline__ void token(const Codes& codes, int place, std::uint8_t* tile) const {
    std::uint8_t* data = tile + part.data_offset;
    if constexpr (kBits == 16) {
      const uint4 row = {codes.words[0], codes.words[1], codes.words[2], codes.words[3]};
      reinterpret_cast<uint4*>(data + place * part.dim * 2)[chunk] = row;
    } else if (tail) {
      elements(codes, place, data);
    } else if (part.which == KvPart::kK) {
      std::uint8_t* at = data + first + place * 4 * step;
      if constexpr (kBits == 8) {
        *reinterpret_cast<uint2*>(at) = {codes.words[0], codes.words[1]};
      } else {
        *reinterpret_cast<std::uint32_t*>(at) = codes.words[0];
      }
    } else {
      v_token(codes, place, data);
    }
  }

  /// Writes V of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of a whole tile.
  __device__ __forceinline__ void v_four(const Codes (&codes)[4], int t, std::uint8_t* tile) const {
    if constexpr (kBits != 16) {
      std::uint8_t* at = tile + part.data_offset + first + t * step;
#pragma unroll
      for (int half = 0; half < 2; ++half, at += 4 * step) {
        if constexpr (kBits == 4) {
          const unsigned order = half == 0 ? 0x5410 : 0x7632;
          *reinterpret_cast<uint2*>(at) = {__byte_perm(codes[0].words[0], codes[1].words[0], order),
                                           __byte_perm(codes[2].words[0], codes[3].words[0], order)};
        } else {
          constexpr unsigned kLow = kOrder == page::VOrder::kBytes ? 0x5410 : 0x5140;
          constexpr unsigned kHigh = kOrder == page::VOrder::kBytes ? 0x7632 : 0x7362;
          const std::uint32_t a = codes[0].words[half], b = codes[1].words[half];
          const std::uint32_t c = codes[2].words[half], d = codes[3].words[half];
          *reinterpret_cast<uint4*>(at) = {__byte_perm(a, b, kLow), __byte_perm(c, d, kLow),
                                           __byte_perm(a, b, kHigh), __byte_perm(c, d, kHigh)};
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void v_token(const Codes& codes, int place, std::uint8_t* data) const {
    const int half = place % 2, pair = place / 8;
    std::uint8_t* at = data + first + place % 8 / 2 * step + pair * 4;
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i, at += 4 * step) {
      if constexpr (kBits == 4) {
        reinterpret_cast<std::uint16_t*>(at)[half] = static_cast<std::uint16_t>(codes.words[0] >> 16 * i);
      } else if constexpr (kOrder == page::VOrder::kBytes) {
        reinterpret_cast<std::uint16_t*>(at)[half] = static_cast<std::uint16_t>(codes.words[i]);
        reinterpret_cast<std::uint16_t*>(at)[half + 4] = static_cast<std::uint16_t>(codes.words[i] >> 16);
      } else {
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          at[d / 2 * 8 + d % 2 * 2 + half] = static_cast<std::uint8_t>(codes.words[i] >> 8 * d);
        }
      }
    }
  }

  __device__ __forceinline__ void elements(Codes codes, int place, std::uint8_t* data) const {
    constexpr int kPerByte = 8 / kBits;
#pragma unroll 1
    for (int i = 0; i < kChunk; i += kPerByte) {
      data[part.place(place, chunk * kChunk + i).byte] = static_cast<std::uint8_t>(codes.words[0]);
      codes.words[0] >>= 8;
      if (kBits == 8) {
        codes.words[0] |= codes.words[1] << 24;
        codes.words[1] >>= 8;
      }
    }
  }
};

__device__ __forceinline__ void store_param(DType type, std::uint8_t* at, float value) {
  if (type == DType::kFloat16) {
    *reinterpret_cast<std::uint16_t*>(at) = codec::f16_from_f32(value);
  } else {
    *reinterpret_cast<float*>(at) = value;
  }
}

__device__ __forceinline__ void store_params(const page::Part& part, const codec::Params& params, int place,
                                             int group, std::uint8_t* tile) {
  store_param(part.format.scale_dtype, tile + part.scale_offset(place, group), params.scale);
  if (part.format.asymmetric) {
    store_param(part.format.scale_dtype, tile + part.min_offset(place, group), params.min);
  }
}

}  // namespace halftone::cuda
