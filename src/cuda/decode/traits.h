// Decode attention for up to 32 packed query rows of a KV head: persistent CTAs, one per worker of the
// schedule.
//
// The warps of a CTA have three roles:
//   load     two warps: a bulk copy per piece (1, 2 or 4 tiles of 16 tokens, K, V and scales together)
//   compute  S^T = K Q^T and O^T += V^T P^T, the cache as register operand A, straight from the packed words;
//            a team of warps shares a ring of pieces, each warp with its own rows and softmax state, or is a
//            warpgroup that divides the tiles (wgmma/loop.h)
//   finish   two warps: bring the queries of the next item, merge the teams' states of the last one, write
//            outputs or partial slots, and merge the slots of a cut unit; with many rows the compute warps do
//            it. These two also write the new tokens of problems that append (append.h)
// Logits are in base 2 throughout; docs/kernels/decode.md derives the bounds.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/decode/config.h"
#include "cuda/device/ring.h"

namespace halftone::cuda {

inline constexpr int kLoadWarps = 2;
inline constexpr int kFinishWarps = 4 - kLoadWarps;  // and the load warps: a warpgroup, for setmaxnreg
inline constexpr int kLineBytes = 128;               // of L2
inline constexpr int kChunkBytes = 16;               // that bulk copies are aligned to
// Of the word `live` of a piece: a bit for each tile, above them what add_shift() puts there.
inline constexpr int kMaxPieceTiles = 4, kShiftsAt = 8, kShiftBits = 5;
static_assert(kMaxPieceTiles <= kShiftsAt && kShiftsAt + kMaxPieceTiles * kShiftBits <= 32);

template <DecodeConfig C>
struct DecodeTraits {
  static constexpr int kDim = C.head_dim;
  static constexpr int kBlocks = (kDim + 31) / 32;  // the last one may be half a block
  static constexpr bool kWarpgroups = C.family == Family::kWarpgroup;
  static constexpr int kWarpRows = 8 * C.row_tiles;
  static constexpr int kRows = rows_of(C);
  static constexpr int kWarps = C.teams * team_warps(C);  // that compute
  static constexpr int kLoadWarp = kWarps;                // then the finish warps
  static constexpr int kThreads = 32 * (kWarps + kLoadWarps + kFinishWarps);
  static constexpr int kStatesThreads = 32 * (kWarps + kFinishWarps);  // that meet when states are full
  static constexpr int kComputeThreads = 32 * kWarps;
  static constexpr int kPieceTokens = C.piece_tiles * kTileTokens;
  static constexpr int kStepTiles =
      C.row_tiles == 1 ? C.piece_tiles : 1;  // tiles of one softmax step: registers decide
  static constexpr bool kComputeFinishes = kWarpgroups || C.row_groups > 1;
  static constexpr int kQueryWarps = kComputeFinishes ? kWarps : kFinishWarps;  // that bring queries
  // Per thread, of the compute warps and of the other warpgroup; 4 compute warps have plenty.
  static constexpr bool kLargeFinish =  // whose other warps need more
      kDim == 80 || kDim == 192 || (kDim == 256 && C.v == parts::kInt4G128);
  static constexpr int kOtherRegisters = kComputeFinishes ? 56
                                         : kLargeFinish   ? 88
                                                          : 72,
                       kComputeRegisters = kComputeFinishes ? 224
                                           : kLargeFinish   ? 208
                                                            : 216;
  static constexpr bool kScarce = kWarpgroups && C.k.mode == ScaleMode::kBlock;  // registers
  // At the end of an item: lanes of a row, and parts that the compute warps and the finish warps read
  // together.
  static constexpr int kRowLanes = kDim != 64 && kDim != 128 ? 32 : kComputeFinishes && !kScarce ? 8 : 16;
  static constexpr int kPartsOfCompute = kDim > 128                      ? 1
                                         : kWarpgroups || kRowLanes == 8 ? 2
                                                                         : 4,
                       kPartsOfFinish = 1;
  // Probabilities begin at 2^kFirstLog2 where a maximum is raised, and it is raised when one passes
  // 2^kLargestLog2. In f16, times a stored scale of V where it has one, the largest must stay finite up to
  // kMaxScaledV and the small ones away from zero: a key that is one of 100,000 counts.
  static constexpr bool kScaledP = C.v.mode != ScaleMode::kStatic && !kWarpgroups;
  static constexpr int kLargestLog2 = C.v.dtype == DType::kBFloat16 ? 8
                                      : !kScaledP                   ? 14
                                      : C.v.dtype == DType::kInt4   ? 7
                                      : C.v.dtype == DType::kInt8   ? 11
                                                                    : 13;
  static constexpr int kFirstLog2 = C.v.dtype == DType::kBFloat16 ? 0 : kLargestLog2 - (kWarpgroups ? 4 : 2);
  static constexpr int kItemsQueried = kWarpgroups ? 1 : 2;  // whose queries are held
  static constexpr bool kAnyOutput = false;                  // O is bf16 or f16, aligned
  static constexpr int kPad = 4;  // floats: spreads the rows of `out` over the banks

