// Codes of an append, from a lane's registers to the tile.
#pragma once

#include "cuda/append/codes.h"
#include "cuda/append/row.h"
#include "format/page.h"

namespace halftone::cuda {

/// The codes of a chunk where those of a token are adjacent.
template <class Codes>
__device__ __forceinline__ void store_codes(const Codes& codes, std::uint8_t* to) {
  if constexpr (Codes::kBits == 16) {
    *reinterpret_cast<uint4*>(to) = {codes.words[0], codes.words[1], codes.words[2], codes.words[3]};
  } else if constexpr (Codes::kBits == 8) {
    *reinterpret_cast<uint2*>(to) = {codes.words[0], codes.words[1]};
  } else {
    *reinterpret_cast<std::uint32_t*>(to) = codes.words[0];
  }
}

/// Where a lane's chunk lies in the tiles of a part, and how to write it. `kTails`: there may be a last block
/// of 16 dims.
template <class Codes, DType kType, bool kTails>
struct ChunkStore {
  static constexpr int kBits = Codes::kBits;
  static constexpr page::VOrder kOrder = page::v_order(kType);

  const page::Part& part;
  int chunk;
  bool rows;        // bytes of a token are adjacent: 16 bits, or K
  int first;        // rows: bytes from the tile to token 0; else to lane (g, t = 0) of the first 4 dims
  int token_bytes;  // rows: from a token to the next one
  int step;         // else: from a string to the next one

  __device__ __forceinline__ ChunkStore(const AppendPart& of, KvPart which, int at)
      : part(of.part), chunk(at), rows(kBits == 16 || which == KvPart::kK) {
    if constexpr (kBits == 16) {
      first = static_cast<int>(part.data_offset) + chunk * 16;
      token_bytes = part.dim * 2;
    } else {
      step = of.block_step[chunk / 4];
      const int string = rows ? chunk % 4 : chunk % 4 * 8;
      first = of.block_first[chunk / 4] + (tail() ? 2 * string : string) * step;
      token_bytes = 4 * step;
    }
  }

  /// True in a last block of 16 dims, of which a chunk is in twice as many strings, half as much in each.
  __device__ __forceinline__ bool tail() const { return kTails && kBits != 16 && chunk / 4 >= part.dim / 32; }

  /// Writes the bytes that belong to token `place` of the tile alone.
  __device__ __forceinline__ void token(const Codes& codes, int place, std::uint8_t* tile) const {
    if (rows) {
      store_codes(codes, tile + first + place * token_bytes);
    } else {
      v_token(codes, place, tile);
    }
  }

  /// token() by all lanes of a warp, rows being theirs: what four neighbours have of V in 8 bits goes to 32
  /// byte sectors, one chunk after another, so that a store touches a quarter of the lines that it would if
  /// each lane wrote its own chunk. `writes`: alike in four neighbours.
  __device__ __forceinline__ void token_together(const Codes& codes, int place, std::uint8_t* tile,
                                                 bool writes) const {
    if constexpr (kBits == 8) {
      if (!rows && !(kTails && part.dim % 32 != 0)) {
        v_token_together(codes, place, tile, writes);
        return;
      }
    }
    if (writes) token(codes, place, tile);
  }

  /// Writes tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of a whole tile; no tail.
  __device__ __forceinline__ void four(const Codes (&codes)[4], int t, std::uint8_t* tile) const {
    if (rows) {
      std::uint8_t* at = tile + first + 2 * t * token_bytes;
#pragma unroll
      for (int k = 0; k < 4; ++k) store_codes(codes[k], at + (k % 2 + k / 2 * 8) * token_bytes);
    } else {
      v_four(codes, tile + first + t * step);
    }
  }

 private:
  __device__ __forceinline__ void v_four(const Codes (&codes)[4], std::uint8_t* at) const {
    if constexpr (kBits != 16) {
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

  __device__ __forceinline__ void v_token(const Codes& codes, int place, std::uint8_t* tile) const {
    const int half = place % 2, pair = place / 8;
    std::uint8_t* at = tile + first + place % 8 / 2 * step + pair * (kBits == 4 && tail() ? 2 : 4);
    if constexpr (kBits == 4) {
      if (tail()) {
#pragma unroll
        for (int i = 0; i < 4; ++i, at += 4 * step) {
          at[half] = static_cast<std::uint8_t>(codes.words[0] >> 8 * i);
        }
        return;
      }
    }
    const int third = tail() ? 4 * step : 8;  // bytes from the first of four dims to the third
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i, at += tail() ? 8 * step : 4 * step) {
      if constexpr (kBits == 4) {
        reinterpret_cast<std::uint16_t*>(at)[half] = static_cast<std::uint16_t>(codes.words[0] >> 16 * i);
      } else if constexpr (kOrder == page::VOrder::kBytes) {
        reinterpret_cast<std::uint16_t*>(at)[half] = static_cast<std::uint16_t>(codes.words[i]);
        reinterpret_cast<std::uint16_t*>(at)[half + third / 2] =
            static_cast<std::uint16_t>(codes.words[i] >> 16);
      } else {
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          at[d / 2 * third + d % 2 * 2 + half] = static_cast<std::uint8_t>(codes.words[i] >> 8 * d);
        }
      }
    }
  }

  __device__ __forceinline__ void v_token_together(const Codes& codes, int place, std::uint8_t* tile,
                                                   bool writes) const {
    if constexpr (kBits == 8) {
      const int own = chunk % 4;  // of the chunks of a block of 32 dims, whose strings are 8 apart
      std::uint8_t* at = tile + first + (place % 8 / 2 - own * 8) * step + place / 8 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i, at += 8 * step) {
        const std::uint32_t low = __shfl_sync(~0u, codes.words[0], i, 4);
        const std::uint32_t high = __shfl_sync(~0u, codes.words[1], i, 4);
        if (!writes) continue;
        if constexpr (kOrder == page::VOrder::kBytes) {
          const std::uint32_t word = own / 2 == 0 ? low : high;
          auto* const pairs = reinterpret_cast<std::uint16_t*>(at + own / 2 * 4 * step);
          pairs[place % 2 + own % 2 * 4] = static_cast<std::uint16_t>(word >> own % 2 * 16);
        } else {
          const int to = own / 2 * 8 + own % 2 * 2 + place % 2;
          at[to] = static_cast<std::uint8_t>(low >> own * 8);
          at[4 * step + to] = static_cast<std::uint8_t>(high >> own * 8);
        }
      }
    }
  }
};

/// Where the params of a lane's group lie in the tiles of a part. `kF16`: they are known to be f16.
template <bool kAsymmetric, bool kF16>
struct ParamStore {
  const AppendPart& part;
  int first;  // bytes from the tile to the scale of token 0

  __device__ __forceinline__ ParamStore(const AppendPart& of, int chunk)
      : part(of), first(of.scale_first + (chunk >> of.group_log2) * of.scale_group) {}

  __device__ __forceinline__ void token(const codec::Params& params, int place, std::uint8_t* tile) const {
    std::uint8_t* at = tile + (first + place * part.scale_token);
    if (kF16 || part.part.format.scale_dtype == DType::kFloat16) {
      *reinterpret_cast<std::uint16_t*>(at) = codec::f16_from_f32(params.scale);
      if (kAsymmetric)
        *reinterpret_cast<std::uint16_t*>(at + part.min_away) = codec::f16_from_f32(params.min);
    } else {
      *reinterpret_cast<float*>(at) = params.scale;
      if (kAsymmetric) *reinterpret_cast<float*>(at + part.min_away) = params.min;
    }
  }
};

}  // namespace halftone::cuda
