// The warps that bring the tokens of lists, wherever they lie: by cp.async, 16 bytes a lane. Eight lanes have
// a token and read the same entry of the list, so that an address is worked out once for the nine columns of
// its token and no lane asks another one.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/bf16/load.h"
#include "cuda/latent/bf16/queries.h"

namespace halftone::cuda::bf16 {

/// One of four warps, each of which brings 16 tokens of a step, and a share of the queries.
template <LatentBf16Config C>
struct ListLoader {
  static constexpr int kWarps = 4, kOwn = kTileTokens / 4;  // tokens of a lane
  static_assert(kWarps == kTiles);
  const LatentBf16Params& params;
  Shared& s;
  int rank, warp, lane;
  std::uint32_t slots_end;  // what an entry is below
  const AttentionParams& p = params.attention;
  const std::int32_t* entries;  // of the item's list: of the lane's first token of the step
  int left;                     // places of the list from that one on

  /// Whether the lane has its token `i` of the step.
  __device__ bool has(int i) const { return 4 * i < left; }
  __device__ void load(std::int32_t (&ids)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) ids[i] = load_if(has(i), entries + 4 * i, -1);
  }
  /// Where the lane's tokens lie, and bits of those that are there.
  __device__ std::uint32_t resolve(const std::int32_t (&ids)[kOwn], const std::uint8_t* (&from)[kOwn]) const {
    const CacheView& c = p.cache;
    const std::int64_t padding = c.page_stride - (std::int64_t{kTokenBytes} << c.page_log2);
    const std::uint8_t* const bytes = c.pages + lane % 8 * 16;
    std::uint32_t live = 0, missing = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const auto id = static_cast<std::uint32_t>(ids[i]);
      const bool found = id < slots_end;
      live |= static_cast<std::uint32_t>(found) << i;
      from[i] = bytes + std::uint64_t{found ? id : 0} * kTokenBytes;
      if (!found && ids[i] >= 0) missing = 1;
      asm volatile("" : "+r"(live));  // not kept as predicates, of which there are few
    }
    if (padding != 0) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) from[i] += (live >> i & 1 ? ids[i] >> c.page_log2 : 0) * padding;
    }
    if (missing != 0) has_page(p, -1);  // for the status
    return live;
  }
  /// Bits of the warp's 16 tokens.
  static __device__ std::uint32_t all_live(std::uint32_t live) {
    if (__all_sync(~0u, live == (1u << kOwn) - 1)) return (1u << kTileTokens) - 1;
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      // Lanes 0, 8, 16 and 24 have a token each: their bits become the four upper ones of the product.
      const std::uint32_t four = __ballot_sync(~0u, live >> i & 1) & 0x01010101u;
      all |= (four * 0x01020408u >> 24 & 15) << 4 * i;
    }
    return all;
  }
  /// Of a pair half of the tokens by each block.
  __device__ void prefetch(const std::uint8_t* const (&from)[kOwn], std::uint32_t live) const {
    if (!params.ahead || lane % 8 != 0) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i % 2 == rank && (live >> i & 1)) prefetch_bytes_to_l2(from[i], kTokenBytes);
    }
  }
  /// A step's tokens to their places, as these are given back; those that are skipped become zeros.
  __device__ void copy(const StepPlace& at, const std::uint8_t* const (&from)[kOwn],
                       std::uint32_t live) const {
    const int stage = at.stage();
    const std::uint32_t own = place_in_column(lane / 8, lane % 8);
    const std::uint32_t all = all_live(live);
#pragma unroll
    for (int half = 1; half >= 0; --half) {
      const std::uint32_t full = shared_address(&s.kv_full[stage][1 - half]);
      const std::uint32_t to =
          shared_address(s.kv[stage].half[half][warp * (kTileTokens / kGroupTokens)]) + own;
      const std::uint32_t rope = shared_address(s.kv[stage].rope) + warp * (kTileTokens * 128) + own;
      barrier_wait(shared_address(&s.kv_empty[stage][half]), at.parity() ^ 1);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int bytes = live >> i & 1 ? 16 : 0;
        const std::uint32_t place = (to ^ i % 2 * 64) + i / 2 * kGroupBytes + i % 2 * 512;  // by the swizzle
#pragma unroll
        for (int column = 0; column < kHalfColumns; ++column) {
          copy_async(place + column * kGroupColumnBytes, from[i] + (half * kHalfColumns + column) * 128,
                     bytes);
        }
        // The rope part's place is free when both halves are.
        if (half == 0) copy_async((rope ^ i % 2 * 64) + i * 512, from[i] + kRopeColumn * 128, bytes);
      }
      copy_async_arrive(full);
      if (half == 1 && lane == 0) {
        s.live[stage][warp] = static_cast<std::uint16_t>(all);
        barrier_arrive(full);
      }
    }
  }

  /// The steps of item `index`.
  __device__ void take(int index, StepPlace& at) {
    const DeviceItem& item = s.queue.items[index % unsigned{Queue::kCapacity}];
    const int first = kTileTokens * warp + lane / 8;
    entries = p.listed.list.indices + item.first_query * p.listed.list.stride + item.work.kv_begin + first;
    left = wide::end_of(item.work) - item.work.kv_begin - first;
    int steps = steps_of<C>(item.work);
    std::int32_t ids[kOwn];
    const std::uint8_t* from[kOwn];
    const QueryLoader queries{params, s, rank, lane, warp, kWarps};
    const bool late = params.copied && index == 0;
    if (late) {
      queries.bring(index);
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
    load(ids);
    if (!late) queries.bring(index);
    std::uint32_t live = resolve(ids, from);
#pragma unroll 1
    for (; steps > 0; --steps, ++at.step) {
      forget();
      entries += kBlockTokens, left -= kBlockTokens;
      load(ids);
      copy(at, from, live);
      live = resolve(ids, from);
      if constexpr (C.blocks == 2) prefetch(from, live);
    }
  }
  /// What follows from these is worked out anew, and takes no registers.
  __device__ void forget() { asm volatile("" : "+r"(lane), "+r"(warp)); }

  static __device__ void run(const LatentBf16Params& params, Shared& s, int rank) {
    const std::uint32_t end = slot_end(params.attention.cache);
    StepPlace at;
    int index = 0;
#pragma unroll 1
    for (; has_item<C>(params, s, index); ++index) {
      ListLoader{params, s, rank, thread_index() / 32 % 4, thread_index() % 32, end}.take(index, at);
    }
    // Or, if no block had any, the kernel after this one could overtake those before it.
    if (params.copied && index == 0) wait_for_previous_kernel();
    copy_async_wait();
  }
};

}  // namespace halftone::cuda::bf16
