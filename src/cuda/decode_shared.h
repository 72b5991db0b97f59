// Decode attention for up to 64 packed query rows of a KV head: persistent CTAs, one per worker of the
// schedule.
//
// The warps of a CTA have three roles:
//   load     one warp: a bulk copy per piece (one or two tiles of 16 tokens, K, V and scales together)
//   compute  S^T = K Q^T and O^T += V^T P^T, the cache as register operand A, straight from the packed words;
//            a team of warps shares a ring of pieces, each warp with its own rows and softmax state
//   finish   three warps: bring the queries of the next item, merge the teams' states of the last one, write
//            outputs or partial slots, and merge the slots of a cut unit; with many rows the compute warps do
//            it
// Logits are in base 2 throughout; docs/kernels.md derives the bounds.
#pragma once

#include "cuda/decode_config.h"
#include "cuda/item_queue.h"
#include "cuda/params.h"

namespace halftone::cuda {

/// Where a packed row of an item stands.
struct RowPlace {
  std::int64_t token;  // row of Q and O
  int head;
  int position;  // bottom-right aligned: the last key that causal attention sees
  float slope;   // ALiBi, base 2
};

/// The hardware barriers of a block.
enum Barrier : int {
  kComputeReady = 0,  // the compute warps wait for the load warp's setup
  kCompute = 1,       // among the compute warps
  kStates = 2,        // the finish warps wait for the states of an item
  kOthersReady = 3,   // the finish warps, and further load warps, wait for the first load warp's setup
};

#ifndef HT_LOAD
#define HT_LOAD 1
#endif
inline constexpr int kLoadWarps = HT_LOAD;
inline constexpr int kFinishWarps = 4 - kLoadWarps;  // and the load warp: a warpgroup, for setmaxnreg

template <DecodeConfig C>
struct DecodeTraits {
  static constexpr int kDim = C.head_dim;
  static constexpr int kBlocks = kDim / 32;
  static constexpr int kWarpRows = 8 * C.row_tiles;
  static constexpr int kRows = rows_of(C);
  static constexpr int kWarps = C.teams * C.row_groups;  // that compute
  static constexpr int kLoadWarp = kWarps;               // then the finish warps
  static constexpr int kThreads = 32 * (kWarps + kLoadWarps + kFinishWarps);
  static constexpr int kStatesThreads = 32 * (kWarps + kFinishWarps);  // that meet when states are full
  static constexpr int kComputeThreads = 32 * kWarps;
  static constexpr int kOthersReady = 32 * (kLoadWarps + (C.row_groups > 1 ? 0 : kFinishWarps));
  static constexpr int kPieceTokens = C.piece_tiles * kTileTokens;
  static constexpr int kStepTiles =
      C.row_tiles == 1 ? C.piece_tiles : 1;  // tiles of one softmax step: registers decide
  static constexpr bool kComputeFinishes = C.row_groups > 1;
  static constexpr int kQueryWarps = kComputeFinishes ? kWarps : kFinishWarps;  // that bring queries
  // Per thread, of the compute warps and of the other warpgroup; 4 compute warps have plenty.
  static constexpr int kOtherRegisters = kComputeFinishes ? 64 : 72,
                       kComputeRegisters = kComputeFinishes ? 224 : 216;
  static constexpr int kPartsAtOnce = kDim > 128 ? 1 : 4;
  static constexpr bool kRehearses = C.row_tiles == 1 && kDim <= 128;  // registers again
  static constexpr int kPad = 4;  // floats: spreads the rows of `out` over the banks

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
  static constexpr int kRingBytes = C.piece_tiles * kTileBytes;                  // of a stage
  static constexpr int kEmptyOffset = C.teams * C.stages * int{sizeof(std::uint64_t)};  // from full to empty

  /// The queries of an item, as the compute warps take them.
  struct Queries {
    // B fragments [high, low part][row tile][block][lane][step, register, half]; the low part only where the
    // high one is not exact
    alignas(16) std::uint16_t fragments[2][kRows / 8][kBlocks][32][8];
    float sums[kRows][kBlocks];  // of the scaled Q, per block of dims
    float factor[kRows];         // turns a raw product into a base-2 logit
    RowPlace places[kRows];
  };

  struct Shared {
    alignas(128) std::uint8_t ring[C.teams][C.stages][kRingBytes];
    Queries queries[2];                                  // of items 2 i and 2 i + 1
    alignas(16) float out[C.teams][kRows][kDim + kPad];  // unnormalised
    float2 state[C.teams][kRows];                        // maximum (base 2), sum
    std::uint64_t full[C.teams][C.stages];               // a piece has arrived
    std::uint64_t empty[C.teams][C.stages];              // its team has read it
    std::uint64_t queries_full[2];
    std::uint64_t states_empty;             // the finish warps have read them
    std::uint32_t live[C.teams][C.stages];  // bit i: tile i of the piece was loaded
    ItemQueue queue;
  };
};

/// A rotated row has fp32 values, and bf16 cannot hold an f16 one.
template <DecodeConfig C>
__device__ inline bool needs_low_part(const DecodeParams& p) {
  return p.rotate_k || (C.k.dtype == DType::kBFloat16 && !p.q_bf16);
}

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLazyRescale =
    2.0f;  // P stays below 2^2, so that P * scale fits f16 for scales up to 16,000
inline constexpr float kMinus = -__builtin_huge_valf();

}  // namespace halftone::cuda
