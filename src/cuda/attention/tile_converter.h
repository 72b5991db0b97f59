// Tiles of 16 tokens of K and V in codes of 8 or 4 bits at head_dim 128, as a page has them, which become f16
// in shared memory: K in rows of tokens for Q K^T, V in rows of tokens, too, which P V takes as columns. A
// lane turns strings of a tile (format/page.h) into 16 bytes of a token of K, or 8 of one of V, at a time;
// neither side has bank conflicts.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/side.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {

/// A tile of K and V in the same format.
template <PartConfig P>
struct PackedTile {
  static constexpr int kDim = 128;
  static constexpr int kBits = dtype_bits(P.dtype);
  static_assert(kBits == 8 || kBits == 4);
  // Scales of K per token of 8 bits multiply logits, others and those of V codes. Codes of 4 bits have mins.
  static constexpr bool kFourBits = kBits == 4, kScaled = P.mode != ScaleMode::kStatic;
  static_assert(kFourBits == P.asymmetric && (kFourBits || P.mode != ScaleMode::kBlock));
  static constexpr bool kScaledLogits = kScaled && !kFourBits;
  static constexpr int kBlocks = kDim / 32;
  static constexpr int kGroups = P.mode == ScaleMode::kBlock ? kBlocks / P.group_blocks : 1;
  static constexpr int group_of(int block) { return block / (kBlocks / kGroups); }

  // Codes of K, of V, then a plane of scales of K, one of its mins, likewise of V.
  static constexpr int kPartBytes = kTileTokens * kDim * kBits / 8;
  static constexpr int kPlaneBytes = kScaled ? kTileTokens * kGroups * 2 : 0;
  static constexpr int kParamBytes = kPlaneBytes * (kFourBits ? 2 : 1);
  static constexpr int kKeyParams = 2 * kPartBytes, kValueParams = kKeyParams + kParamBytes;
  static constexpr int kBytes = kValueParams + kParamBytes;
};

/// Codes as f16, exact.
template <DType kType>
struct Codes {
  /// Four of 8 bits of a word, in order.
  static __device__ uint2 in_order(std::uint32_t word) {
    if constexpr (kType == DType::kFloat8E4M3) return {e4m3x2_to_f16x2(word), e4m3x2_to_f16x2(word, true)};
    const std::uint32_t offset = word ^ 0x80808080u;  // q + 128, in the low bits of 1024 + q + 128
    return {add_f16x2(__byte_perm(offset, 0x64646464u, 0x4140), 0xe480e480u),  // - 1152
            add_f16x2(__byte_perm(offset, 0x64646464u, 0x4342), 0xe480e480u)};
  }
  /// Two neighbouring dims of tokens A and B, in x and in y, of a word of V.
  static __device__ uint2 of_tokens(std::uint32_t word) {
    return in_order(kType == DType::kFloat8E4M3 ? __byte_perm(word, 0, 0x3120) : word);
  }
  /// Codes i and i + 4 of the eight of 4 bits of a word.
  static __device__ std::uint32_t pair(std::uint32_t word, int i) {
    return add_f16x2((word >> 4 * i & 0x000f000fu) | 0x64006400u, 0xe400e400u);  // 1024 + q, - 1024
  }
};

/// f16 of the groups of a token, of which products take one twice.
template <int kCount>
struct GroupValues {
  static constexpr int kWords = (kCount + 1) / 2;
  std::uint32_t words[kWords];

