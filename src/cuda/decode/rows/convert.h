// The converting roles: K and V of each piece become f16, K in rows of tokens for Q K^T, V in rows of tokens,
// too, which P V takes as columns. A lane turns strings of a tile (format/page.h) into 16 bytes of a token
// of K, or 8 of one of V, at a time; neither side has bank conflicts.
#pragma once

#include "cuda/decode/rows/queries.h"
#include "cuda/decode/side.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {

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

template <DecodeConfig C>
struct RowsConverter {
  using Traits = DecodeRowsTraits<C>;
  using Tiles = std::uint8_t[C.piece_tiles][Traits::kTileBytes];
  static constexpr int kOwn = C.piece_tiles / Traits::kKeyWarps;  // tiles of K of a warp
  typename Traits::Shared& s;
  int warp, lane;  // warp: among those of the role

  /// K of the warp's tiles of a piece, whose first is tile kOwn * warp. What a token that is not there holds
  /// is masked. Whether `scales` of the warp's tokens multiply their logits.
  __device__ bool convert_keys(const Tiles& tiles, std::uint8_t* keys, float* scales) const {
    constexpr int kChunks = Traits::kDim * Traits::kBits / 512;  // of 16 bytes of a string
    const int token = lane / 4, t = lane % 4;                    // and 8 tokens on
    uint4 codes[kOwn][2][kChunks];
    Params params[kOwn][2];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const std::uint8_t* const tile = tiles[kOwn * warp + n];
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          codes[n][eight][i] = *reinterpret_cast<const uint4*>(tile + (i * 64 + eight * 32 + lane) * 16);
        }
        if constexpr (Traits::kFourBits) params[n][eight].load(tile, 8 * eight + token);
      }
    }
    bool scaled = Traits::kScaledLogits;
    if constexpr (Traits::kScaledLogits) {
      static_assert(kOwn * kTileTokens == 32);
      const std::uint8_t* const tile = tiles[kOwn * warp + lane / kTileTokens];
      scales[32 * warp + lane] = Part<C.k>::load(tile + Traits::kKeyParams, lane % kTileTokens);
    }
    if constexpr (Traits::kFourBits) scaled = bound(tiles, params, scales);
    // Chunks of a token's row of 64 dims: those of odd tokens go the other way round, so that eight lanes
    // write eight chunks.
    const int odd = token % 2 * 4;
    std::uint8_t* const to = keys + (kOwn * warp * kTileTokens + token) * 128;
    std::uint8_t* const ones = to + ((odd + t) ^ token) * 16;
    std::uint8_t* const others = to + ((4 - odd + t) ^ token) * 16;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int place = (n * kTileTokens + 8 * eight) * 128;
        if constexpr (Traits::kFourBits) {
          convert_blocks(codes[n][eight][0], params[n][eight], odd != 0, ones + place, others + place);
        } else {
#pragma unroll
          for (int i = 0; i < kChunks; ++i) {
            const uint4 x = codes[n][eight][i];
            const int at = place + i * Traits::kHalfBytes;
            *reinterpret_cast<uint4*>(ones + at) = eight_codes(odd ? x.z : x.x, odd ? x.w : x.y);
            *reinterpret_cast<uint4*>(others + at) = eight_codes(odd ? x.x : x.z, odd ? x.y : x.w);
          }
        }
      }
    }
    return scaled;
  }
  static __device__ uint4 eight_codes(std::uint32_t a, std::uint32_t b) {
    const uint2 x = Codes<C.k.dtype>::in_order(a), y = Codes<C.k.dtype>::in_order(b);
    return {x.x, x.y, y.x, y.y};
  }

  /// Of a token of K in 4 bits.
  struct Params {
    GroupValues<Traits::kGroups> scale, min;

    __device__ void load(const std::uint8_t* tile, int token) {
      const std::uint8_t* const from = tile + Traits::kKeyParams + token * (Traits::kGroups * 2);
      scale.load(from);
      min.load(from + Traits::kPlaneBytes);
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
    __device__ void shrink() {
      constexpr std::uint32_t kFactor = 0x28002800u;  // 2^-5
#pragma unroll
      for (int i = 0; i < scale.kWords; ++i) {
        scale.words[i] = mul_f16x2(scale.words[i], kFactor), min.words[i] = mul_f16x2(min.words[i], kFactor);
      }
    }
  };
  /// Tokens whose values f16 may not hold lose 2^5, which logits get back. Whether any of the warp's have.
  __device__ bool bound(const Tiles& tiles, Params (&params)[kOwn][2], float* scales) const {
    static_assert(kOwn * kTileTokens == 32);
    Params own;  // of a token a lane
    own.load(tiles[kOwn * warp + lane / kTileTokens], lane % kTileTokens);
    const bool large = own.large();
    if (!__any_sync(~0u, large)) return false;
    scales[32 * warp + lane] = large ? 32.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
      if (params[i / 2][i % 2].large()) params[i / 2][i % 2].shrink();
    }
    return true;
  }
  /// Four words of 4 bits, of a block of dims each: of the eight dims of a lane 0, 4, 1, 5, 2, 6, 3, 7.
  __device__ void convert_blocks(const uint4& codes, const Params& params, bool odd, std::uint8_t* ones,
                                 std::uint8_t* others) const {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < Traits::kBlocks; ++i) {
      const std::uint32_t word = odd ? words[i ^ 1] : words[i];
      const int group = Traits::group_of(i), other = Traits::group_of(i ^ 1);
      const std::uint32_t a = odd ? params.scale[other] : params.scale[group];
      const std::uint32_t b = odd ? params.min[other] : params.min[group];
      std::uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = fma_f16x2(Codes<C.k.dtype>::pair(word, j), a, b);
      std::uint8_t* const to = (i % 2 ? others : ones) + i / 2 * Traits::kHalfBytes;
      *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
    }
  }

  /// Four dims of V of tokens A and B from the words of a block for them.
  __device__ void four_dims(std::uint32_t first, std::uint32_t second, std::uint32_t scale, std::uint32_t min,
                            uint2& a, uint2& b) const {
    if constexpr (Traits::kFourBits) {
      std::uint32_t x[4];  // dim j of both
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = fma_f16x2(Codes<C.v.dtype>::pair(first, j), scale, min);
      a = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410)};
      b = {__byte_perm(x[0], x[1], 0x7632), __byte_perm(x[2], x[3], 0x7632)};
    } else {
      const uint2 low = Codes<C.v.dtype>::of_tokens(first), high = Codes<C.v.dtype>::of_tokens(second);
      a = {low.x, high.x}, b = {low.y, high.y};
      if constexpr (Traits::kScaled) {
        const std::uint32_t of_a = __byte_perm(scale, 0, 0x1010), of_b = __byte_perm(scale, 0, 0x3232);
        a = {mul_f16x2(a.x, of_a), mul_f16x2(a.y, of_a)};
        b = {mul_f16x2(b.x, of_b), mul_f16x2(b.y, of_b)};
      }
    }
  }
  /// V of a tile. `alive`: tokens of the tile that the request has; the others become zeros.
  template <bool kWhole>
  __device__ void convert_values(const std::uint8_t* tile, std::uint8_t* values, int alive) const {
    const int g = lane / 4, t = lane % 4;
    const std::uint8_t* const data = tile + Traits::kPartBytes;
    const int row = warp * kTileTokens + 2 * t;
    constexpr int kChunks = Traits::kPartBytes / 512, kAtOnce = 2;  // whose loads do not wait for stores
    constexpr int kChunkBlocks = Traits::kBlocks / kChunks;
    std::uint32_t codes[kAtOnce][4], scale[2], min[2];  // of tokens 2t, 2t + 1 and 2t + 8, 2t + 9
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
      const int chunk = block / kChunkBlocks;
#pragma unroll
      for (int i = 0; i < (block % (kAtOnce * kChunkBlocks) == 0 ? kAtOnce : 0); ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(data + ((chunk + i) * 32 + lane) * 16);
        codes[i][0] = x.x, codes[i][1] = x.y, codes[i][2] = x.z, codes[i][3] = x.w;
      }
      const int group = Traits::group_of(block);
      if (Traits::kScaled && (block == 0 || group != Traits::group_of(block - 1))) {
        const std::uint8_t* plane = tile + Traits::kValueParams + group * (2 * kTileTokens);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          scale[pair] = Part<C.v>::load_pair(plane, 2 * t + 8 * pair);
          if (Traits::kFourBits) {
            min[pair] = Part<C.v>::load_pair(plane + Traits::kPlaneBytes, 2 * t + 8 * pair);
          }
        }
      }
      // Of 8 bits words pair and 2 + pair, of 4 bits word pair of the block.
      const std::uint32_t* words = codes[chunk % kAtOnce] + block % kChunkBlocks * 2;
      std::uint8_t* half = values + block / 2 * Traits::kHalfBytes;
      const int place = block % 2 * 4 + g / 2, within = g % 2 * 8;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {  // tokens 2t + 8 pair and the next
        uint2 x, y;
        four_dims(words[pair], Traits::kFourBits ? 0 : words[2 + pair], scale[pair], min[pair], x, y);
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

  /// What the warp has written is there, and it has read the packed piece.
  __device__ void release(std::uint64_t& full, std::uint64_t& empty) const {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared_address(&full));
      barrier_arrive(shared_address(&empty));
    }
  }
  /// Calls take(piece, keys of the request from the piece on) for all pieces of the worker, and begin(item)
  /// before those of each item.
  template <class Begin, class Take>
  __device__ void for_pieces(const Begin& begin, const Take& take) const {
    unsigned piece = 0;
#pragma unroll 1
    for (int index = 0; s.queue.has(index); ++index) {
      begin(index);
      const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
      const PieceRange<Traits::kPieceTokens> range(item.work);
      const int left = item.keys - range.first;
#pragma unroll 1
      for (int i = 0; i < range.count; ++i, ++piece) take(piece, left - i * Traits::kPieceTokens);
    }
  }

  __device__ void run_keys() const {
    const auto nothing = [](int) {};
    for_pieces(nothing, [&](unsigned piece, int) {
      const auto from = RingPlace<Traits::kStages>::of(piece);
      const auto to = RingPlace<Traits::kKeyStages>::of(piece);
      barrier_wait(shared_address(&s.full[from.stage]), from.parity);
      barrier_wait(shared_address(&s.keys_empty[to.stage]), to.empty_parity());
      if (warp == 0 && lane == 0) s.key_live[to.stage] = s.live[from.stage];
      const bool scaled = convert_keys(s.tiles[from.stage], s.keys[to.stage], s.key_scales[to.stage]);
      if (Traits::kFourBits && lane == 0) s.keys_scaled[to.stage][warp] = scaled;
      release(s.keys_full[to.stage], s.empty[from.stage]);
    });
  }
  /// Between items they bring queries, too.
  __device__ void run_values(const AttentionParams& p) {
    const auto bring = [&](int index) {
      if (index > 0) {
        bring_share(p, s, RowsQueries<C, 2>{p, warp, Traits::kValueWarps, lane}, index, Traits::kQueryRows,
                    Traits::kRows);
      }
      asm volatile("" : "+r"(warp), "+r"(lane));  // what follows from them takes no registers meanwhile
    };
    for_pieces(bring, [&](unsigned piece, int left) {
      const auto from = RingPlace<Traits::kStages>::of(piece);
      const auto to = RingPlace<Traits::kValueStages>::of(piece);
      barrier_wait(shared_address(&s.full[from.stage]), from.parity);
      barrier_wait(shared_address(&s.values_empty[to.stage]), to.empty_parity());
      const std::uint8_t* tile = s.tiles[from.stage][warp];
      const int alive = s.live[from.stage] >> warp & 1 ? left - warp * kTileTokens : 0;
      if (alive >= kTileTokens) {
        convert_values<true>(tile, s.values[to.stage], alive);
      } else {
        convert_values<false>(tile, s.values[to.stage], alive);
      }
      release(s.values_full[to.stage], s.empty[from.stage]);
    });
  }
};

}  // namespace halftone::cuda
