// Latent attention for few query rows of a record cache: persistent CTAs, one per worker of the schedule.
//
// The warps of a CTA have three roles, which run ahead of each other:
//   load    four warps: the records of a block of 32 tokens, whole or 16 bytes per lane, into a ring of
//           stages
//   scores  eight warps, each alone with tiles of 16 tokens, or four with 32: S^T = K Q^T over all dims, the
//   softmax, and
//           P to a ring of slots
//   output  eight warps, each with 64 dims of all rows: O^T += V^T P^T, and the end of an item
// No warp of the scores waits for another one: each has a running maximum of its own, and P comes with the
// power of two that it is stored in units of. The end of an item adds up their sums. Logits are in base 2
// throughout; docs/kernels/latent.md derives the bounds.
#pragma once

#include "cuda/append/latent_step.h"
#include "cuda/attention/logits.h"
#include "cuda/attention/params.h"
#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/few/config.h"
#include "cuda/latent/few/params.h"

namespace halftone::cuda {

template <LatentFewConfig C>
struct LatentFewTraits {
  using Record = LatentRecord<C.codes>;
  static constexpr LatentCodes kCodes = C.codes;
  static constexpr bool kApart = Record::kApart, kInteger = Record::kInteger;
  static constexpr bool kBf16 = Record::kBf16, kScaled = !kBf16;
  static constexpr int kDim = Record::kDim, kRope = Record::kRope, kLatent = Record::kLatent;
  static constexpr int kQueryDim = Record::kKeyDim;
  static constexpr int kGroupDims = Record::kGroupDims, kGroups = Record::kGroups, kBits = Record::kBits;
  static constexpr int kRowBytes = Record::kRowBytes, kRowChunks = kRowBytes / 16;  // of codes
  static constexpr int kScaleBytes = Record::kScaleBytes;
  static constexpr int kRopeAt = Record::kRopeAt, kRecordBytes = Record::kRecordBytes;
  /// Whether records lie in shared memory as they do in the cache, all of it in Shared::codes, so that bulk
  /// copies bring them: a chunk of 16 bytes of 8 tokens meets no bank twice then. With 8 rows listed records,
  /// which need a copy each, come sooner by lanes.
  static constexpr bool kWhole = kRecordBytes % 128 == 16 && C.rows > 8;
  // Bytes from token to token in Shared.
  static constexpr int kRowPitch = kWhole ? kRecordBytes : kApart ? kDim : kRowBytes;
  static constexpr int kRopePitch = kWhole ? kRecordBytes : 2 * kRope;
  static constexpr int kScalePitch = kWhole ? kRecordBytes : kScaleBytes;
  static constexpr int kTokens = 32;  // of a block: one for each lane
  static constexpr int kStages = C.stages, kSlots = 4;
  static constexpr int kTiles = C.tiles;          // of a warp of the scores: 16 tokens each
  static constexpr int kBlockWarps = 2 / kTiles;  // of the scores, that share a block
  static constexpr int kScoreWarps = 8 / kTiles, kOutputWarps = 8, kLoadWarps = 4;
  static constexpr int kTurn = kScoreWarps / kBlockWarps;  // blocks until a warp has its next one
  static constexpr int kFirstOutput = 32 * kScoreWarps;    // thread
  static constexpr int kFirstLoad = kFirstOutput + 32 * kOutputWarps;
  static constexpr int kThreads = kFirstLoad + 32 * kLoadWarps;
  static constexpr int kRows = C.rows, kRowTiles = kRows / 8;  // N of a product
  // Per thread. The block's warps share what they start with: 65,536 in units of 8 per thread.
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kLoadRegisters = 32;
  // What an output warp has more, for whole rows of O beside their addresses and for new tokens, a score warp
  // lacks.
  static constexpr bool kOutputNeeds = kRows == 32 ? C.appends : kRows == 16 || kInteger || kApart;
  static constexpr int kOutputExtra = kTiles == 1 && kOutputNeeds ? 8 : 0;
  static constexpr int kOutputRegisters =
      kTiles == 2 ? kInteger ? 136 : 128 : (kRows == 32 ? 112 : 80) + kOutputExtra;
  static constexpr int kScoreRegisters =
      kTiles == 2 ? kInteger ? 208 : 224 : (kRows == 32 ? 112 : 144) - kOutputExtra;
  static_assert(kScoreWarps * kScoreRegisters + kOutputWarps * kOutputRegisters +
                    kLoadWarps * kLoadRegisters <=
                kThreads / 32 * kFirstRegisters);
  static_assert(kTiles == 1 || kTiles == 2);
  static constexpr bool kLooksUpItem = kScoreRegisters < 112;  // by the warps of the scores
  // Who waits for a phase of a barrier knows that the one before is over: a load warp has a
  // part of every block, in order; a score warp's last tile waited for a slot.
  static_assert(2 * kStages >= kTurn + kSlots);

