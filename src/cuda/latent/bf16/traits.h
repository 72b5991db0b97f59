// What follows from a row of the table: threads, registers, shared memory.
#pragma once

#include "cuda/device/ring.h"
#include "cuda/latent/bf16/config.h"
#include "cuda/latent/bf16/params.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::bf16 {

using wide::kBlockTokens;
using wide::kColumnBytes;
using wide::kGroupColumnBytes;
using wide::kGroups;
using wide::kGroupTokens;
using wide::kLatentDims;
using wide::kRopeDims;
using wide::kRows;
using wide::own_rows;
using wide::place_in_column;
using wide::Queue;

// Columns of 64 dims, of a step's tokens or of Q's rows: 64 rows of 128 bytes, swizzled over 8 rows. Those of
// V are two halves, of which each compute warpgroup takes one; the rope part comes last.
inline constexpr int kHalfColumns = kLatentBf16HalfColumns, kRopeColumn = 2 * kHalfColumns;
inline constexpr int kAllColumns = kRopeColumn + 1;
static_assert(kRopeColumn * 64 == kLatentDims && kRopeDims == 64 && kBlockTokens == kLatentBf16Tokens);
inline constexpr int kTokenBytes = 2 * (kLatentDims + kRopeDims);
inline constexpr int kStages = 2;  // as many as compute warpgroups: each has the steps of one
inline constexpr int kTileTokens = 16, kTiles = kBlockTokens / kTileTokens;

// Columns come and S takes them in this order: the second half of V, the first one, the rope part.
__device__ constexpr int column_at(int i) {
  return i < 2 * kHalfColumns ? (i + kHalfColumns) % 8 : kRopeColumn;
}

// Half of V of a step: groups of 8 tokens with all its columns, so that one tensor copy brings a box of
// tokens as it lies here.
inline constexpr int kGroupBytes = kHalfColumns * kGroupColumnBytes;
struct Stage {
  std::uint8_t half[2][kGroups][kGroupBytes];
  std::uint8_t rope[kColumnBytes];  // later P
};
static_assert(sizeof(Stage) == kAllColumns * kColumnBytes);
/// Byte of a column's first token.
__device__ constexpr int column_in_stage(int column) {
  return column == kRopeColumn
             ? kRopeColumn * kColumnBytes
             : column / kHalfColumns * (kGroups * kGroupBytes) + column % kHalfColumns * kGroupColumnBytes;
}
/// From 8 tokens of a column to the next 8.
__device__ constexpr int group_stride(int column) {
  return column == kRopeColumn ? kGroupColumnBytes : kGroupBytes;
}

// So many columns of Q, the last ones in that order, are A fragments in registers, which spares shared memory
// their reads.
inline constexpr int kFragmentColumns = 2;

// Two warpgroups that compute, then one that brings queries and tokens: of pages two warps do, of lists all.
inline constexpr int kThreads = 384, kComputeThreads = 256;
inline constexpr int kLoadRegisters = 40, kComputeRegisters = 232;
static_assert(kLoadRegisters + 2 * kComputeRegisters <= 3 * 168);
inline constexpr int kOutputBarrier = kTeam + 2;  // behind those of the warpgroups

/// What a warpgroup knows of a row: the sum of the probabilities of its own steps, relative to `offset`.
struct OwnSum {
  float offset, sum;
};

struct Shared {
  alignas(1024) std::uint8_t q[kAllColumns][kColumnBytes];
  alignas(1024) Stage kv[kStages];
  Queue queue;
  AppendedItems appended;
  alignas(8) std::uint64_t kv_full[kStages][2], kv_empty[kStages][2];  // halves as they come, halves of V
  std::uint64_t p_full[kStages], q_full, q_empty;
  // Of pages bit i of the first word: tokens from 16 i on are there. Of lists 16 tokens' bits each.
  alignas(8) std::uint16_t live[kStages][kTiles];
  float offset[kStages][kRows];    // what P of a stage is relative to
  OwnSum sums[2][kStages][kRows];  // by items' parity and warpgroups
  int item_index[8];               // of a compute warp, whose registers are dear
  std::uint32_t next_step[8];      // likewise, while it ends an item
  std::uint32_t merges;            // of a cut unit, bits of the parts whose rows this block merges
};
static_assert(sizeof(Shared) <= wide::kMaxShared);

/// Whether tokens that one block of a pair brings go to both.
template <LatentBf16Config C>
inline constexpr bool kSharesTokens = C.blocks == 2 && !C.listed;

/// Where an item's steps begin: of pages at a multiple of their tokens. Those before the item's are in no
/// row's window.
template <LatentBf16Config C>
__device__ inline int first_token(const planning::WorkItem& work) {
  return C.listed ? work.kv_begin : work.kv_begin & ~(kBlockTokens - 1);
}
/// Steps of an item. One without keys takes one, too, in which no token is there.
template <LatentBf16Config C>
__device__ inline int steps_of(const planning::WorkItem& work) {
  const int steps = (wide::end_of(work) - first_token<C>(work) + kBlockTokens - 1) / kBlockTokens;
  return steps < 1 ? 1 : steps;
}

/// A place in the sequence of steps, and in its item.
struct StepPlace {
  std::uint32_t step = 0;
  std::uint32_t first = 0;  // step of the item

  __device__ int stage() const { return RingPlace<kStages>::of(step).stage; }
  __device__ std::uint32_t parity() const { return RingPlace<kStages>::of(step).parity; }
  /// The one before, of the same item.
  __device__ StepPlace before() const { return {step - 1, first}; }
};

}  // namespace halftone::cuda::bf16
