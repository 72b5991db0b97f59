// The warps that bring tokens of pages, by tensor copies: no warp spends instructions on a token.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/device/cluster.h"
#include "cuda/device/tma.h"
#include "cuda/latent/bf16/traits.h"

namespace halftone::cuda::bf16 {

/// *from, or `otherwise` without a load. Unlike a branch around it, it is waited for only where it is used.
__device__ inline std::int32_t load_if(bool wanted, const std::int32_t* from, std::int32_t otherwise) {
  std::int32_t x;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.b32 %0, %3;\n @p ld.global.b32 %0, [%1];\n}"
               : "=&r"(x)
               : "l"(from), "r"(static_cast<std::uint32_t>(wanted)), "r"(otherwise)
               : "memory");
  return x;
}

/// Whether there is an item `index`. Of the warps that bring tokens, who wait for one, the first extends the
/// queue.
template <LatentBf16Config C>
__device__ inline bool has_item(const LatentBf16Params& params, Shared& s, int index) {
  const AttentionParams& p = params.attention;
  if (thread_index() == kComputeThreads) {
    const int last = index + (params.step.appends ? kAppendedAhead : 0);  // who appends looks ahead
    s.queue.extend(last, p.schedule, bounds_of(p), static_cast<int>(blockIdx.x) / C.blocks);
  }
  __syncwarp();
  return s.queue.has(index);
}

/// A warp that brings one half of the steps of all items, the one of the first columns with the rope part. Of
/// a pair each block brings 32 tokens of a step, to both. What a copy needs is worked out before the wait for
/// its place: between the end of a step and the next one there is nothing else to do.
template <LatentBf16Config C>
struct TokenLoader {
  static constexpr bool kPair = C.blocks == 2;
  static constexpr int kOwnTiles = kTiles / C.blocks;
  const LatentBf16Params& params;
  Shared& s;
  int half, rank, lane;
  const AttentionParams& p = params.attention;

  __device__ bool first() const { return half == 1; }
  __device__ int tile() const { return lane % kTiles; }
  /// First token of the box that has the lane's tile of 16 tokens.
  __device__ int box(int token) const { return token + (tile() * kTileTokens & -params.box_tokens); }
  /// Whether the item has tokens of that box.
  __device__ bool wanted(const planning::WorkItem& work, int token) const {
    const int end = wide::end_of(work), first = box(token);
    return first < end && first + params.box_tokens > work.kv_begin && work.kv_begin < end;
  }
  /// Its page, which is none where the item has none of its tokens.
  __device__ std::int32_t look_up(const planning::WorkItem& work, const std::int32_t* table,
                                  int token) const {
    const int entry = box(token) >> p.cache.page_log2;
    return load_if(wanted(work, token) && entry < p.cache.table_width, table + entry, -1);
  }
  /// Brings the lane's box to L2. A block alone is better off without: then it is memory that limits.
  __device__ void prefetch(std::int32_t page, int token) const {
    if (static_cast<std::uint32_t>(page) >= static_cast<std::uint32_t>(p.cache.num_pages)) return;
    const int place = (token + tile() * kTileTokens) & ((1 << p.cache.page_log2) - 1);
    prefetch_bytes_to_l2(p.cache.pages + page * p.cache.page_stride + place * kTokenBytes,
                         params.box_tokens * kTokenBytes);
  }
  __device__ void copy(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int column, int group,
                       std::int32_t page) const {
    if constexpr (kPair) {
      tensor_load_to(3, to, map, barrier, 0, 0, column, group, page);
    } else {
      tensor_load(to, map, barrier, 0, 0, column, group, page);
    }
  }

  /// The steps of item `index`. Tokens of pages that are not there are read outside the tensor, which gives
  /// zeros.
  __device__ void take(int index, StepPlace& at) const {
    const DeviceItem& item = s.queue.items[index % unsigned{Queue::kCapacity}];
    const planning::WorkItem& work = item.work;
    const std::int32_t* const table = table_row(p.cache, work.request);
    // Whether a box that the block brings begins with the lane's tile.
    const bool brings = lane < kTiles && lane / kOwnTiles == rank && box(0) == lane * kTileTokens;
    const int page_mask = ((1 << p.cache.page_log2) - 1) / kGroupTokens;
    int token = first_token<C>(work);
    std::int32_t page = look_up(work, table, token), next = look_up(work, table, token + kBlockTokens);
#pragma unroll 1
    do {
      const std::int32_t behind = look_up(work, table, token + 2 * kBlockTokens);
      const bool has = lane < kTiles && wanted(work, token) && has_page(p, page);
      const std::uint32_t live = __ballot_sync(~0u, has);
      const std::int32_t from = has ? page : -1;
      const int stage = at.stage(), group = (token + tile() * kTileTokens) / kGroupTokens & page_mask;
      const std::uint32_t full = shared_address(&s.kv_full[stage][first() ? 0 : 1]);
      const std::uint32_t to =
          shared_address(s.kv[stage].half[half]) + tile() * (kTileTokens / kGroupTokens * kGroupBytes);
      const std::uint32_t rope = shared_address(s.kv[stage].rope) + tile() * (kTileTokens * 128);
      // The rope part's place is free when both halves are.
      if (!first()) barrier_wait(shared_address(&s.kv_empty[stage][1]), at.parity() ^ 1);
      barrier_wait(shared_address(&s.kv_empty[stage][half]), at.parity() ^ 1);
      if (lane == 0) {
        if (first()) *reinterpret_cast<std::uint32_t*>(s.live[stage]) = live;
        barrier_expect_bytes(full, kGroups * kGroupBytes + (first() ? 0 : kColumnBytes));
      }
      __syncwarp();
      wait_for_tokens(params.step, item, index, token + kBlockTokens, s.appended);
      if (brings) {
        copy(to, params.latent, full, half * kHalfColumns, group, from);
        if (!first()) copy(rope, params.rope, full, kRopeColumn, group, from);
      }
      if (kPair && first() && brings) prefetch(next, token + kBlockTokens);
      page = next, next = behind;
      ++at.step, token += kBlockTokens;
    } while (token < wide::end_of(work));
  }

  static __device__ void run(const LatentBf16Params& params, Shared& s) {
    StepPlace at;
#pragma unroll 1
    for (int index = 0; has_item<C>(params, s, index); ++index) {
      const int rank = kPair ? cluster_rank() : 0, lane = thread_index() % 32;
      const int half = thread_index() / 32 == kComputeThreads / 32;
      TokenLoader{params, s, half, rank, lane}.take(index, at);
    }
  }
};

}  // namespace halftone::cuda::bf16
