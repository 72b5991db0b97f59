// The converting role: a warpgroup turns V of each piece into f16 rows of tokens, a tile for each warp.
#pragma once

#include "cuda/decode/rows/traits.h"
#include "cuda/decode/side.h"
#include "cuda/device/ptx.h"

namespace halftone::cuda {

template <DecodeConfig C>
struct ValueConverter {
  using Traits = DecodeRowsTraits<C>;
  const AttentionParams& p;
  typename Traits::Shared& s;
  int warp, lane;

  /// Two neighbouring dims of tokens A and B of a word (format/page.h) as f16x2.
  static __device__ void unpack(std::uint32_t word, std::uint32_t& a, std::uint32_t& b) {
    const std::uint32_t offset = word ^ 0x80808080u;  // q + 128, in the low bits of 1024 + q + 128
    a = add_f16x2(__byte_perm(offset, 0x64646464u, 0x4140), 0xe480e480u);  // - 1152
    b = add_f16x2(__byte_perm(offset, 0x64646464u, 0x4342), 0xe480e480u);
  }

  /// `alive`: tokens of the tile that the request has; the others become zeros.
  template <bool kWhole>
  __device__ void convert(const std::uint8_t* tile, std::uint8_t* values, int alive) const {
    const int g = lane / 4, t = lane % 4;
    std::uint32_t scale[4];  // of tokens 2t, 2t + 1, 2t + 8, 2t + 9
    if constexpr (Traits::kScaledV) {
      const std::uint8_t* plane =
          tile + kTileTokens * Traits::kDim + (p.cache.v_param_offset - p.cache.k_param_offset);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t pair = Part<C.v>::load_pair(plane, 2 * t + 8 * i);
        scale[2 * i] = __byte_perm(pair, 0, 0x1010), scale[2 * i + 1] = __byte_perm(pair, 0, 0x3232);
      }
    }
    const int row = warp * kTileTokens + 2 * t;
    constexpr int kBlocks = Traits::kDim / 32, kAtOnce = 2;  // whose loads do not wait for stores
    std::uint32_t codes[kAtOnce][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < (block % kAtOnce == 0 ? kAtOnce : 0); ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(tile + ((block + i) * 32 + lane) * 16);
        codes[i][0] = x.x, codes[i][1] = x.y, codes[i][2] = x.z, codes[i][3] = x.w;
      }
      const std::uint32_t(&words)[4] = codes[block % kAtOnce];
      std::uint8_t* half = values + block / 2 * (Traits::kPieceTokens * 128);
      const int chunk = block % 2 * 4 + g / 2, within = g % 2 * 8;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {  // tokens 2t + 8 pair and the next
        uint2 x, y;
        unpack(words[pair], x.x, y.x);
        unpack(words[2 + pair], x.y, y.y);
        if constexpr (Traits::kScaledV) {
          x.x = mul_f16x2(x.x, scale[2 * pair]), x.y = mul_f16x2(x.y, scale[2 * pair]);
          y.x = mul_f16x2(y.x, scale[2 * pair + 1]), y.y = mul_f16x2(y.y, scale[2 * pair + 1]);
        }
        if constexpr (!kWhole) {
          if (2 * t + 8 * pair >= alive) x = {};
          if (2 * t + 8 * pair + 1 >= alive) y = {};
        }
        const int even = 2 * t;  // of the token in eight
        std::uint8_t* at = half + (row + 8 * pair) * 128 + within;
        *reinterpret_cast<uint2*>(at + (chunk ^ even) * 16) = x;
        *reinterpret_cast<uint2*>(at + 128 + (chunk ^ (even + 1)) * 16) = y;
      }
    }
  }

  __device__ void run() const {
    unsigned piece = 0;
#pragma unroll 1
    for (int index = 0; s.queue.has(index); ++index) {
      const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
      const PieceRange<Traits::kPieceTokens> range(item.work);
      const int keys = item.keys;
#pragma unroll 1
      for (int i = 0; i < range.count; ++i, ++piece) {
        const PiecePlace<Traits::kStages> from(piece);
        const PiecePlace<Traits::kValueStages> to(piece);
        barrier_wait(shared_address(&s.full[from.stage]), from.parity);
        barrier_wait(shared_address(&s.values_empty[to.stage]), to.empty_parity());
        const std::uint8_t* tile = s.v[from.stage][warp];
        const int left = keys - range.first - i * Traits::kPieceTokens - warp * kTileTokens;
        const int alive = s.live[from.stage] >> warp & 1 ? left : 0;
        if (alive >= kTileTokens) {
          convert<true>(tile, s.values[to.stage], alive);
        } else {
          convert<false>(tile, s.values[to.stage], alive);
        }
        fence_async_shared();
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(shared_address(&s.values_full[to.stage]));
          barrier_arrive(shared_address(&s.empty[from.stage]));
        }
      }
    }
  }
};

}  // namespace halftone::cuda
