// What follows from a row of the table: threads, registers, shared memory, and where a dim lies in it.
#pragma once

#include "cuda/append/latent_step.h"
#include "cuda/attention/item_queue.h"
#include "cuda/attention/logits.h"
#include "cuda/attention/rows.h"
#include "cuda/device/ring.h"
#include "cuda/latent/wide/config.h"
#include "cuda/latent/wide/params.h"

namespace halftone::cuda::wide {

// A token: its latent, which is V and the first dims of K, and its rope part, the rest of K. Or all of K is
// V (kRotaryV): then its 512 dims are treated alike.
template <LatentWideConfig C>
using Record = LatentRecord<C.codes>;
template <LatentWideConfig C>
inline constexpr bool kRotaryV = Record<C>::kApart;
inline constexpr int kLatentDims = 512, kRopeDims = 64;  // of V; the rope part
inline constexpr DType kProducts = DType::kFloat16;      // what products of latent dims are made in

inline constexpr int kRows = 64;         // packed rows of a thread block: M of the products
inline constexpr int kBlockTokens = 64;  // tokens of a step
inline constexpr int kStages = 2;
inline constexpr int kSlices = kBlockTokens / 16;  // of 16 tokens: a stage of V is freed slice by slice

// Matrices lie in shared memory as columns of 64 16-bit elements: rows of 128 bytes, swizzled over 8 rows. A
// step's tokens lie in groups of 8 with all their columns, so that a block passes on as many as it likes as
// one piece.
inline constexpr int kColumns = kLatentDims / 64;
inline constexpr int kColumnBytes = 64 * 128;
inline constexpr int kGroupTokens = 8, kGroups = kBlockTokens / kGroupTokens;
inline constexpr int kGroupColumnBytes = kGroupTokens * 128, kGroupBytes = kColumns * kGroupColumnBytes;
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
// With kRotaryV the scores have no fragments of rope parts, and loads more to do; of integers a block alone
// has more scales in registers.
template <LatentWideConfig C>
inline constexpr int kLoadRegisters = kRotaryV<C> || (C.blocks == 1 && Record<C>::kInteger) ? 80 : 72;
template <LatentWideConfig C>
inline constexpr int kScoreRegisters = 512 - 2 * 160 - kLoadRegisters<C>;
inline constexpr int kOutputRegisters = 160;
inline constexpr int kScoreTeam = 0;  // their barriers among 128 threads
inline constexpr int kOutputBarrier = kTeam + 1;
// The first one's warps, in a pair: one copies, three dequantise.
inline constexpr int kCopiers = 1, kPassers = 4 - kCopiers;

// Tokens come in rounds of 32, half of a step: two for a block alone, one for each block of a pair. A round's
// raw codes fill the ring; chunk by chunk they are copied, converted and given back.
inline constexpr int kRoundTokens = 32, kChunkTokens = kGroupTokens, kChunks = kRoundTokens / kChunkTokens;
inline constexpr int kSliceChunks = 16 / kChunkTokens, kSliceBytes = kSliceChunks * kGroupBytes;
static_assert(2 * kRoundTokens == kBlockTokens);

inline constexpr int kPassChunks = 2;  // that a block passes on at a time

/// Within a step, token `i` of the 16 of a load warp of a block that dequantises all tokens: four of each
/// slice.
__device__ constexpr int single_place(unsigned warp, unsigned i) {
  return static_cast<int>(i / 4 * 16 + warp * 4 + i % 4);
}
/// Whether blocks of a pair pass on rope parts, whose place P takes.
template <LatentWideConfig C>
inline constexpr bool kPassesRopes = C.blocks == 2 && !kRotaryV<C>;
/// A block alone: load_single.h instead of copy.h and pass.h.
template <LatentWideConfig C>
inline constexpr bool kSingle = C.blocks == 1;

/// What is said of half of a step's tokens.
struct alignas(16) HalfNotes {
  std::uint32_t live;                  // bits of tokens that are there
  std::uint32_t apart;                 // whether codes were scaled otherwise than by scales
  std::int8_t exponent[kRoundTokens];  // base 2, what a token's values are then multiplied by
};
static_assert(sizeof(HalfNotes) % 16 == 0);  // is copied to the other block

/// What a row's sums are relative to.
struct RowState {
  float max;  // of the sum of probabilities, base 2; kMinus: no key
  float sum;
  float reference;  // of O
};

using Queue = ItemQueueOf<12>;  // as many as there is room for

struct Shared {
  alignas(1024) std::uint8_t q[kQueryColumns][kColumnBytes];
  alignas(1024) std::uint8_t kv[kStages][kGroups][kGroupBytes];
  alignas(1024) std::uint8_t rope[3][kColumnBytes];         // of a step's tokens; later its P
  alignas(16) std::uint8_t raw[kRoundTokens][kLatentDims];  // of 4 bits half of it
  alignas(16) std::uint16_t scales[kRoundTokens][8];        // scales_of()
  Queue queue;
  AppendedItems appended;
  alignas(8) std::uint64_t kv_full[kStages], kv_empty[kStages][kSlices], rope_empty[3];
  std::uint64_t raw_full[kChunks], raw_empty[kChunks];
  std::uint64_t p_full[2][2], state_full, state_empty;  // P: of half a step's tokens
  std::uint64_t q_full;                                 // boxes of an item's queries
  // Half of the block's tokens are converted, by all warps. One for each stage: a warp may be a step behind.
  std::uint64_t converted[kStages][kChunks / kPassChunks];
  // Of a pair: the other block has this one's half of a step's rope parts. In phases of kv_full.
  std::uint64_t rope_copied[kStages];
  HalfNotes notes[3][2];  // beside a step's rope parts: of its halves
  // What O is scaled by before P of a step is added, a biased_exponent(), and by warp of 16
  // rows whether it is.
  std::uint8_t rescale[2][kRows];
  std::uint8_t raised[2][4];
  RowState state[kRows];
  int item_index[8];     // of a warp that adds up O, whose registers are dear
  std::uint32_t merges;  // of a cut unit, bits of the parts whose rows this block merges
};
inline constexpr int kMaxShared = 227 * 1024;
static_assert(sizeof(Shared) <= kMaxShared);

/// f16 of a round's tokens, kTokenScales of each: of its groups, an even number, then their mins. With these
/// they are too many for a place of their own.
template <LatentWideConfig C>
inline constexpr int kTokenScales = (Record<C>::kGroups + 1) / 2 * 2 * (Record<C>::kBits == 4 ? 2 : 1);
template <LatentWideConfig C>
__device__ inline std::uint16_t* scales_of(Shared& s) {
  if constexpr (Record<C>::kBits != 4) return s.scales[0];
  return reinterpret_cast<std::uint16_t*>(s.raw[kRoundTokens / 2]);
}

/// A power of two up to its last bits, or 0, as a byte, and back.
__device__ inline std::uint8_t biased_exponent(float x) {
  return static_cast<std::uint8_t>((__float_as_uint(x) + (1u << 22)) >> 23);
}
__device__ inline float power_of_biased(std::uint8_t exponent) {
  return __uint_as_float(std::uint32_t{exponent} << 23);
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

/// The tokens before `end` that all of these rows see.
__device__ inline KeyRange seen_by_own(const AttentionParams& p, const DeviceItem& item, int rank, int end) {
  const int rows = own_rows(item.work, rank);
  if (rows == 0) return {0, end};
  const int first = place_of(p, item, kRows * rank).position;
  const int last = place_of(p, item, kRows * rank + rows - 1).position;
  return seen_by_all(p, first, last, end);
}

/// Tokens from `token` on that these rows do not see have no logit. Rows that the item lacks take its last
/// one's place.
template <int kCount>
__device__ inline void mask_unseen_by_own(const AttentionParams& p, const DeviceItem& item, int rank,
                                          int token, int warp, int lane, float (&x)[kCount]) {
  const int rows = own_rows(item.work, rank);
  const auto position = [&](int r) {
    return place_of(p, item, kRows * rank + min(warp * 16 + lane / 4 + 8 * r, max(rows, 1) - 1)).position;
  };
  mask_unseen<RowsAsM>(p, position, token + lane % 4 * 2, item.work.kv_end, x);
}

/// A place in the sequence of steps: which stage and which of three rope buffers, and of barriers which
/// phase.
struct StepPlace {
  std::uint32_t step = 0;

  __device__ int stage() const { return RingPlace<kStages>::of(step).stage; }
  __device__ std::uint32_t parity() const { return RingPlace<kStages>::of(step).parity; }
  __device__ int third() const { return RingPlace<3>::of(step).stage; }
  __device__ std::uint32_t third_parity() const { return RingPlace<3>::of(step).parity; }
};

}  // namespace halftone::cuda::wide
