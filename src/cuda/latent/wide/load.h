// The warpgroup that brings tokens: raw codes by cp.async, a token by a warp, then as f16 to the stage that is
// K of one product and V of the other. Rope parts go to their places as they are.
//
// Of each slice of 16 tokens a warp has four. In a cluster of two it dequantises two of them, for both blocks.
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

/// Where the tokens of a step are. Lane j < 16 has the one at 16 (j / 4) + 4 warp + j % 4.
struct TokenIds {
  std::int32_t page = kNone, offset = 0;
  static constexpr std::int32_t kNone = INT32_MIN;  // beyond the item's keys
};

/// Walks the steps of all items, ahead of who computes.
struct StepCursor {
  const LatentParams& params;
  Shared& s;
  int warp, lane, worker;
  int index = -1, token = 0, end = 0;
  const std::int32_t* row = nullptr;  // of listed keys, or of the block table

  __device__ int lane_place() const { return lane / 4 * 16 + warp * 4 + lane % 4; }

  /// False: there are no more.
  __device__ bool next() {
    token += kBlockTokens;
    if (token < end) return true;
    ++index;
    if (warp == 0) {  // who waits for an item extends the queue
      if (lane == 0) {
        while (s.queue.more && s.queue.count <= index) {
          s.queue.produce(params.attention.schedule, bounds_of(params.attention), worker);
        }
      }
      __syncwarp();
    }
    if (!s.queue.has(index)) return false;
    const DeviceItem& item = s.queue.items[index % ItemQueue::kCapacity];
    token = item.work.kv_begin;
    end = item.work.row_end > item.work.row_begin ? item.work.kv_end : token;
    row = params.listed.indices != nullptr
              ? params.listed.indices + item.first_query * params.listed.index_stride
              : table_row(params.attention.cache, item.work.request);
    return true;
  }
  __device__ TokenIds ids() const {
    TokenIds x;
    const CacheView& cache = params.attention.cache;
    const int place = token + lane_place();
    if (lane >= 16 || place >= end) return x;
    if (params.listed.indices != nullptr) {
      x.page = x.offset = __ldg(row + place);
    } else {
      x.page = page_entry(cache, row, place >> cache.page_log2);
      x.offset = place;
    }
    return x;
  }
  /// The token, or null: it is skipped.
  __device__ const std::uint8_t* resolve(const TokenIds& x) const {
    const AttentionParams& p = params.attention;
    const bool listed = params.listed.indices != nullptr;
    if (x.page == TokenIds::kNone || (listed && x.page < 0)) return nullptr;
    const std::int32_t page = listed ? x.page >> p.cache.page_log2 : x.page;
    if (!has_page(p, page)) return nullptr;
    const int offset = x.offset & ((1 << p.cache.page_log2) - 1);
    return p.cache.pages + page * p.cache.page_stride + std::int64_t{offset} * kTokenBytes;
  }
};

template <LatentWideConfig C>
struct TokenLoader {
  static constexpr int kPairs = 8 / C.blocks;                // of tokens that the warp dequantises of a step
  static constexpr int kSlicePairs = kPairs / kSlices;       // 2 or 1
  static constexpr int kAhead = kRawTokens / 2;              // pairs on their way
  static constexpr float kLargestScale = 128.0f;             // times 448 is within f16
  static constexpr float kSmallestScale = 6.103515625e-05f;  // normal in f16
  const LatentParams& params;
  Shared& s;
  int warp, lane, rank;
  const std::uint8_t *here = nullptr, *next = nullptr;  // of the lane's token of this step and the next one
  float raw_scale[2];  // of token lane / 4, and of that + 8, group lane % 4
  float inverse[2];    // what the rope part is multiplied by, likewise
  std::uint32_t scale[2];  // f16x2
  std::uint32_t first_place = 0;  // in a stage, of the lane's first half of the warp's first token

