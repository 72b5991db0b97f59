// What follows from a row of the table: threads, registers, shared memory, and where a dim lies in it.
#pragma once

#include "cuda/attention/item_queue.h"
#include "cuda/attention/params.h"
#include "cuda/latent/wide/config.h"

namespace halftone::cuda::wide {

// A token: its latent, which is V and the first dims of K, and its rope part, the rest of K.
inline constexpr int kLatentDims = 512, kRopeDims = 64;
inline constexpr int kTokenBytes = 656, kScaleOffset = 512, kRopeOffset = 528;

inline constexpr int kRows = 64;         // packed rows of a thread block: M of the products
inline constexpr int kBlockTokens = 64;  // tokens of a step
inline constexpr int kStages = 2;
inline constexpr int kSlices = kBlockTokens / 16;  // of 16 tokens: a stage of V is freed slice by slice

// Matrices lie in shared memory as columns of 64 16-bit elements: rows of 128 bytes, swizzled over 8 rows.
inline constexpr int kColumns = kLatentDims / 64;
inline constexpr int kColumnBytes = 64 * 128;
// Columns of Q in shared memory; the last one and the rope part are A fragments in registers.
inline constexpr int kQueryColumns = kColumns - 1;

// A lane dequantises 16 adjacent dims. Its two halves, 16 bytes each, go to different columns, so that the
// lanes of a warp write without bank conflicts: the 8 dims from 8 i on are chunk (i / 2) % 8 of column
// 2 (i / 16) + i % 2. Q follows this order, O undoes it.
__device__ constexpr int column_of(int eight) { return eight / 16 * 2 + eight % 2; }
__device__ constexpr int chunk_of(int eight) { return eight / 2 % 8; }
/// First of the 8 dims that a chunk of a column holds.
__device__ constexpr int dim_of(int column, int chunk) {
  return column / 2 * 128 + chunk * 16 + column % 2 * 8;
}
/// Byte of a chunk of row `row` in a column.
__device__ constexpr int place_in_column(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// Roles: a warpgroup that dequantises tokens, one for logits and softmax, two for half of O each.
inline constexpr int kThreads = 512;
inline constexpr int kLoadRegisters = 80, kScoreRegisters = 112, kOutputRegisters = 160;
static_assert(kLoadRegisters + kScoreRegisters + 2 * kOutputRegisters <= 512);
inline constexpr int kScoreTeam = 0;  // their barriers among 128 threads
inline constexpr int kOutputBarrier = kTeam + 1, kOutputThreads = 256;

// A load warp's ring of raw codes, in units: of a pair 128 dims of four tokens, else a token.
inline constexpr int kRingUnits = 8, kUnitBytes = 512;

/// Within a step: token `i` of the half that block `rank` of a pair has; and of the 16 that load warp `warp`
/// has elsewhere, four of each slice.
__device__ constexpr int pair_place(int rank, int i) { return rank * (kBlockTokens / 2) + i; }
__device__ constexpr int single_place(int warp, int i) { return i / 4 * 16 + warp * 4 + i % 4; }

/// What a step's stage says of its tokens.
struct StepNotes {
  // Bits of tokens that are there. Of a pair a word of each half; else 16 bits of each load warp.
  alignas(16) std::uint32_t live[2];
  // Whether codes were scaled otherwise than by scales: likewise words, or 16 bits, that are not 0.
  std::uint32_t apart[2];
  std::int8_t exponent[kBlockTokens];  // base 2, what a token's values are then multiplied by
};

/// What a row's sums are relative to.
struct RowState {
  float max;  // of the sum of probabilities, base 2; kMinus: no key
  float sum;
  float reference;  // of O
};

/// How places of a list, or of a request, become slots. Kept beside what is read often: reading parameters
/// takes longer.
struct WalkLimits {
  int entry_log2;     // places of an entry: of a list 1, of the block table a page
  int entries;        // of the table; any number of a list
  std::uint32_t ids;  // what an entry is below: slots, or pages
  int place_mask;     // what a place adds to the slot of its entry

  __device__ static WalkLimits of(const AttentionParams& p) {
    const CacheView& c = p.cache;
    if (p.listed.list.indices != nullptr) {
      const std::int64_t slots = std::int64_t{c.num_pages} << c.page_log2;
      return {0, INT32_MAX, static_cast<std::uint32_t>(slots < INT32_MAX ? slots : INT32_MAX), 0};
    }
    return {c.page_log2, c.table_width, static_cast<std::uint32_t>(c.num_pages), (1 << c.page_log2) - 1};
  }
};

/// Where the walk of a load warp is, whose registers are dear: written by all lanes alike, each of which
/// reads its own.
struct WalkItem {
  const std::int32_t* entries;  // of the item: its list, or its row of the block table
  int index;
};

struct Shared {
  alignas(1024) std::uint8_t q[kQueryColumns][kColumnBytes];
  alignas(1024) std::uint8_t kv[kStages][kColumns][kColumnBytes];
  alignas(1024) std::uint8_t rope[3][kColumnBytes];  // of a step's tokens; later its P
  alignas(16) std::uint8_t raw[4][kRingUnits][kUnitBytes];
  ItemQueue queue;
  alignas(8) std::uint64_t kv_full[kStages], kv_empty[kStages][kSlices], rope_empty[3];
  std::uint64_t p_full[2][2], state_full, state_empty;  // P: of half a step's tokens
  StepNotes notes[kStages];
  alignas(16) WalkLimits limits;
  WalkItem walks[4];
  // What O is scaled by before P of a step is added, and by warp of 16 rows whether it is.
  float rescale[2][kRows];
  std::uint8_t raised[2][4];
  RowState state[kRows];
  int item_index[8];     // of a warp that adds up O, whose registers are dear
  std::uint32_t merges;  // of a cut unit, bits of the parts whose rows this block merges
};
inline constexpr int kMaxShared = 227 * 1024;
static_assert(sizeof(Shared) <= kMaxShared);

/// Lane t of each four lanes has row t of a 4 x 4 matrix; it gets column t.
__device__ inline void transpose_quad(std::uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const std::uint32_t got = __shfl_xor_sync(~0u, odd ? w[e] : w[e + 1], 1);
    (odd ? w[e] : w[e + 1]) = got;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const std::uint32_t got = __shfl_xor_sync(~0u, upper ? w[e] : w[e + 2], 2);
    (upper ? w[e] : w[e + 2]) = got;
  }
}

/// Of exponents within those of normal numbers.
__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<std::uint32_t>(127 + exponent) << 23);
}

/// Where the keys of an item end; it has none if it has no rows.
__device__ inline int end_of(const planning::WorkItem& work) {
  return work.row_end > work.row_begin ? work.kv_end : work.kv_begin;
}
/// Steps of an item. One without keys takes one, too, in which no token is there.
__device__ inline int steps_of(const planning::WorkItem& work) {
  const int steps = (end_of(work) - work.kv_begin + kBlockTokens - 1) / kBlockTokens;
  return steps < 1 ? 1 : steps;
}

/// Rows of an item that are this block's.
__device__ inline int own_rows(const planning::WorkItem& work, int rank) {
  const int rows = work.row_end - work.row_begin - kRows * rank;
  return rows < 0 ? 0 : rows > kRows ? kRows : rows;
}

/// A place in the sequence of steps: which stage and which of three rope buffers, and of barriers which
/// phase.
struct StepPlace {
  std::uint32_t step = 0;

  __device__ int stage() const { return step % kStages; }
  __device__ std::uint32_t parity() const { return step / kStages % 2; }
  __device__ int third() const { return step % 3; }
  __device__ std::uint32_t third_parity() const { return step / 3 % 2; }
};

}  // namespace halftone::cuda::wide
