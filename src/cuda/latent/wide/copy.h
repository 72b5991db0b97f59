// The warps that bring tokens: the walk over the steps of all items, from an entry of a list or of the block
// table to a slot of the cache, and the copies of raw codes, rope parts and scales. Who passes
// them on (pass.h) has no copies of its own under way, whose end its fences would wait for.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/wide/codes.h"

namespace halftone::cuda::wide {

/// What says where a token is: its slot of the cache, or the entry of the block table.
using TokenId = std::int32_t;

/// The token in a slot.
template <LatentWideConfig C>
__device__ inline const std::uint8_t* token_at(const CacheView& c, std::uint32_t slot) {
  const std::int64_t padding = c.page_stride - (std::int64_t{Record<C>::kRecordBytes} << c.page_log2);
  return c.pages + std::uint64_t{slot} * Record<C>::kRecordBytes + (slot >> c.page_log2) * padding;
}

/// Where the scales of the token in a slot are, in a page of scales apart.
__device__ inline const std::uint8_t* scales_apart(const CacheView& c, std::uint32_t slot) {
  const std::uint32_t place = slot & ((1u << c.page_log2) - 1);
  return c.pages + (slot >> c.page_log2) * c.page_stride + c.k_param_offset +
         place * LatentRecord<LatentCodes::kFp8Apart>::kScaleBytes;
}

/// How places of a list, or of a request, become slots.
struct WalkLimits {
  int entry_log2;     // places of an entry: of a list 1, of the block table a page
  int entries;        // of the table; any number of a list
  std::uint32_t ids;  // what an entry is below: slots, or pages
  int place_mask;     // what a place adds to the slot of its entry

  __device__ static WalkLimits of(const AttentionParams& p) {
    const CacheView& c = p.cache;
    if (p.listed.list.indices != nullptr) {
      return {0, INT32_MAX, slot_end(c), 0};
    }
    return {c.page_log2, c.table_width, static_cast<std::uint32_t>(c.num_pages), (1 << c.page_log2) - 1};
  }
};

/// Step by step through the worker's items; a lane has a token: of a pair of those that the block brings, of
/// a single block of the warp's.
template <LatentWideConfig C>
struct RoundCursor {
  const StepParams& step;
  const AttentionParams& params;
  Shared& s;
  int rank;
  unsigned warp, lane;                    // of an int, lane / 8 would take three instructions more
  const std::int32_t* entries = nullptr;  // of the item: its list, or its row of the block table
  int index = -1;
  int token = 0, end = -1;  // of the step, and of the item

  __device__ RoundCursor(const LatentWideParams& params, Shared& s, int rank, unsigned warp, unsigned lane)
      : step(params.step), params(params.attention), s(s), rank(rank), warp(warp), lane(lane) {}

  __device__ bool listed() const { return params.listed.list.indices != nullptr; }
  __device__ bool at_step() const { return end >= 0; }
  __device__ int place() const {
    if constexpr (kSingle<C>) return lane < 16 ? token + single_place(warp, lane) : INT32_MAX;
    return token + kRoundTokens * rank + lane;
  }

  /// Goes on to the next step; false: there is none.
  __device__ bool next() {
    token += kBlockTokens;
    if (token < end) return true;
    ++index, end = -1;
    if (warp == 0 && lane == 0) {  // who waits for an item extends the queue
      const int last = index + (step.appends ? kAppendedAhead : 0);  // who appends looks ahead
      s.queue.extend(last, params.schedule, bounds_of(params), blockIdx.x / C.blocks);
    }
    __syncwarp();
    if (!s.queue.has(index)) return false;
    const DeviceItem& x = s.queue.items[index % unsigned{Queue::kCapacity}];
    token = x.work.kv_begin;
    end = end_of(x.work);
    entries = listed() ? params.listed.list.indices + x.first_query * params.listed.list.stride
                       : table_row(params.cache, x.work.request);
    return true;
  }
  /// Before the step's tokens are read.
  __device__ void wait_for_step() const {
    const DeviceItem& x = s.queue.items[index % unsigned{Queue::kCapacity}];
    wait_for_tokens(step, x, index, token + kBlockTokens, s.appended);
  }
  /// Without a token anything: a branch around the load would wait for it.
  __device__ TokenId load_id() const {
    const WalkLimits limits = WalkLimits::of(params);
    const int at = place(), entry = at >> limits.entry_log2;
    return __ldg(at < end && entry < limits.entries
                     ? entries + entry
                     : reinterpret_cast<const std::int32_t*>(params.schedule.header));
  }
  /// The slot of the lane's token; -1: it is skipped. By all lanes.
  __device__ int resolve(TokenId id) const {
    const WalkLimits limits = WalkLimits::of(params);
    const int at = place();
    const bool has = at < end;
    const bool found =
        static_cast<std::uint32_t>(id) < limits.ids && at >> limits.entry_log2 < limits.entries;
    if (__any_sync(~0u, has && !found)) {
      if (has && !found && (id >= 0 || !listed())) has_page(params, -1);  // for the status
    }
    return has && found ? (id << limits.entry_log2) + (at & limits.place_mask) : -1;
  }
};

template <LatentWideConfig C>
struct Copier {
  using Kept = KeptScales<C.codes>;
  using RawScales = typename Kept::Raw;
  const LatentWideParams& wide;
  Shared& s;
  int rank;
  unsigned warp, lane;
  const AttentionParams& params = wide.attention;