  static constexpr int kMaxShared = 227 * 1024;
  // Elements more per row spread what a quarter of a warp reads at once over the banks.
  static constexpr int kQueryPitch = kDim + (kBf16 ? 32 : 8), kRotaryPitch = kRope + 32;

  struct Shared {
    alignas(128) std::uint8_t codes[kStages][kTokens * kRowPitch];  // chunks of 16 bytes: code_place()
    alignas(128) std::uint8_t rope[kStages][kWhole ? 16 : kTokens * 2 * kRope];  // rope_place()
    alignas(16) std::uint8_t scales[kStages][kWhole || kScaleBytes == 0 ? 16 : kTokens * kScaleBytes];
    // P, [16 tokens][8 rows][8 tokens]: 8 rows of a token are 16 bytes.
    alignas(128) uint4 prob[kSlots][2][kRowTiles][2][8];
    int2 units[kSlots][kRows];  // log2 of what the halves of a block are stored in units of
    alignas(16) std::uint16_t queries[kRows][kQueryPitch];     // f16 (K's type), in units of a power of two
    alignas(16) std::uint16_t rotary[2][kRows][kRotaryPitch];  // bf16, likewise; what bf16 leaves of f16 rows
    float query_sums[kInteger ? kGroups : 1][kRows];           // of the dims of a group, as they are stored
    // Of an item and the next one:
    float2 state[2][kScoreWarps][kRows];  // maximum, sum
    float factor[2][kRows];               // turns a raw product into a base-2 logit
    RowPlace places[2][kRows];
    KeyRange unmasked[2];  // keys that all rows see
    Softcap softcap;
    std::uint64_t full[kStages], empty[kStages];        // stages: load -> scores, output -> load and scores
    std::uint64_t weighed[kSlots];                      // slots: scores -> output
    std::uint64_t stated[2], taken[2];                  // items: scores -> output, output -> scores
    alignas(4) std::uint8_t live[kStages][kLoadWarps];  // bit t of byte w: token 8 w + t of the block counts
    std::uint32_t slices;              // of a cut unit that this CTA merges: bits of the parts whose they are
    volatile int reading[kLoadWarps];  // the item that a load warp is at
    volatile int score_item[kScoreWarps];  // with kLooksUpItem: that a warp of the scores is at
    AppendedItems appended;
    ItemQueue queue;
  };
  static __device__ const std::uint8_t* ropes(const Shared& s, int stage) {
    return kWhole ? s.codes[stage] + kRopeAt : s.rope[stage];
  }
  static __device__ const std::uint8_t* scales(const Shared& s, int stage) {
    return kWhole ? s.codes[stage] + Record::kScalesAt : s.scales[stage];
  }
};

/// Byte of chunk `chunk` (16 bytes) of a token, `pitch` bytes from token to token: neither 4 adjacent chunks
/// of 2 tokens nor one chunk of 8 tokens meet in a bank. `kPairs`: nor do 2 adjacent chunks of 4 tokens
/// instead.
template <bool kPairs = false>
__device__ inline unsigned swizzled_place(unsigned token, unsigned chunk, unsigned pitch) {
  const unsigned flip = kPairs ? (token & 3) << 1 | (token >> 2 & 1) : (token & 1) << 2 | (token >> 1 & 3);
  return token * pitch + ((chunk ^ flip) << 4);
}
/// Of a token's codes. `kPairs`: two lanes share a chunk.
template <LatentFewConfig C, bool kPairs = C.codes == LatentCodes::kInt4>
__device__ inline unsigned code_place(unsigned token, unsigned chunk) {
  constexpr unsigned kPitch = LatentFewTraits<C>::kRowPitch;
  return LatentFewTraits<C>::kWhole ? token * kPitch + chunk * 16
                                    : swizzled_place<kPairs>(token, chunk, kPitch);
}
/// Of its rotary dims.
template <LatentFewConfig C>
__device__ inline unsigned rope_place(unsigned token, unsigned chunk) {
  constexpr unsigned kPitch = LatentFewTraits<C>::kRopePitch;
  return LatentFewTraits<C>::kWhole ? token * kPitch + chunk * 16 : swizzled_place(token, chunk, kPitch);
}
/// Of 8 tokens, the one that is row `row` of a product. Two adjacent rows read 4 adjacent chunks each at a
/// time: whole records of tokens 4 apart do not meet in a bank then.
template <LatentFewConfig C>
__device__ constexpr unsigned token_of_row(unsigned row) {
  return LatentFewTraits<C>::kWhole ? row >> 1 | (row & 1) << 2 : row;
}

/// Blocks of an item.
__device__ inline int blocks_of(const planning::WorkItem& work) {
  return (work.kv_end - work.kv_begin + 31) / 32;
}

/// Log2 of a unit that is none: nothing has been stored in it.
inline constexpr int kNoUnit = -(1 << 28);

}  // namespace halftone::cuda
