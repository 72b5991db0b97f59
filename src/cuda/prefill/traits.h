// What follows from a row of the table: threads, registers, shared memory.
#pragma once

#include "cuda/attention/items.h"
#include "cuda/attention/tile_converter.h"
#include "cuda/device/ring.h"
#include "cuda/prefill/config.h"

namespace halftone::cuda {

/// An item as a warpgroup, or those that share its rows, pass it, from the last tile to the first. Of the
/// tiles that its rows see the first one is number 0.
struct alignas(16) GroupTiles {
  int before;                        // tiles that come before those that the rows see
  int last;                          // number of the one that comes first; -1: they see none
  int after;                         // tiles that come after them
  int first;                         // token of number 0
  int unmasked_first, unmasked_end;  // tokens: all rows see the tiles between them whole
  int plain;                         // the first tile whose products need nothing but their scales
  std::uint32_t plain_count;         // how many there are
  int alive;                         // tokens of the last tile that the request has
  int query;                         // of Q and O, the token of the first row
};

/// Where 16 bytes of a row lie as tensor copies swizzle them, and wgmma reads them.
template <int kRowBytes>
struct SwizzledPlace {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  static constexpr int kPieces = kRowBytes / 16;  // of a row

  /// Of a chunk's row `row`, counted from a multiple of 8; bytes from that row's.
  __device__ static int piece(int row, int piece) {
    return (piece ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4)) * 16;
  }
};

template <PrefillConfig C>
struct PrefillTraits {
  static constexpr int kDim = C.head_dim;
  static constexpr int kRows = rows_of(C), kRowGroups = row_groups(C);
  static_assert(C.shares == 1 || (C.warpgroups % C.shares == 0 && C.value_dim % (C.shares * 64) == 0));
  // Rows lie in chunks of so many bytes and dims. Dims that the last one has too many are not read.
  static constexpr int kRowBytes = C.row_bytes, kChunkDims = kRowBytes / 2;
  static constexpr int kChunks = (kDim + kChunkDims - 1) / kChunkDims;
  static constexpr int kValueChunks = (C.value_dim + kChunkDims - 1) / kChunkDims;
  using Place = SwizzledPlace<kRowBytes>;
  static constexpr int kComputeWarps = 4 * C.warpgroups;
  static constexpr bool kPacked = C.keys == PrefillKeys::kPacked;
  static constexpr bool kTurns = C.keys == PrefillKeys::kCodePages;
  static constexpr int kConvertWarps = kPacked ? 8 : kTurns ? 4 : 0;
  static constexpr int kThreads = 32 * (kComputeWarps + 4 + kConvertWarps);
  // All of what a block gets: 128 registers for each of 512 threads, 168 for each of 384, or 96 for each of
  // 640.
  static constexpr int kConvertRegisters = kTurns ? 56 : 48;
  static constexpr int kOtherRegisters = kPacked ? 32 : C.warpgroups == 2 ? 40 : C.head_dim == 64 ? 56 : 32;
  static constexpr int kComputeRegisters = kPacked             ? 176
                                           : kTurns            ? 208
                                           : C.warpgroups == 2 ? 232
                                           : C.head_dim == 64  ? 152
                                                               : 160;
  static_assert(kComputeRegisters * C.warpgroups + kOtherRegisters + kConvertWarps / 4 * kConvertRegisters <=
                65536 / kThreads / 8 * 8 * (kThreads / 128));
  static constexpr bool kCodes = C.keys == PrefillKeys::kCodes || kTurns;
  static constexpr bool kStaged = C.keys != PrefillKeys::kGiven;
  static constexpr bool kE4m3 = C.dtype == DType::kFloat8E4M3;  // both products
  using Tile = PackedTile<kPacked ? C.part : parts::kFp8>;
  // Of packed keys: each has a stored scale, or a few may.
  static constexpr bool kScaledLogits = kPacked && Tile::kScaledLogits,
                        kFourBits = kPacked && Tile::kFourBits;
  static_assert(!kPacked || (C.kv_tile % 32 == 0 && kDim == Tile::kDim && C.value_dim == kDim));
  static_assert(!kE4m3 || (kCodes && C.kv_tile % 32 == 0));
  static constexpr int kKeyRowBytes = key_row_bytes(C);
  static constexpr int kKeyChunks = kCodes ? kDim / kKeyRowBytes : kChunks;
  static constexpr int kKeyChunkDims = kCodes ? kKeyRowBytes : kChunkDims;
  using KeyPlace = SwizzledPlace<kKeyRowBytes>;
  static_assert(!kCodes || (kDim % 64 == 0 && kRowBytes == 128));
  static constexpr int kKeyTileBytes = C.kv_tile * kKeyChunks * kKeyRowBytes;
  static constexpr int kValueTileBytes = C.kv_tile * (kE4m3 ? C.value_dim : kValueChunks * kRowBytes);
  static constexpr int kQueryBytes = 64 * kChunks * kRowBytes;  // of 64 rows
  static constexpr int kItems = 2;
  // Of a packed tile what a warp converts at a time: a tile of 16 tokens, of K or of V.
  static constexpr int kPackedTiles = kPacked ? C.kv_tile / kTileTokens : 1, kTasks = 2 * kPackedTiles;
  // Tiles as pages have them: where V is turned over they come to where they stay.
  static constexpr int kPackedStages = kTurns ? C.stages : C.packed_stages;
  // Each warp has one of every tile, so that it sees the end.
  static_assert(!kPacked || kTasks >= kConvertWarps);
  /// The next item is taken when so many tiles of K are still to be brought. Much earlier is worse where
  /// items differ, since what a worker has taken no other can begin; later, too, with two buffers of queries,
  /// which then come too late. At 64 dims, whose tiles take half as long, nine suit calls without a mask.
  static constexpr int kTakenAhead = C.query_buffers == 1 ? 1 : C.head_dim == 64 ? 9 : 5;
  static constexpr int kQueryBuffers = C.query_buffers;
  static constexpr bool kStagesOutput = kQueryBuffers == 2;
  static_assert(C.shares == 1 || !kStagesOutput);
  static_assert(kValueChunks <= kChunks);  // O lies where the queries lay
  /// The next item is taken beside the last P V of the one before: of 1,024 keys in E4M3 3% less. Of other
  /// types that gains nothing.
  static constexpr bool kTakesAhead = kQueryBuffers == 2 && kE4m3;
  /// The first warpgroup begins an item when the second has its first products. Two in step all want tensor
  /// cores, then all exponentials, and stay so: chunks take 5 to 10% more where chance has it that way. Three
  /// are not timed better.
  static constexpr bool kTakesTurns = C.warpgroups == 2 && C.shares == 1;
  // Rows of the item that Q lacks may leave tiles to its end that the second warpgroup does not see.
  static_assert(!kTakesTurns || ((63 + C.kv_tile - 1) / C.kv_tile < C.stages && !kTakesAhead));
  // Before an item's first tile that a warpgroup sees it passes those that only the others see. As many at
  // most come after its last one; where the next item is taken before they are passed, they wait for it.
  static_assert(!kTakesAhead || (64 * (C.warpgroups - 1) + C.kv_tile - 1) / C.kv_tile < C.stages);
  static constexpr bool kKeepsSlopes = C.head_dim < 256;  // shared memory

