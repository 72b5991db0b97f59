// Decode with packed query rows as M of the products and tokens as N: 17 to 64 rows of a KV head over codes
// of 8 bits at head_dim 128. What follows from a row of the table: roles, registers, shared memory.
//
// The warps of a CTA have four roles:
//   compute  two warpgroups, each with all 64 rows: of an item's pieces of 64 tokens one takes the even ones,
//            the other the odd ones. Q K^T with K as it lies in its page, P in registers
//   convert  a warpgroup: V of a piece becomes f16 in shared memory, a tile for each warp
//   load     two warps: copies of K, and of V
//   queries  two warps: digits of the next item's Q
// docs/kernels/decode-rows.md derives the bounds.
#pragma once

#include "cuda/attention/item_queue.h"
#include "cuda/decode/config.h"
#include "cuda/decode/rows/params.h"
#include "cuda/device/ring.h"

namespace halftone::cuda {

template <DecodeConfig C>
struct DecodeRowsTraits {
  static_assert(C.family == Family::kRows && C.head_dim == 128 && C.piece_tiles == 4);
  static constexpr int kDim = C.head_dim;
  static constexpr int kRows = rows_of(C);
  static_assert(kRows == 64);
  static constexpr int kTeams = 2;        // compute warpgroups
  static constexpr int kConvertWarp = 8;  // the first of four
  static constexpr int kLoadWarp = 12;
  static constexpr int kQueryWarp = 14;
  static constexpr int kQueryWarps = 2;
  static constexpr int kThreads = 512;
  static constexpr int kComputeThreads = 128 * kTeams;
  // Per thread; 128 for each of 512 at first.
  static constexpr int kComputeRegisters = 208, kConvertRegisters = 40, kOtherRegisters = 56;
  static_assert(kTeams * kComputeRegisters + kConvertRegisters + kOtherRegisters <= 512);

  static constexpr int kPieceTokens = C.piece_tiles * kTileTokens;
  static constexpr int kStages = C.stages;  // of packed pieces
  static constexpr int kValueStages = 3;    // of V in f16

  static constexpr bool kScaledK = C.k.mode == ScaleMode::kToken, kScaledV = C.v.mode == ScaleMode::kToken;
  static constexpr int kDigits = 2;  // of Q, 8 bits each: a signed high and an unsigned low one
  // A row's offset is raised when a lane's sum of P in a piece passes kLargestSum, and then so that the
  // largest P is 2^kFirstLog2.
  static constexpr float kLargestSum = 32768.0f;
  static constexpr int kFirstLog2 = 10;

  static constexpr int kKeyBytes = kPieceTokens * kDim;
  static constexpr int kValueTileBytes = kTileTokens * (kDim + (kScaledK ? 2 : 0) + (kScaledV ? 2 : 0));

  /// An item's rows.
  struct Queries {
    alignas(1024) std::uint8_t digits[kDigits][kRows * kDim];  // [row][k], 128 bytes swizzled
    float factor[kRows];                                       // turns products into base-2 logits
    int position[kRows];                                       // RowPlace
    float slope[kRows];                                        // likewise
    float value_scale;                                         // a static one
  };

  struct Shared {
    alignas(1024) std::uint8_t k[kStages][kKeyBytes];                          // [half][token][64], swizzled
    alignas(1024) std::uint8_t values[kValueStages][kPieceTokens * kDim * 2];  // [half][token][64], swizzled
    Queries queries[2];                                                        // item i's are at i % 2
    alignas(128) std::uint8_t v[kStages][C.piece_tiles][kValueTileBytes];      // with the params of K and V
    float4 exchange[kTeams][8][128];  // of the warpgroups at the end of an item
    float2 exchange_state[kTeams][128];
    std::uint64_t full[kStages], empty[kStages];
    std::uint64_t values_full[kValueStages], values_empty[kValueStages];
    std::uint64_t queries_full[2], queries_empty[2];
    std::uint32_t live[kStages];  // bit i: tile i is there
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

/// Piece `index` of all that a worker takes, in a ring of kStages.
template <int kStages>
struct PiecePlace {
  int stage;
  std::uint32_t parity;  // of the phase that ends when the stage is full
  __device__ explicit PiecePlace(unsigned index)
      : stage(static_cast<int>(index % kStages)), parity(index / kStages & 1) {}
  __device__ std::uint32_t empty_parity() const { return parity ^ 1; }
};

}  // namespace halftone::cuda