  __device__ void run() {
    RoundCursor<C> cursor(wide, s, rank, warp, lane);
    if (!cursor.next()) return;
    TokenId id = cursor.load_id();
    StepPlace at;
    std::uint32_t parity = 0;  // of the round
#pragma unroll 1
    for (bool more = true; more; parity ^= 1, ++at.step) {
      asm volatile("" : "+r"(lane), "+r"(warp));  // what follows from them takes no registers
      cursor.lane = lane;
      cursor.wait_for_step();
      const int slot = cursor.resolve(id);
      const std::uint32_t live = __ballot_sync(~0u, slot >= 0);
      const std::uint8_t* const token = token_at<C>(params.cache, max(slot, 0));
      RawScales scales = load_scales(token, slot);
      more = cursor.next();
      id = cursor.load_id();
      barrier_wait(shared_address(&s.rope_empty[at.third()]), at.third_parity() ^ 1);
      copy_ropes(token, live, at.third());
      copy_codes(token, live, parity);
      if (slot < 0) scales = skipped_scales();
      note(scales, live, s.notes[at.third()][rank]);
    }
    copy_async_wait();
  }

 private:
  /// Where tokens `first` + i * `step` of the round lie, and the byte of them. Before the copies: these would
  /// each wait for the shuffle before it.
  template <int kCount>
  __device__ void addresses(const std::uint8_t* token, int first, int step, int byte,
                            const std::uint8_t* (&to)[kCount]) const {
    const auto mine = reinterpret_cast<unsigned long long>(token);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = reinterpret_cast<const std::uint8_t*>(__shfl_sync(~0u, mine, first + i * step)) + byte;
    }
  }
  /// A token that is skipped becomes zeros.
  __device__ void copy_ropes(const std::uint8_t* token, std::uint32_t live, int buffer) const {
    constexpr int kAtOnce = 4;
    const std::uint32_t to = shared_address(s.rope[buffer]) + place_in_column(lane / 8, lane % 8);
#pragma unroll
    for (int base = 0; base < kRoundTokens; base += 4 * kAtOnce) {
      const std::uint8_t* from[kAtOnce];
      addresses(token, base + lane / 8, 4, Record<C>::kRopeAt + lane % 8 * 16, from);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = base + 4 * i, row = kRoundTokens * rank + token;
        // Rows 4 on differ in the swizzle.
        copy_async((to ^ i % 2 * 4 * 16) + row * 128, from[i], live >> (token + lane / 8) & 1 ? 16 : 0);
      }
    }
  }
  __device__ void copy_codes(const std::uint8_t* token, std::uint32_t live, std::uint32_t parity) const {
    constexpr int kBytes = Sixteen<C.codes>::kTokenBytes;
    constexpr int kLanes = kBytes / 16, kAtOnce = 32 / kLanes;  // of a token; tokens of a copy
    const std::uint32_t to = shared_address(s.raw) + lane * 16;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const std::uint8_t* from[kChunkTokens / kAtOnce];
      addresses(token, kChunkTokens * chunk + lane / kLanes, kAtOnce, lane % kLanes * 16, from);
      barrier_wait(shared_address(&s.raw_empty[chunk]), parity ^ 1);
#pragma unroll
      for (int i = 0; i < kChunkTokens; i += kAtOnce) {
        const int at = kChunkTokens * chunk + i;
        copy_async(to + at * kBytes, from[i / kAtOnce], live >> (at + lane / kLanes) & 1 ? 16 : 0);
      }
      copy_async_arrive(shared_address(&s.raw_full[chunk]));
    }
  }
  /// Without a token anything: a branch here would wait for the loads.
  __device__ RawScales load_scales(const std::uint8_t* token, int slot) const {
    static_assert(sizeof(RawScales) <= sizeof(planning::ScheduleHeader));
    const void* const anything = params.schedule.header;
    RawScales scales;
    if constexpr (Record<C>::kApart) {
      const void* const own = scales_apart(params.cache, max(slot, 0));
      const uint2 x = __ldcg(static_cast<const uint2*>(slot >= 0 ? own : anything));
      scales.x[0] = x.x, scales.x[1] = x.y;
    } else {
      const void* const own = token + Record<C>::kScalesAt;
      const auto* const at = static_cast<const uint4*>(slot >= 0 ? own : anything);
#pragma unroll
      for (int i = 0; i < Record<C>::kScaleBytes / 16; ++i) {
        const uint4 x = __ldcg(at + i);
        scales.x[4 * i] = x.x, scales.x[4 * i + 1] = x.y, scales.x[4 * i + 2] = x.z,
                     scales.x[4 * i + 3] = x.w;
      }
    }
    return scales;
  }
  /// They need no power of two.
  static __device__ RawScales skipped_scales() {
    RawScales scales{};
    if constexpr (Kept::kPowers) scales.x[0] = scales.x[1] = Kept::kOnePowers;
    return scales;
  }
  /// What is known of the round's tokens beside their codes; the ring has room for it.
  __device__ void note(const RawScales& raw, std::uint32_t live, HalfNotes& notes) const {
    const typename Kept::Token token = Kept::of_token(raw);
    auto* const to = reinterpret_cast<std::uint32_t*>(scales_of<C>(s) + lane * kTokenScales<C>);
#pragma unroll
    for (int i = 0; i < kTokenScales<C> / 2; i += 2) {
      *reinterpret_cast<uint2*>(to + i) = {token.words[i], token.words[i + 1]};
    }
    notes.exponent[lane] = static_cast<std::int8_t>(token.exponent);
    const bool apart = __any_sync(~0u, token.exponent != 0);
    if (lane == 0) notes.live = live, notes.apart = apart;
    __syncwarp();
    if (lane < kChunks) barrier_arrive(shared_address(&s.raw_full[lane]));
  }
};

}  // namespace halftone::cuda::wide