  static constexpr int param_bytes(const PartConfig& part) {  // of a tile
    if (part.mode == ScaleMode::kStatic) return 0;
    const int groups = part.mode == ScaleMode::kToken ? 1 : kBlocks / part.group_blocks;
    return kTileTokens * groups * (part.asymmetric ? 4 : 2);
  }
  static constexpr int kTileBytes = kTileTokens * kDim * (dtype_bits(C.k.dtype) + dtype_bits(C.v.dtype)) / 8 +
                                    param_bytes(C.k) + param_bytes(C.v);

  static constexpr int kMaxShared = 227 * 1024;
  static constexpr int kPieceBytes = C.piece_tiles * kTileBytes;
  // Where a tile is not whole lines, what a copy brings stands as far into a line in the ring as in its
  // page: between places that differ in that, copies are slower (docs/kernels/decode-measured.md). Not in
  // units of more rows, whose arithmetic binds.
  static constexpr bool kShifts = kRows == 8 && kTileBytes % kLineBytes != 0;
  static constexpr int kMaxShift = kShifts ? C.piece_tiles * (kLineBytes - kChunkBytes) : 0;  // of a tile
  static constexpr int kSlotBytes =  // of a piece in the ring
      kShifts ? (kPieceBytes + kMaxShift + kLineBytes - 1) / kLineBytes * kLineBytes : kPieceBytes;
  static_assert(!kShifts || (C.family == Family::kWarp && kTileBytes % kChunkBytes == 0));
  static_assert(C.piece_tiles <= kMaxPieceTiles && kMaxShift / kChunkBytes < 1 << kShiftBits);
  static constexpr int kEmptyOffset = C.teams * C.stages * int{sizeof(std::uint64_t)};  // from full to empty

  /// The queries of an item, as the compute warps take them.
  struct Queries {
    // Family::kWarpgroup: B matrices [high, low part][k-step][matrix_place()].
    // Family::kWarp: B fragments [high, low part][row tile][block][lane][step, register, half]; the low part
    // only where the high one is not exact
    alignas(16) std::uint16_t fragments[2][kRows / 8][kBlocks][32][8];
    float sums[kRows][kBlocks];  // of the scaled Q, per block of dims
    // Family::kWarpgroup: what K's offsets are multiplied with, a B matrix: k = 2 i and 2 i + 1 are the high
    // and the low part of group i.
    alignas(16) std::uint16_t group_sums[kWarpgroups ? kRows * 16 : 8];
    float totals[kWarpgroups ? kRows : 1];  // sums over all dims, if K has no groups
    float factor[kRows];                    // turns a raw product into a base-2 logit
    RowPlace places[kRows];
  };

  struct Shared {
    alignas(128) std::uint8_t ring[C.teams][C.stages][kSlotBytes];
    Queries queries[kItemsQueried];                      // item i's are at i % kItemsQueried
    alignas(16) float out[C.teams][kRows][kDim + kPad];  // unnormalised
    float2 state[C.teams][kRows];                        // maximum (base 2), sum
    float exchange[kWarpgroups ? C.teams : 1][4][kWarpgroups ? kRows : 1];  // between the warps of a team
    std::uint64_t full[C.teams][C.stages];                                  // a piece has arrived
    std::uint64_t empty[C.teams][C.stages];                                 // its team has read it
    std::uint64_t queries_full[2];
    std::uint64_t states_empty;             // the finish warps have read them
    std::uint32_t live[C.teams][C.stages];  // bit i: tile i of the piece was loaded; above, add_shift()
    volatile int appended[kFinishWarps];    // items whose new tokens each of these warps has written
    ItemQueue queue;
  };
};

/// Where element (k, n) of a B matrix of 16 x kColumns stands, in elements: 8 x 8 core matrices of 128 bytes
/// in which the 8 k of a column are adjacent (K-major, not swizzled).
template <int kColumns>
__host__ __device__ constexpr int matrix_place(int k, int n) {
  return (k / 8 * (kColumns / 8) + n / 8) * 64 + n % 8 * 8 + k % 8;
}

/// With DecodeTraits::kShifts the word `live` of a piece tells how many bytes its tile i stands behind where
/// it would without, up to kMaxShift: add_shift() is what it holds above the bits of the tiles.
__device__ constexpr std::uint32_t add_shift(int i, int bytes) {
  return static_cast<std::uint32_t>(bytes / kChunkBytes) << (kShiftsAt + kShiftBits * i);
}
__device__ constexpr int shift_of(std::uint32_t live, int i) {
  return static_cast<int>(live >> (kShiftsAt + kShiftBits * i) & ((1u << kShiftBits) - 1)) * kChunkBytes;
}

/// What a piece holds.
struct Piece {
  std::uint8_t* tiles;
  int token;           // first
  int keys;            // of the request
  int end;             // of the item
  std::uint32_t live;  // as Shared::live
  bool boundary;       // a row does not see all of the tokens
  bool special;        // logits are masked, capped or biased
};

/// A rotated row has fp32 values, as has one with the scale of K's channels, and bf16 cannot hold an f16 one.
template <DecodeConfig C>
__device__ inline bool needs_low_part(const AttentionParams& p) {
  return p.rotate_k || p.channels.scale != nullptr ||
         (C.k.dtype == DType::kBFloat16 && p.q_type != DType::kBFloat16);
}

/// A static scale of the item's KV head; 1 if there is none.
__device__ inline float static_scale(const ParamView& view, const DeviceItem& item) {
  return view.static_scale == nullptr ? 1.0f : view.static_scale[item.work.kv_head * view.static_stride];
}

}  // namespace halftone::cuda
