// Decode attention for up to 16 packed query rows of a KV head: persistent CTAs, one per worker of the
// schedule.
//
// Each of the 8 compute warps owns a ring of tiles and its own softmax state; a ninth warp refills the rings:
//   load     one bulk copy per piece (one or two tiles of 16 tokens, K, V and scales together)
//   compute  S^T = K Q^T and O^T += V^T P^T, the cache as register operand A, straight from the packed words
//   finish   the eight states are merged in shared memory; output, or a partial slot for a cut unit
// Logits are in base 2 throughout; docs/kernels.md derives the bounds.
#pragma once

#include "cuda/decode_config.h"
#include "cuda/item_queue.h"
#include "cuda/params.h"

namespace halftone::cuda {

/// Where a packed row of the current item stands.
struct RowPlace {
  std::int64_t token;  // row of Q and O
  int head;
  int position;  // bottom-right aligned: the last key that causal attention sees
  float slope;   // ALiBi, base 2
};

template <DecodeConfig C>
struct DecodeTraits {
  static constexpr int kDim = C.head_dim;
  static constexpr int kBlocks = kDim / 32;
  static constexpr int kRows = 8 * C.row_tiles;
  static constexpr int kWarps = C.warps;
  static constexpr int kThreads = 32 * kWarps;          // that compute
  static constexpr int kBlockThreads = kThreads + 128;  // and a warpgroup of which one warp loads
  static constexpr int kStepTiles =
      C.row_tiles == 1 ? C.piece_tiles : 1;  // tiles of one softmax step: registers decide
  static constexpr int kPad = 4;             // floats: spreads the rows of `out` over the banks

  static constexpr int param_bytes(const PartConfig& part) {  // of a tile; at most, unless the part is fixed
    if (part.mode == ScaleMode::kStatic) return 0;
    const int groups = part.mode == ScaleMode::kToken ? 1
                       : part.fixed                   ? kBlocks / part.group_blocks
                                                      : kBlocks;
    return kTileTokens * groups * (part.fixed && !part.asymmetric ? 2 : 4);
  }
  static constexpr int kTileBytes = kTileTokens * kDim * (dtype_bits(C.k.dtype) + dtype_bits(C.v.dtype)) / 8 +
                                    param_bytes(C.k) + param_bytes(C.v);

  static constexpr int kMaxShared = 227 * 1024;

  struct Shared {
    alignas(128) std::uint8_t ring[kWarps][C.stages][C.piece_tiles * kTileBytes];
    // B fragments [high, low part][row tile][block][lane][step, register, half]
    alignas(16) std::uint16_t q[2][C.row_tiles][kBlocks][32][8];
    alignas(16) float q_row[kRows][kDim];  // while a row is rotated
    float q_sums[kRows][kBlocks];          // of the rounded, scaled Q, per block of dims
    float q_factor[kRows];                 // turns a raw product into a base-2 logit
    alignas(16) float out[kWarps][kRows][kDim + kPad];
    float state[kWarps][kRows][2];  // maximum (base 2), sum
    std::uint64_t full[kWarps][C.stages];
    std::uint64_t empty[kWarps][C.stages];
    std::uint32_t live[kWarps][C.stages];  // bit i: tile i of the piece was loaded
    RowPlace places[kRows];
    float weights[kWarps + 1][kRows];  // of the warps' states, and of the slot that is folded in
    float2 merged[kRows];              // maximum (base 2), sum
    ItemQueue queue;
    int last_arrival;
  };
};

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLazyRescale =
    2.0f;  // P stays below 2^2, so that P * scale fits f16 for scales up to 16,000
inline constexpr float kMinus = -__builtin_huge_valf();

}  // namespace halftone::cuda
