// The warpgroup that brings tokens: raw codes by cp.async, a token by a warp, then as f16 to the stage that
// is K of one product and V of the other. Rope parts go to their places as they are.
//
// Of each slice of 16 tokens a warp has four. In a cluster of two it dequantises the first two of them, for
// both blocks: the other block's warp has the same four in another order.
#pragma once

#include "cuda/attention/pages.h"
#include "cuda/attention/rows.h"
#include "cuda/device/cluster.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_async_wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// What says where a token is: its slot of the cache, or the entry of the block table. Lane j < 16 has the
/// token at 16 (j / 4) + 4 warp + (j % 4 ^ 2 rank) of a step.
using TokenId = std::int32_t;

/// Walks the steps of all items, ahead of who computes.
template <LatentWideConfig C>
struct StepCursor {
  const AttentionParams& params;
  Shared& s;
  unsigned thread;
  int rank;
  int index = -1, token = 0, end = 0;
  const std::int32_t* row = nullptr;  // of listed keys, or of the block table

  __device__ int warp() const { return int(thread / 32); }
  __device__ int lane() const { return int(thread % 32); }

  __device__ const DeviceItem& item() const { return s.queue.items[index % ItemQueue::kCapacity]; }
  __device__ int lane_place() const { return lane() / 4 * 16 + warp() * 4 + (lane() % 4 ^ 2 * rank); }

  /// False: there are no more.
  __device__ bool next() {
    token += kBlockTokens;
    if (token < end) return true;
    ++index;
    if (warp() == 0) {  // who waits for an item extends the queue
      if (lane() == 0) {
        while (s.queue.more && s.queue.count <= index) {
          s.queue.produce(params.schedule, bounds_of(params), blockIdx.x / C.blocks);
        }
      }
      __syncwarp();
    }
    if (!s.queue.has(index)) return false;
    const DeviceItem& x = item();
    token = x.work.kv_begin;
    end = end_of(x.work);
    row = listed() ? params.listed.list.indices + x.first_query * params.listed.list.stride
                   : table_row(params.cache, x.work.request);
    return true;
  }
  __device__ bool listed() const { return params.listed.list.indices != nullptr; }
  /// Of a lane that has a token.
  __device__ bool has_token() const { return lane() < 16 && token + lane_place() < end; }
  /// Without a token, or a step, anything: a branch around the load would wait for it.
  __device__ TokenId load_id(bool step) const {
    const AttentionParams& p = params;
    const int place = token + lane_place(), entry = listed() ? place : place >> p.cache.page_log2;
    const bool has = step && has_token() && (listed() || entry < p.cache.table_width);
    return __ldg(has ? row + entry : reinterpret_cast<const std::int32_t*>(p.schedule.header));
  }
  /// The token of the same step, or null: it is skipped.
  __device__ const std::uint8_t* resolve(TokenId id) const {
    const AttentionParams& p = params;
    if (!has_token() || (listed() && id < 0)) return nullptr;
    const int place = token + lane_place();
    const bool beyond = !listed() && place >> p.cache.page_log2 >= p.cache.table_width;
    const std::int32_t page = beyond ? -1 : listed() ? id >> p.cache.page_log2 : id;
    if (!has_page(p, page)) return nullptr;
    const int offset = (listed() ? id : place) & ((1 << p.cache.page_log2) - 1);
    return p.cache.pages + page * p.cache.page_stride + std::int64_t{offset} * kTokenBytes;
  }
};

template <LatentWideConfig C>
struct TokenLoader {
  static constexpr int kPairs = 8 / C.blocks;  // of tokens that the warp dequantises of a step
  static constexpr int kSlicePairs = kPairs / kSlices;
  static constexpr int kAhead = kRawTokens / 2;              // pairs on their way
  static constexpr float kLargestScale = 128.0f;             // times 448 is within f16
  static constexpr float kSmallestScale = 6.103515625e-05f;  // normal in f16
  const AttentionParams& params;
  Shared& s;
  unsigned thread;
  int rank;

  __device__ int warp() const { return int(thread / 32); }
  __device__ int lane() const { return int(thread % 32); }

  const std::uint8_t *here,
      *next;               // the lane's token of this step and the next one; somewhere if it is skipped
  std::uint32_t live = 0;  // of the warp's 16: bits of this step, then of the next one
  float raw_scale[2];      // of token lane / 4, and of that + 8, group lane % 4
  std::uint32_t scale[2];  // f16x2
  std::uint32_t first_place = 0;  // in the stage, of the lane's first half of the warp's first token

