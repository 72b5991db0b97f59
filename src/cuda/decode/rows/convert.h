// The converting roles: K and V of each piece become f16.
#pragma once

#include "cuda/attention/tile_converter.h"
#include "cuda/decode/rows/queries.h"

namespace halftone::cuda {

template <DecodeConfig C>
struct RowsConverter {
  using Traits = DecodeRowsTraits<C>;
  using Converter = TileConverter<C.k, Traits::kPieceTokens>;
  typename Traits::Shared& s;
  int warp, lane;  // warp: among those of the role

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
      const unsigned end = piece + range.count;
      int left = item.keys - range.first;
#pragma unroll 1
      for (; piece != end; ++piece, left -= Traits::kPieceTokens) take(piece, left);
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
      const bool scaled = Converter{lane}.template convert_keys<2>(
          s.tiles[from.stage][2 * warp], s.keys[to.stage] + 2 * warp * (kTileTokens * 128),
          s.key_scales[to.stage] + (Traits::Tile::kFourBits || Traits::Tile::kScaledLogits ? 32 * warp : 0));
      if (Traits::Tile::kFourBits && lane == 0) s.keys_scaled[to.stage][warp] = scaled;
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
      std::uint8_t* const values = s.values[to.stage] + warp * (kTileTokens * 128);
      if (alive >= kTileTokens) {
        Converter{lane}.template convert_values<true>(tile, values, alive);
      } else {
        Converter{lane}.template convert_values<false>(tile, values, alive);
      }
      release(s.values_full[to.stage], s.empty[from.stage]);
    });
  }
};

}  // namespace halftone::cuda