  __device__ void load(const std::uint8_t* from) {
    if constexpr (kCount == 4) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      words[0] = x.x, words[1] = x.y;
    } else if constexpr (kCount == 2) {
      words[0] = *reinterpret_cast<const std::uint32_t*>(from);
    } else {
      words[0] = *reinterpret_cast<const std::uint16_t*>(from);
    }
  }
  __device__ std::uint32_t operator[](int i) const {
    return __byte_perm(words[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
  }
};

/// Matrices in f16 lie as [half of the dims][token][64 dims], rows of 128 bytes swizzled over 8, kTokens of
/// them.
template <PartConfig P, int kTokens>
struct TileConverter {
  using Tile = PackedTile<P>;
  static constexpr int kHalfBytes = kTokens * 128;
  int lane;

  /// K of kOwn tiles, which follow each other, to `keys`, the row of the first token, a multiple of 16 from
  /// the matrix's first. Whether `scales` of the tokens multiply their logits.
  template <int kOwn>
  __device__ bool convert_keys(const std::uint8_t* tiles, std::uint8_t* keys, float* scales) const {
    constexpr int kChunks = Tile::kDim * Tile::kBits / 512;  // of 16 bytes of a string
    const int token = lane / 4, t = lane % 4;                // and 8 tokens on
    constexpr bool kLate = kOwn == 1;  // params are read when they are needed: fewer registers
    uint4 codes[kOwn][2][kChunks];
    Params params[kLate ? 1 : kOwn][kLate ? 1 : 2];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const std::uint8_t* const tile = tiles + n * Tile::kBytes;
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          codes[n][eight][i] = *reinterpret_cast<const uint4*>(tile + (i * 64 + eight * 32 + lane) * 16);
        }
        if constexpr (Tile::kFourBits && !kLate) params[n][eight].load(tile, 8 * eight + token);
      }
    }
    bool scaled = Tile::kScaledLogits;
    if constexpr (Tile::kScaledLogits) {
      const int own = lane % (kOwn * kTileTokens);
      scales[own] =
          Part<P>::load(tiles + own / kTileTokens * Tile::kBytes + Tile::kKeyParams, own % kTileTokens);
    }
    if constexpr (Tile::kFourBits) {
      scaled = bound<kOwn>(tiles, scales);
      if (scaled && !kLate) {
#pragma unroll
        for (int i = 0; i < 2 * kOwn; ++i) params[i / 2][i % 2].shrink_large();
      }
    }
    // Chunks of a token's row of 64 dims: those of odd tokens go the other way round, so that eight lanes
    // write eight chunks.
    const int odd = token % 2 * 4;
    std::uint8_t* const to = keys + token * 128;
    std::uint8_t* const ones = to + ((odd + t) ^ token) * 16;
    std::uint8_t* const others = to + ((4 - odd + t) ^ token) * 16;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int place = (n * kTileTokens + 8 * eight) * 128;
        if constexpr (Tile::kFourBits) {
          Params& own = params[kLate ? 0 : n][kLate ? 0 : eight];
          if constexpr (kLate) {
            own.load(tiles, 8 * eight + token);
            if (scaled) own.shrink_large();
          }
          convert_blocks(codes[n][eight][0], own, odd != 0, ones + place, others + place);
        } else {
#pragma unroll
          for (int i = 0; i < kChunks; ++i) {
            const uint4 x = codes[n][eight][i];
            const int at = place + i * kHalfBytes;
            *reinterpret_cast<uint4*>(ones + at) = eight_codes(odd ? x.z : x.x, odd ? x.w : x.y);
            *reinterpret_cast<uint4*>(others + at) = eight_codes(odd ? x.x : x.z, odd ? x.y : x.w);
          }
        }
      }
    }
    return scaled;
  }
  static __device__ uint4 eight_codes(std::uint32_t a, std::uint32_t b) {
    const uint2 x = Codes<P.dtype>::in_order(a), y = Codes<P.dtype>::in_order(b);
    return {x.x, x.y, y.x, y.y};
  }

  /// Of a token of K in 4 bits.
  struct Params {
    GroupValues<Tile::kGroups> scale, min;

    __device__ void load(const std::uint8_t* tile, int token) {
      const std::uint8_t* const from = tile + Tile::kKeyParams + token * (Tile::kGroups * 2);
      scale.load(from);
      min.load(from + Tile::kPlaneBytes);
    }
    /// Whether a value may come near the end of f16's range.
    __device__ bool large() const {
      constexpr std::uint32_t kSize = 0x7fff7fffu, kFifteen = 0x4b804b80u, kLargest = 0x7800;  // 2^15
      bool large = false;
#pragma unroll
      for (int i = 0; i < scale.kWords; ++i) {
        const std::uint32_t most = fma_f16x2(scale.words[i] & kSize, kFifteen, min.words[i] & kSize);
        large |= (most & 0xffff) >= kLargest || most >> 16 >= kLargest;
      }
      return large;
    }
    __device__ void shrink_large() {
      if (!large()) return;
      constexpr std::uint32_t kFactor = 0x28002800u;  // 2^-5
#pragma unroll
      for (int i = 0; i < scale.kWords; ++i) {
        scale.words[i] = mul_f16x2(scale.words[i], kFactor), min.words[i] = mul_f16x2(min.words[i], kFactor);
      }
    }
  };
  /// Tokens whose values f16 may not hold lose 2^5, which logits get back. Whether any of kOwn tiles have.
  template <int kOwn>
  __device__ bool bound(const std::uint8_t* tiles, float* scales) const {
    Params own;  // of a token a lane
    const int token = lane % (kOwn * kTileTokens);
    own.load(tiles + token / kTileTokens * Tile::kBytes, token % kTileTokens);
    const bool large = own.large();
    if (!__any_sync(~0u, large)) return false;
    scales[token] = large ? 32.0f : 1.0f;
    return true;
  }
  /// Four words of 4 bits, of a block of dims each: of the eight dims of a lane 0, 4, 1, 5, 2, 6, 3, 7.
  __device__ void convert_blocks(const uint4& codes, const Params& params, bool odd, std::uint8_t* ones,
                                 std::uint8_t* others) const {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
      const std::uint32_t word = odd ? words[i ^ 1] : words[i];
      const int group = Tile::group_of(i), other = Tile::group_of(i ^ 1);
      const std::uint32_t a = odd ? params.scale[other] : params.scale[group];
      const std::uint32_t b = odd ? params.min[other] : params.min[group];
      std::uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = fma_f16x2(Codes<P.dtype>::pair(word, j), a, b);
      std::uint8_t* const to = (i % 2 ? others : ones) + i / 2 * kHalfBytes;
      *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
    }
  }

  /// Four dims of V of tokens A and B from the words of a block for them.
  __device__ void four_dims(std::uint32_t first, std::uint32_t second, std::uint32_t scale, std::uint32_t min,
                            uint2& a, uint2& b) const {
    if constexpr (Tile::kFourBits) {
      std::uint32_t x[4];  // dim j of both
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = fma_f16x2(Codes<P.dtype>::pair(first, j), scale, min);
      a = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410)};
      b = {__byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632)};
    } else {
      const uint2 low = Codes<P.dtype>::of_tokens(first), high = Codes<P.dtype>::of_tokens(second);
      a = {low.x, high.x}, b = {low.y, high.y};
      if constexpr (Tile::kScaled) {
        const std::uint32_t of_a = __byte_perm(scale, 0, 0x1010), of_b = __byte_perm(scale, 0, 0x3232);
        a = {mul_f16x2(a.x, of_a), mul_f16x2(a.y, of_a)};
        b = {mul_f16x2(b.x, of_b), mul_f16x2(b.y, of_b)};
      }
    }
  }
  /// V of a tile to `values`, the row of its first token, as of K. `alive`: tokens of the tile that the
  /// request has, all if kWhole; the others become zeros.
  template <bool kWhole>
  __device__ void convert_values(const std::uint8_t* tile, std::uint8_t* values, int alive) const {
    const int g = lane / 4, t = lane % 4;
    const std::uint8_t* const data = tile + Tile::kPartBytes;
    const int row = 2 * t;
    constexpr int kChunks = Tile::kPartBytes / 512, kAtOnce = 2;  // whose loads do not wait for stores
    constexpr int kChunkBlocks = Tile::kBlocks / kChunks;
    std::uint32_t codes[kAtOnce][4], scale[2], min[2];  // of tokens 2t, 2t + 1 and 2t + 8, 2t + 9
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      const int chunk = block / kChunkBlocks;
#pragma unroll
      for (int i = 0; i < (block % (kAtOnce * kChunkBlocks) == 0 ? kAtOnce : 0); ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(data + ((chunk + i) * 32 + lane) * 16);
        codes[i][0] = x.x, codes[i][1] = x.y, codes[i][2] = x.z, codes[i][3] = x.w;
      }
      const int group = Tile::group_of(block);
      if (Tile::kScaled && (block == 0 || group != Tile::group_of(block - 1))) {
        const std::uint8_t* plane = tile + Tile::kValueParams + group * (2 * kTileTokens);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          scale[pair] = Part<P>::load_pair(plane, 2 * t + 8 * pair);
          if (Tile::kFourBits) {
            min[pair] = Part<P>::load_pair(plane + Tile::kPlaneBytes, 2 * t + 8 * pair);
          }
        }
      }
      // Of 8 bits words pair and 2 + pair, of 4 bits word pair of the block.
      const std::uint32_t* words = codes[chunk % kAtOnce] + block % kChunkBlocks * 2;
      std::uint8_t* half = values + block / 2 * kHalfBytes;
      const int place = block % 2 * 4 + g / 2, within = g % 2 * 8;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {  // tokens 2t + 8 pair and the next
        uint2 x, y;
        four_dims(words[pair], Tile::kFourBits ? 0 : words[2 + pair], scale[pair], min[pair], x, y);
        if constexpr (!kWhole) {
          if (2 * t + 8 * pair >= alive) x = {};
          if (2 * t + 8 * pair + 1 >= alive) y = {};
        }
        const int even = 2 * t;  // of the token in eight
        std::uint8_t* at = half + (row + 8 * pair) * 128 + within;
        *reinterpret_cast<uint2*>(at + (place ^ even) * 16) = x;
        *reinterpret_cast<uint2*>(at + 128 + (place ^ (even + 1)) * 16) = y;
      }
    }
  }
};

}  // namespace halftone::cuda