  /// Pair `pair`'s token i among the warp's 16.
  static __device__ constexpr int own_token(int pair, int i) {
    return C.blocks == 1 ? 2 * pair + i : 4 * pair + i;
  }
  __device__ int place(int token) const { return token / 4 * 16 + warp() * 4 + (token % 4 ^ 2 * rank); }
  static __device__ const std::uint8_t* address_of(const std::uint8_t* tokens, int token) {
    return reinterpret_cast<const std::uint8_t*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(tokens), token));
  }
  /// Goes on to the step after `next`, in which the lane has this token, or null.
  __device__ void shift(const std::uint8_t* token) {
    here = next;
    next = token == nullptr ? reinterpret_cast<const std::uint8_t*>(params.schedule.header) : token;
    live = live >> 16 | __ballot_sync(~0u, token != nullptr) << 16;
  }
  /// A token that is skipped becomes zeros.
  template <bool kNext>
  __device__ void copy(std::uint32_t to, int token, int offset) const {
    copy_async(to, address_of(kNext ? next : here, token) + offset,
               live >> (token + 16 * kNext) & 1 ? 16 : 0);
  }

  __device__ std::uint32_t raw_place(int slot) const {
    return shared_address(s.raw[warp()]) + slot * kLatentDims + lane() * 16;
  }
  /// Lane's chunk of the rope part of one of the warp's four tokens of a slice.
  __device__ std::uint32_t rope_place(int buffer, int slice) const {
    return shared_address(s.rope[buffer]) + place_in_column(place(4 * slice + lane() / 8), lane() % 8);
  }
  /// The copies of a pair.
  template <bool kNext>
  __device__ void request(int pair) const {
    const int slot = pair % kAhead * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) copy<kNext>(raw_place(slot + i), own_token(pair, i), lane() * 16);
  }
  __device__ void request_ropes(const StepPlace& at) const {
    barrier_wait(shared_address(&s.rope_empty[at.third()]), at.third_parity() ^ 1);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      copy<false>(rope_place(at.third(), slice), 4 * slice + lane() / 8, kRopeOffset + lane() % 8 * 16);
    }
  }
  /// Of the next step; of a token that is skipped anything: a branch here would wait for the load.
  __device__ void request_scales() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint8_t* const token = address_of(next, 8 * i + lane() / 4);
      raw_scale[i] = __ldg(reinterpret_cast<const float*>(token + kScaleOffset) + lane() % 4);
    }
  }

  /// Scales as f16, and what a stage says of its tokens. Scales that f16 does not hold well lose a power of
  /// two, the token's own, with which the products are multiplied later.
  __device__ void take_scales(int stage) {
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!(live >> (8 * i + lane() / 4) & 1)) raw_scale[i] = 0.0f;
      const float size = fabsf(raw_scale[i]);
      fits = fits && size <= kLargestScale && (size >= kSmallestScale || size == 0.0f);
    }
    const bool apart = __any_sync(~0u, !fits);
    if (apart) {
#pragma unroll
      for (int i = 0; i < 2; ++i) take_exponent(stage, i);
    } else if (lane() < 16) {
      s.exponent[stage][place(lane())] = 0;  // another warp's tokens may be apart
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = pack_f16x2(raw_scale[i], raw_scale[i]);
    if (lane() == 0) {
      s.live[stage][warp()] = static_cast<std::uint16_t>(live);
      s.apart[stage][warp()] = apart;
    }
  }
  __device__ void take_exponent(int stage, int i) {
    const float size = fabsf(raw_scale[i]);
    float most = fmaxf(size, __shfl_xor_sync(~0u, size, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    float least = size == 0.0f ? most : size;
    least = fminf(least, __shfl_xor_sync(~0u, least, 1));
    least = fminf(least, __shfl_xor_sync(~0u, least, 2));
    int exponent = 0;
    if (most > kLargestScale || (least < kSmallestScale && most != 0.0f)) {
      exponent = max(static_cast<int>(__float_as_uint(most) >> 23) - 127 - 6, -100);
    }
    raw_scale[i] *= power_of_two(-exponent);
    if (lane() % 4 == 0) s.exponent[stage][place(8 * i + lane() / 4)] = static_cast<std::int8_t>(exponent);
  }

  __device__ void read_raw(int pair, uint4 (&raw)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t at = raw_place(pair % kAhead * 2 + i);
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(raw[i].x), "=r"(raw[i].y), "=r"(raw[i].z), "=r"(raw[i].w)
                   : "r"(at)
                   : "memory");
    }
  }
  static __device__ uint4 dequantise(std::uint32_t a, std::uint32_t b, std::uint32_t scale) {
    return {mul_f16x2(e4m3x2_to_f16x2(a), scale), mul_f16x2(e4m3x2_to_f16x2(a, true), scale),
            mul_f16x2(e4m3x2_to_f16x2(b), scale), mul_f16x2(e4m3x2_to_f16x2(b, true), scale)};
  }
  static __device__ void store(std::uint32_t at, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
  __device__ void store_pair(const uint4 (&raw)[2], int pair, int stage) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = own_token(pair, i);
      const std::uint32_t factor =
          __shfl_sync(~0u, C.blocks == 1 ? scale[pair / 4] : scale[pair / 2], token % 8 * 4 + lane() / 8);
      const std::uint32_t along = token % 4 * 128 + token / 4 * (16 * 128);
      const std::uint32_t at = (first_place ^ token % 4 * 16) + along;
      const uint4 low = dequantise(raw[i].x, raw[i].y, factor), high = dequantise(raw[i].z, raw[i].w, factor);
      store(at, low);
      store(at + kColumnBytes, high);
      if constexpr (C.blocks == 2) {
        const std::uint32_t peer = (cluster_address(first_place, rank ^ 1) ^ token % 4 * 16) + along;
        const std::uint32_t full = cluster_address(shared_address(&s.kv_full[stage]), rank ^ 1);
        cluster_store(peer, low, full);
        cluster_store(peer + kColumnBytes, high, full);
      }
    }
  }
  /// Rope parts where they cannot stay as they are: of f16 queries, and of tokens that lost a power of two.
  __device__ void adapt_ropes(int buffer, int stage) const {
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const int token = 4 * slice + lane() / 8;
      // f16 has no room for the power of two: there the products get it back before the rope part is added.
      const float factor =
          C.q_dtype == DType::kFloat16 ? 1.0f : power_of_two(-s.exponent[stage][place(token)]);
      uint4* at = reinterpret_cast<uint4*>(s.rope[buffer] + place_in_column(place(token), lane() % 8));
      const uint4 raw = *at;
      const auto adapt = [&](std::uint32_t x) {
        const float a = __uint_as_float(x << 16) * factor, b = __uint_as_float(x & 0xffff0000u) * factor;
        return C.q_dtype == DType::kFloat16 ? pack_f16x2(a, b) : pack_bf16x2(a, b);
      };
      *at = {adapt(raw.x), adapt(raw.y), adapt(raw.z), adapt(raw.w)};
    }
  }

  /// Begins the first step's copies, and waits for the first pair.
  __device__ void begin(uint4 (&raw)[2]) {
#pragma unroll
    for (int pair = 0; pair < kAhead; ++pair) {
      request<true>(pair);
      copy_async_commit();
    }
    request_scales();
    copy_async_wait_for<kAhead - 1>();
    read_raw(0, raw);
  }
  /// Dequantises a step's tokens, and requests the next ones of this step and of the one after it, if any.
  __device__ void fill(const StepPlace& at, bool more, uint4 (&raw)[2]) {
    const int stage = at.stage();
    first_place =
        shared_address(s.kv[stage][lane() / 8 * 2]) + place_in_column(4 * warp() + 2 * rank, lane() % 8);
    request_ropes(at);  // complete before the last pair is
    const std::uint32_t empty = shared_address(s.kv_empty[stage]), parity = at.parity() ^ 1;
    barrier_wait(empty, parity);  // before the stage's notes of its tokens are written, too
    take_scales(stage);
    request_scales();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair + kAhead < kPairs) {
        request<false>(pair + kAhead);
      } else if (more) {
        request<true>(pair + kAhead - kPairs);
      }
      copy_async_commit();
      if (pair > 0 && pair % kSlicePairs == 0) barrier_wait(empty + pair / kSlicePairs * 8, parity);
      copy_async_wait_for<kAhead - 1>();
      uint4 following[2];
      read_raw(pair + 1, following);
      store_pair(raw, pair, stage);
      raw[0] = following[0], raw[1] = following[1];
    }
    __syncwarp();
    if (C.q_dtype == DType::kFloat16 || s.apart[stage][warp()]) adapt_ropes(at.third(), stage);
    fence_async_shared();
    __syncwarp();
    if (lane() != 0) return;
    const std::uint32_t full = shared_address(&s.kv_full[stage]);
    if constexpr (C.blocks == 2) {
      barrier_expect_bytes(full, 8 * kLatentDims * 2);  // of the same warp of the other block
    } else {
      barrier_arrive(full);
    }
  }

  /// A step is dequantised, the tokens of the next one are known, those after it asked for.
  __device__ void run() {
    StepCursor<C> cursor{params, s, thread, rank};
    StepPlace at;
    TokenId ids = 0;                      // of the step after `next`
    bool fetched = false, known = false;  // there are ids; there is a next step
    uint4 raw[2];
#pragma unroll 1
    for (int lead = 2;;) {
      asm volatile("" : "+r"(thread));  // what follows from them takes no registers
      if constexpr (C.blocks == 2) asm volatile("" : "+r"(rank));
      cursor.thread = thread, cursor.rank = rank;
      if (lead == 0 && !known) break;
      shift(fetched ? cursor.resolve(ids) : nullptr);
      known = fetched;
      fetched = (fetched || lead == 2) && cursor.next();
      if (!fetched && lead == 2) break;
      ids = cursor.load_id(fetched);
      if (lead == 2) {
        lead = 1;
        continue;
      }
      if (lead == 1) {
        lead = 0;
        if (!known) break;
        begin(raw);
      } else {
        fill(at, known, raw);
        ++at.step;
      }
    }
    copy_async_wait();
  }
};

}  // namespace halftone::cuda::wide