  /// An item, and what follows from it for its rows.
  struct alignas(16) Item {
    DeviceItem item;  // row_end < 0: no more
    GroupTiles tiles[kRowGroups];
    int position[kRows];  // RowPlace
    float
        slope[kKeepsSlopes ? kRows : 1];  // likewise, in base 2; never empty: nvcc would pad the item wrongly
    float value_scale;                    // of staged, packed and E4M3 V: what O is multiplied by at the end
    std::uint64_t followed;               // a barrier: what follows from the item is there
  };

  /// The item of a warp.
  struct alignas(8) OwnTiles {
    int plain;                  // GroupTiles
    std::uint32_t plain_count;  // likewise
    int first, alive;           // likewise
    int queries;                // where they lie in Shared::q
    int item;                   // its number
    int step;                   // the tile at hand is the first, or has raised an offset
    bool promoted[kItems];      // of an item: PromotedSums has a part of O
    enum : int { kUsual, kFirst, kRaised };
  };

  struct Shared {
    // [chunk][row][kChunkDims, of codes 128], later O; beside codes PromotedSums.
    alignas(1024) std::uint8_t q[kQueryBuffers][kRowGroups][kQueryBytes];
    alignas(1024) std::uint8_t k[C.stages][kKeyTileBytes];    // [chunk][token][kKeyChunkDims]
    alignas(1024) std::uint8_t v[C.stages][kValueTileBytes];  // likewise; of E4M3 as value_tiles.h has it
    alignas(128) std::uint8_t packed[C.packed_stages][kPackedTiles][Tile::kBytes];
    Item items[kItems];
    alignas(8) std::uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
    std::uint64_t q_full[kQueryBuffers][kRowGroups], q_empty[kQueryBuffers][kRowGroups];
    std::uint64_t item_full[kItems], item_empty[kItems], take_next;
    std::uint32_t merges[kRowGroups];  // UnitParts
    int begun;                         // the item whose first products the second warpgroup has
    std::uint64_t packed_full[kPackedStages], packed_empty[C.packed_stages];
    std::uint32_t packed_live[kPackedStages];  // as `live`
    int packed_keys[kPackedStages];            // of the request from the tile's first one on; kPackedEnd
    std::uint32_t live[C.stages];              // bit i: tile i of 16 tokens is there; kScaledTile
    alignas(8) float key_scales[kStaged ? C.stages : 0][C.kv_tile];
    // Of packed codes of 4 bits, of each 16 keys whether a scale counts.
    alignas(8) bool keys_scaled[kFourBits ? C.stages : 0][8];
    // What need not be kept in registers, which are dear: the tiles of a warp; of its rows by how much an
    // offset was raised.
    OwnTiles own[kComputeWarps];
    std::int8_t raised_log2[16 * kComputeWarps];
    float query_factors[kStaged ? kRows : 0];               // and what their products are multiplied by
    float promoted_offset[kE4m3 ? 16 * kComputeWarps : 0];  // what sums of earlier tiles are relative to
    float4 promoted[C.promoted_near][32 * kComputeWarps];   // PromotedSums
  };
  static constexpr int kMaxShared = 227 * 1024;
  static_assert(sizeof(Shared) <= kMaxShared);
};

/// Bit of Shared::live: a key of the tile has a scale other than 1, of codes other than the first one, or, of
/// packed codes with one per token, any.
inline constexpr std::uint32_t kScaledTile = 1u << 31;

/// Roles of the warps behind the compute warps.
enum PrefillRole : int { kLoadKeys, kLoadValues, kLoadQueries, kTakeItems, kConvert };

}  // namespace halftone::cuda
