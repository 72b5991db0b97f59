// Where the tokens of a step are: the walk over the steps of all items, ahead of who computes, and from an
// entry of a list or of the block table to a slot of the cache. And what both kinds of load warps share.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/attention/rows.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

/// What says where a token is: its slot of the cache, or the entry of the block table.
using TokenId = std::int32_t;

/// Byte `offset` of the token in a slot.
__device__ inline const std::uint8_t* token_at(const CacheView& c, std::uint32_t slot, int offset) {
  const std::int64_t padding = c.page_stride - (std::int64_t{kTokenBytes} << c.page_log2);
  const std::uint8_t* const at = c.pages + offset + std::uint64_t{slot} * kTokenBytes;
  return at + (slot >> c.page_log2) * padding;
}

template <LatentWideConfig C>
struct StepCursor {
  const AttentionParams& params;
  Shared& s;
  unsigned thread;
  int rank;
  int token = 0;
  int end = -1;  // < 0: there is no step, and no token

  /// Before all else.
  __device__ void begin() const { s.walks[thread / 32].index = -1; }
  __device__ bool listed() const { return params.listed.list.indices != nullptr; }
  /// Of the lane's token, if it has one.
  __device__ int place() const {
    const int lane = static_cast<int>(thread % 32), warp = static_cast<int>(thread / 32);
    if constexpr (C.blocks == 2) return token + pair_place(rank, lane);
    return lane < 16 ? token + single_place(warp, lane) : INT32_MAX;
  }

  __device__ bool at_step() const { return end >= 0; }
  /// Goes on to the next step, if there is one.
  __device__ void next() {
    token += kBlockTokens;
    if (token < end) return;
    const int index = s.walks[thread / 32].index + 1;
    if (thread == 0) {  // who waits for an item extends the queue
      while (s.queue.more && s.queue.count <= index) {
        s.queue.produce(params.schedule, bounds_of(params), blockIdx.x / C.blocks);
      }
    }
    __syncwarp();  // all have read the index
    end = -1;
    if (!s.queue.has(index)) return;
    const DeviceItem& x = s.queue.items[index % ItemQueue::kCapacity];
    token = x.work.kv_begin;
    end = end_of(x.work);
    s.walks[thread / 32] = {listed() ? params.listed.list.indices + x.first_query * params.listed.list.stride
                                     : table_row(params.cache, x.work.request),
                            index};
  }
  /// Without a token, or a step, anything: a branch around the load would wait for it.
  __device__ TokenId load_id() const {
    const WalkLimits l = s.limits;
    const int at = place(), entry = at >> l.entry_log2;
    return __ldg(at < end && entry < l.entries
                     ? s.walks[thread / 32].entries + entry
                     : reinterpret_cast<const std::int32_t*>(params.schedule.header));
  }
  /// The slot of a token of the same step; -1: it is skipped. By all lanes.
  __device__ int resolve(TokenId id) const {
    const WalkLimits l = s.limits;
    const int at = place();
    const bool has = at < end;
    const bool found = static_cast<std::uint32_t>(id) < l.ids && at >> l.entry_log2 < l.entries;
    if (__any_sync(~0u, has && !found)) {
      if (has && !found && (id >= 0 || !listed())) has_page(params, -1);  // for the status
    }
    return has && found ? (id << l.entry_log2) + (at & l.place_mask) : -1;
  }
};

/// What both kinds of load warps do with codes and scales.
struct Dequantiser {
  static constexpr float kLargestScale = 128.0f;             // times 448 is within f16
  static constexpr float kSmallestScale = 6.103515625e-05f;  // normal in f16

  /// What a token's scales lose, base 2, `least` being the smallest that is not 0.
  static __device__ int exponent_of(float most, float least) {
    if (most <= kLargestScale && (least >= kSmallestScale || most == 0.0f)) return 0;
    return max(static_cast<int>(__float_as_uint(most) >> 23) - 127 - 6, -100);
  }
  static __device__ uint4 codes(std::uint32_t a, std::uint32_t b, std::uint32_t scale) {
    return {mul_f16x2(e4m3x2_to_f16x2(a), scale), mul_f16x2(e4m3x2_to_f16x2(a, true), scale),
            mul_f16x2(e4m3x2_to_f16x2(b), scale), mul_f16x2(e4m3x2_to_f16x2(b, true), scale)};
  }
  /// 8 elements of a rope part where they cannot stay as they are: of f16 queries, and of tokens that lost a
  /// power of two. f16 has no room for that: there products get it back before the rope part is added.
  template <DType kQuery>
  static __device__ uint4 rope(const uint4& raw, int exponent) {
    const float factor = kQuery == DType::kFloat16 ? 1.0f : power_of_two(-exponent);
    const auto adapt = [&](std::uint32_t x) {
      const float a = __uint_as_float(x << 16) * factor, b = __uint_as_float(x & 0xffff0000u) * factor;
      return kQuery == DType::kFloat16 ? pack_f16x2(a, b) : pack_bf16x2(a, b);
    };
    return {adapt(raw.x), adapt(raw.y), adapt(raw.z), adapt(raw.w)};
  }
};

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_async_wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ inline uint4 load_shared(std::uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
__device__ inline void store_shared(std::uint32_t at, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

/// Runs a loader: calls begin() for the first step, then fill() for each, with the slots of the steps ahead.
/// Loader::shift(slot) goes on to the step after the last one that it knows, of which the lane has this slot.
template <LatentWideConfig C, class Loader>
__device__ inline void run_loader(const AttentionParams& params, Shared& s, Loader& loader) {
  constexpr int kAhead = Loader::kAhead;  // steps of which slots are known beside the one that is filled
  StepCursor<C> cursor{params, s, loader.thread, loader.rank};
  cursor.begin();
  StepPlace at;
  TokenId id = 0;  // of the step after those
  int left = 0;    // steps that are known, and not yet filled
#pragma unroll 1
  for (int lead = kAhead + 1; lead > 0 || left > 0;) {
    asm volatile("" : "+r"(loader.thread));  // what follows from them takes no registers
    if constexpr (C.blocks == 2) asm volatile("" : "+r"(loader.rank));
    cursor.thread = loader.thread, cursor.rank = loader.rank;
    const bool known = cursor.at_step();
    loader.shift(cursor.resolve(id));
    left += known;
    if (known || lead == kAhead + 1) cursor.next();
    id = cursor.load_id();
    if (lead > 0) {
      --lead;
      if (lead == 0 && left > 0) loader.begin(at);
      continue;
    }
    loader.fill(at, left > 1);
    ++at.step, --left;
  }
  copy_async_wait();
}

}  // namespace halftone::cuda::wide
