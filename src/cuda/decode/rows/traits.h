// Decode with packed query rows as M of the products and tokens as N: 17 to 64 rows of a KV head over codes
// of 8 and 4 bits at head_dim 128. What follows from a row of the table: roles, registers, shared memory.
//
// The warps of a CTA have four roles:
//   compute  two warpgroups, each with all 64 rows: of an item's pieces of 64 tokens one takes the even ones,
//            the other the odd ones. P in registers
//   convert  six warps: K and V of a piece become f16 in shared memory, V a tile for each of four warps, K
//            two tiles for each of two
//   load     a warp: bulk copies of whole tiles
//   queries  a warp, and between items those that convert V: the next item's Q in f16. The warp also writes
//            the new tokens of problems that append (append.h)
// docs/kernels/decode-rows.md derives the bounds.
#pragma once

#include "cuda/attention/item_queue.h"
#include "cuda/attention/params.h"
#include "cuda/attention/tile_converter.h"
#include "cuda/decode/traits.h"

namespace halftone::cuda {

template <DecodeConfig C>
struct DecodeRowsTraits {
  static_assert(C.family == Family::kRows && C.head_dim == 128 && C.piece_tiles == 4);
  static constexpr int kDim = C.head_dim;
  static constexpr int kRows = rows_of(C);
  static_assert(kRows == 64);
  static constexpr int kTeams = 2;                       // compute warpgroups
  static constexpr int kValueWarp = 8, kValueWarps = 4;  // that convert V
  static constexpr int kLoadWarp = 12;
  static constexpr int kQueryWarp = 13;
  static constexpr int kKeyWarp = 14, kKeyWarps = 2;  // that convert K
  static constexpr int kQueryRows = 16;  // that the query warp brings; the warps that convert V the others
  static constexpr int kThreads = 512;
  static constexpr int kComputeThreads = 128 * kTeams;
  // Per thread; 128 for each of 512 at first.
  static constexpr int kComputeRegisters = 192, kConvertRegisters = 64, kOtherRegisters = 64;
  static_assert(kTeams * kComputeRegisters + kConvertRegisters + kOtherRegisters <= 512);

  static constexpr int kPieceTokens = C.piece_tiles * kTileTokens;
  static constexpr int kStages = C.stages;                // of packed pieces
  static constexpr int kKeyStages = 2, kValueStages = 3;  // of K and V in f16

  static_assert(C.k == C.v);
  using Tile = PackedTile<C.k>;
  // A row's offset is raised when a lane's sum of P in a piece passes kLargestSum, and then so that the
  // largest P is 2^kFirstLog2.
  static constexpr float kLargestSum = 32768.0f;
  static constexpr int kFirstLog2 = 7;

  // Matrices in f16 lie as [half of the dims][row or token][64 dims], rows of 128 bytes swizzled over 8.
  static constexpr int kHalfBytes = 64 * 128, kMatrixBytes = 2 * kHalfBytes;
  static_assert(kRows == 64 && kPieceTokens == 64 && kDim == 128);

  /// An item's rows.
  struct alignas(1024) Queries {
    union {
      std::uint8_t parts[2][kMatrixBytes];  // f16 of Q, and where that is not exact what it leaves
      float4 exchange[kTeams][8][128];      // at the end of the item: of the warpgroups
    };
    float factor[kRows];  // turns products into base-2 logits
    int position[kRows];  // RowPlace
    float slope[kRows];   // likewise
    float value_scale;    // a static one
  };

  struct Shared {
    alignas(1024) std::uint8_t keys[kKeyStages][kMatrixBytes];
    alignas(1024) std::uint8_t values[kValueStages][kMatrixBytes];
    Queries queries[2];  // item i's are at i % 2
    alignas(128) std::uint8_t tiles[kStages][C.piece_tiles][Tile::kBytes];
    float key_scales[kKeyStages][Tile::kScaledLogits || Tile::kFourBits ? kPieceTokens : 1];
    float2 exchange_state[kTeams][128];
    std::uint64_t full[kStages], empty[kStages];
    std::uint64_t keys_full[kKeyStages], keys_empty[kKeyStages];
    std::uint64_t values_full[kValueStages], values_empty[kValueStages];
    std::uint64_t queries_full[2], queries_empty[2];
    std::uint32_t live[kStages];         // bit i: tile i is there
    std::uint32_t key_live[kKeyStages];  // likewise
    // Of 4 bits, of each key warp's half of a piece: whether key_scales count.
    alignas(2) bool keys_scaled[kKeyStages][kKeyWarps];
    volatile int appended;  // items whose new tokens are written
    ItemQueue queue;
  };
  static constexpr int kMaxShared = 227 * 1024;
  static_assert(sizeof(Shared) <= kMaxShared);
};

/// Pieces of an item begin at multiples of their size. [first token, one past the last piece).
template <int kPieceTokens>
struct PieceRange {
  int first, count;
  __device__ explicit PieceRange(const planning::WorkItem& work)
      : first(work.kv_begin / kPieceTokens * kPieceTokens),
        count(work.kv_begin < work.kv_end ? (work.kv_end - first + kPieceTokens - 1) / kPieceTokens : 0) {}
};

}  // namespace halftone::cuda