  /// Pair `pair`'s token i among the warp's 16.
  __device__ int own_token(int pair, int i) const {
    return C.blocks == 1 ? 2 * pair + i : 4 * pair + 2 * rank + i;
  }
  __device__ int place(int token) const { return token / 4 * 16 + warp * 4 + token % 4; }
  static __device__ const std::uint8_t* shuffle(const std::uint8_t* p, int from) {
    return reinterpret_cast<const std::uint8_t*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(p), from));
  }
  /// A token that is skipped becomes zeros.
  __device__ void copy(std::uint32_t to, const std::uint8_t* token, int offset) const {
    const std::uint8_t* from = token == nullptr ? params.attention.cache.pages : token;
    copy_async(to, from + offset, token == nullptr ? 0 : 16);
  }

  __device__ std::uint32_t raw_place(int slot) const {
    return shared_address(s.raw[warp]) + slot * kLatentDims + lane * 16;
  }
  /// Lane's chunk of the rope part of one of the warp's four tokens of a slice.
  __device__ std::uint32_t rope_place(int buffer, int slice) const {
    return shared_address(s.rope[buffer]) + place_in_column(place(4 * slice + lane / 8), lane % 8);
  }
  /// The copies of a pair; with the first of a slice all that the warp has of its rope parts.
  __device__ void request(const std::uint8_t* tokens, int pair, const StepPlace& at) const {
    const int slot = pair % kAhead * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) copy(raw_place(slot + i), shuffle(tokens, own_token(pair, i)), lane * 16);
    if (pair % kSlicePairs == 0) {
      const int slice = pair / kSlicePairs;
      if (slice == 0) barrier_wait(shared_address(&s.rope_empty[at.third]), at.third_parity ^ 1);
      copy(rope_place(at.third, slice), shuffle(tokens, 4 * slice + lane / 8), kRopeOffset + lane % 8 * 16);
    }
  }
  __device__ void request_scales(const std::uint8_t* tokens) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint8_t* token = shuffle(tokens, 8 * i + lane / 4);
      raw_scale[i] = 0.0f;
      if (token != nullptr) {
        raw_scale[i] = __ldg(reinterpret_cast<const float*>(token + kScaleOffset) + lane % 4);
      }
    }
  }

  /// Scales as f16, and what a stage says of its tokens. Scales that f16 does not hold well lose a power of
  /// two, the token's own, with which the products are multiplied later.
  __device__ void take_scales(int stage) {
    const std::uint32_t live = __ballot_sync(~0u, here != nullptr);
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float size = fabsf(raw_scale[i]);
      fits = fits && size <= kLargestScale && (size >= kSmallestScale || size == 0.0f);
      inverse[i] = 1.0f;
    }
    const bool apart = __any_sync(~0u, !fits);
    if (apart) {
#pragma unroll
      for (int i = 0; i < 2; ++i) take_exponent(stage, i);
    } else if (lane < 16) {
      s.exponent[stage][place(lane)] = 0;  // another warp's tokens may be apart
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = pack_f16x2(raw_scale[i], raw_scale[i]);
    if (lane == 0) {
      s.live[stage][warp] = static_cast<std::uint16_t>(live);
      s.apart[stage][warp] = apart;
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
    inverse[i] = __uint_as_float(static_cast<std::uint32_t>(127 - exponent) << 23);
    raw_scale[i] *= inverse[i];
    if (lane % 4 == 0) s.exponent[stage][place(8 * i + lane / 4)] = static_cast<std::int8_t>(exponent);
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
          __shfl_sync(~0u, C.blocks == 1 ? scale[pair / 4] : scale[pair / 2], token % 8 * 4 + lane / 8);
      const std::uint32_t at = shared_address(s.kv[stage]) + (first_place ^ token % 4 * 16) +
                               (token % 4 * 128 + token / 4 * (16 * 128));
      const uint4 low = dequantise(raw[i].x, raw[i].y, factor), high = dequantise(raw[i].z, raw[i].w, factor);
      store(at, low);
      store(at + kColumnBytes, high);
      if constexpr (C.blocks == 2) {
        const std::uint32_t peer = cluster_address(at, rank ^ 1);
        const std::uint32_t full = cluster_address(shared_address(&s.kv_full[stage]), rank ^ 1);
        cluster_store(peer, low, full);
        cluster_store(peer + kColumnBytes, high, full);
      }
    }
  }
  /// Rope parts where they cannot stay as they are: of f16 queries, and of tokens that lost a power of two.
  __device__ void adapt_ropes(int buffer) const {
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const int token = 4 * slice + lane / 8;
      const float low = __shfl_sync(~0u, inverse[0], token % 8 * 4);
      const float high = __shfl_sync(~0u, inverse[1], token % 8 * 4);
      const float factor = token < 8 ? low : high;
      uint4* at = reinterpret_cast<uint4*>(s.rope[buffer] + place_in_column(place(token), lane % 8));
      const uint4 raw = *at;
      const auto adapt = [&](std::uint32_t x) {
        const float a = __uint_as_float(x << 16) * factor, b = __uint_as_float(x & 0xffff0000u) * factor;
        return C.q_dtype == DType::kFloat16 ? pack_f16x2(a, b) : pack_bf16x2(a, b);
      };
      *at = {adapt(raw.x), adapt(raw.y), adapt(raw.z), adapt(raw.w)};
    }
  }

  /// Begins a step's first copies, and waits for the first pair.
  __device__ void begin(const StepPlace& at, uint4 (&raw)[2]) {
#pragma unroll
    for (int pair = 0; pair < kAhead; ++pair) {
      request(next, pair, at);
      copy_async_commit();
    }
    request_scales(next);
    copy_async_wait_for<kAhead - 1>();
    read_raw(0, raw);
  }
  /// Dequantises a step's tokens, and requests the next ones of this step and of the one after it, if any.
  __device__ void fill(const StepPlace& at, const StepPlace& after, bool more, uint4 (&raw)[2]) {
    const int stage = at.stage();
    first_place = lane / 8 * 2 * kColumnBytes + place_in_column(4 * warp, lane % 8);
    asm volatile("" : "+r"(first_place));  // or the places of all tokens are kept in registers
    const std::uint32_t empty = shared_address(s.kv_empty[stage]), parity = at.parity() ^ 1;
    barrier_wait(empty, parity);  // before the stage's notes of its tokens are written, too
    take_scales(stage);
    if (more) request_scales(next);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair + kAhead < kPairs) {
        request(here, pair + kAhead, at);
      } else if (more) {
        request(next, pair + kAhead - kPairs, after);
      }
      copy_async_commit();
      if (pair > 0 && pair % kSlicePairs == 0) barrier_wait(empty + pair / kSlicePairs * 8, parity);
      copy_async_wait_for<kAhead - 1>();
      uint4 following[2];
      read_raw(pair + 1, following);
      store_pair(raw, pair, stage);
      raw[0] = following[0], raw[1] = following[1];
    }
    if (C.q_dtype == DType::kFloat16 || __any_sync(~0u, inverse[0] != 1.0f || inverse[1] != 1.0f)) {
      adapt_ropes(at.third);
    }
    fence_async_shared();
    __syncwarp();
    if (lane != 0) return;
    const std::uint32_t full = shared_address(&s.kv_full[stage]);
    if constexpr (C.blocks == 2) {
      barrier_expect_bytes(full, 8 * kLatentDims * 2);  // of the same warp of the other block
    } else {
      barrier_arrive(full);
    }
  }

  /// A step is dequantised, the tokens of the next one are known, those after it asked for.
  __device__ void run(int worker) {
    StepCursor cursor{params, s, warp, lane, worker};
    StepPlace at, after;
    TokenIds ids;  // of the step after `next`
    bool fetched = false, known = false;  // there are ids; there is a next step
    uint4 raw[2];
#pragma unroll 1
    for (int lead = 2;;) {
      const bool has = known;
      here = next;
      next = cursor.resolve(ids);
      known = fetched;
      fetched = (fetched || lead == 2) && cursor.next();
      ids = fetched ? cursor.ids() : TokenIds{};
      if (lead == 2) {
        lead = 1;
        continue;
      }
      if (lead == 1) {
        lead = 0;
        if (!known) break;
        begin(after, raw);
      } else {
        if (!has) break;
        fill(at, after, known, raw);
      }
      at = after;
      after.advance();
    }
    copy_async_wait();
  }
};

}  // namespace halftone::cuda::wide
