// Latent attention for few query rows of a record cache: persistent CTAs, one per worker of the schedule.
//
// The warps of a CTA have two roles:
//   load     four warps: the records of a block of 32 tokens, 16 bytes per lane, into a ring of stages
//   compute  two teams of eight warps. For S^T = K Q^T a warp of a team has 16 tokens and 128 dims, which
//            share a scale; the sums over dims meet in shared memory. For the softmax it has an eighth of the
//            rows, a lane one token; for O^T += V^T P^T 64 dims and all rows of the team.
// A team meets twice per block: when the partial sums are there, and when P is. The teams are independent up
// to the end of an item: they take turns at the blocks, so that one multiplies while the other one waits, and
// add up their states; or, with more rows than the registers of a team hold, each has half of the rows and
// all blocks. Logits are in base 2 throughout; docs/kernels/latent.md derives the bounds.
#pragma once

#include "cuda/attention/logits.h"
#include "cuda/attention/params.h"
#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/few/config.h"

namespace halftone::cuda {

template <LatentFewConfig C>
struct LatentFewTraits {
  static constexpr int kDim = 512, kRope = 64, kQueryDim = kDim + kRope;
  static constexpr bool kScaled = C.codes == LatentCodes::kFp8;
  static constexpr int kGroups = 4, kGroupDims = kDim / kGroups;  // of dims; they share a scale
  static constexpr int kScales = kScaled ? kGroups : 1;           // by which P is multiplied
  static constexpr int kRowBytes = kScaled ? kDim : 2 * kDim, kRowChunks = kRowBytes / 16;  // of codes
  static constexpr int kScaleBytes = kScaled ? 4 * kGroups : 0;
  static constexpr int kTokens = 32;  // of a block: one for each lane
  static constexpr int kStages = C.stages, kStep = C.step, kStepTokens = kStep * kTokens;
  static constexpr int kTeams = 2, kTeamWarps = 8, kWarps = kTeams * kTeamWarps;
  static constexpr int kLoadWarps = 4;                                // a warpgroup, for setmaxnreg
  static constexpr int kLoadRegisters = 32, kComputeRegisters = 112;  // per thread; 96 at the start
  static constexpr int kComputeThreads = 32 * kWarps, kTeamThreads = 32 * kTeamWarps;
  static constexpr int kThreads = kComputeThreads + 32 * kLoadWarps;
  static constexpr int kRows = C.rows;
  static constexpr int kTeamRows = C.split_rows ? kRows / kTeams : kRows;
  static constexpr int kRowTiles = kTeamRows / 8;           // N of a product
  static constexpr int kWarpRows = kTeamRows / kTeamWarps;  // of the softmax
  static constexpr int kRecordBytes = kRowBytes + kScaleBytes + 2 * kRope;
  static constexpr unsigned first_row(unsigned team) { return C.split_rows ? team * kTeamRows : 0; }
  // A stage is always filled by the same warp and, within an item, read by the same team: who waits for a
  // phase of its barriers has seen the one before.
  static_assert(kStages % kLoadWarps == 0 && kStages % (kTeams * kStep) == 0);
  static_assert(kRowTiles == 1 || kRowTiles == 2);

  static constexpr int kMaxShared = 227 * 1024;
  // 8 elements more per row spread 8 rows over the banks.
  static constexpr int kQueryPitch = kDim + 8, kRotaryPitch = kRope + 16;
  static constexpr int kSumPitch = kTokens + 4;  // likewise 4 pairs of rows

  /// Of a step, between the warps of a team.
  struct Exchange {
    float2 sums[kStep][kGroups][kTeamRows / 2]
               [kSumPitch];  // S by group of dims: rows 2i and 2i + 1 of a token
    uint2 prob[kStep][kScales][kTokens / 16][kRowTiles][32];  // P times V's scale: B fragments
  };
  /// Half of the accumulators of a team, for the other one.
  struct Handover {
    float4 out[kWarps][2 * kRowTiles][32];
  };

  struct Shared {
    alignas(128) std::uint8_t codes[kStages][kTokens * kRowBytes];  // chunks of 16 bytes: code_place()
    alignas(128) std::uint8_t rope[kStages][kTokens * 2 * kRope];   // rope_place()
    float4 scales[kStages][kScaled ? kTokens : 1];
    union {
      alignas(16)
          std::uint16_t queries[kRows][kQueryPitch];  // f16 (K's type), in units of a power of two of the row
      Exchange exchange[kTeams];
      Handover handover;
    };
    // bf16, in the same units; and what bf16 leaves of f16 rows.
    alignas(16) std::uint16_t rotary[2][kRows][kRotaryPitch];
    alignas(
        16) float unit[kTeams][kTeamRows][kGroups];  // 2^k: P is stored in units of it, for V's group of dims
    float raised[kTeams][kScales][kTeamRows];        // what O is multiplied with before the step
    float2 state[kTeams][kTeamRows];                 // of an item: LSE (base 2), 1 / sum
    float factor[kRows];                             // turns a raw product into a base-2 logit
    RowPlace places[kRows];
    Softcap softcap;
    KeyRange unmasked;  // places whose keys every row sees
    std::uint64_t full[kStages], empty[kStages];
    std::uint32_t live[kStages];  // bit t: token t of the block counts
    std::uint32_t slices;         // of a cut unit that this CTA merges: parts that left theirs, and bit 31
    std::uint32_t blocks_before;  // of the items before the current one
    volatile int reading[kLoadWarps];  // the item that a load warp is at
    ItemQueue queue;
  };
};

/// What a team takes at a time: blocks in the ring.
template <LatentFewConfig C>
struct Step {
  int stage[C.step];
  int token;  // the first one's first
  int end;    // of the item; a step's last block may be beyond: then it stands in for an earlier one, masked
};

/// A thread of the compute warps. Made anew where it is asked for: what depends on it then takes no registers
/// elsewhere.
struct ComputeThread {
  unsigned team, warp, lane;  // warp of the team
  __device__ ComputeThread() {
    const auto thread = static_cast<unsigned>(thread_index());
    team = thread / 256, warp = thread / 32 % 8, lane = thread % 32;
  }
};

/// Byte of chunk `chunk` (16 bytes) of a token in Shared::codes: neither 4 adjacent chunks of 2 tokens nor
/// one chunk of 8 tokens meet in a bank.
__device__ inline unsigned code_place(unsigned token, unsigned chunk, unsigned row_bytes) {
  return token * row_bytes + ((chunk ^ ((token & 1) << 2 | (token >> 1 & 3))) << 4);
}
/// Likewise in Shared::rope, for 2 adjacent chunks of 4 tokens.
__device__ inline unsigned rope_place(unsigned token, unsigned chunk) {
  return token * 128 + ((chunk ^ (token & 3) << 1) << 4);
}

/// Blocks of an item.
__device__ inline int blocks_of(const planning::WorkItem& work) {
  return (work.kv_end - work.kv_begin + 31) / 32;
}

}  // namespace halftone::cuda
