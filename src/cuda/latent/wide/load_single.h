// The warpgroup that brings tokens of fp8 to a block that shares none: raw codes by cp.async, a token by a
// warp, then as f16 to the stage that is K of one product and V of the other. Rope parts go to their places
// as they are. Of each slice of 16 tokens a warp has four. All four warps dequantise, since a block has twice
// the tokens of one of a pair.
#pragma once

#include "cuda/latent/wide/copy.h"
#include "cuda/latent/wide/pass.h"

namespace halftone::cuda::wide {

inline constexpr int kRingUnits = 8, kUnitTokens = 16;  // tokens of a warp: in the ring, of a step
static_assert(4 * kRingUnits == kRoundTokens);

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_async_wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <LatentWideConfig C>
struct SingleLoader {
  static constexpr int kUnits = kUnitTokens, kSliceUnits = 4;
  const AttentionParams& params;
  Shared& s;
  int warp, lane;

  int here = 0, next = 0;    // slots of the lane's token of this step and the next one; any if it is skipped
  std::uint32_t live = 0;    // of the warp's 16 tokens: bits of this step, then of the next one
  float raw_scale[2] = {};   // of the next step: of token lane / 4, and of that + 8, group lane % 4
  std::uint32_t scales = 0;  // the two, f16
  std::uint32_t exponents = 0;  // what these tokens' scales have lost, base 2: a byte each
  bool apart = false;           // whether any token's have

  __device__ void shift(int slot) {
    here = next, next = max(slot, 0);
    live = live >> 16 | __ballot_sync(~0u, slot >= 0) << 16;
  }
  __device__ const std::uint8_t* address_of(int slots, int token, int offset) const {
    return token_at<C>(params.cache, __shfl_sync(~0u, slots, token)) + offset;
  }
  __device__ std::uint32_t raw_place(int unit) const {
    return shared_address(s.raw[kRingUnits * warp]) + unit % kRingUnits * kLatentDims + lane * 16;
  }
  /// A token that is skipped becomes zeros.
  template <bool kNext>
  __device__ void request(int unit) const {
    copy_async(raw_place(unit), address_of(kNext ? next : here, unit, lane * 16),
               live >> (unit + 16 * kNext) & 1 ? 16 : 0);
  }
  /// Of the next step, once there is room.
  __device__ void request_ropes(const StepPlace& at) const {
    barrier_wait(shared_address(&s.rope_empty[at.third()]), at.third_parity() ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = 4 * i + lane / 8;
      copy_async(rope_place(at.third(), i), address_of(next, from, kRopeOffset + lane % 8 * 16),
                 live >> (16 + from) & 1 ? 16 : 0);
    }
  }
  /// Lane's chunk of the rope part of one of the warp's four tokens of a slice.
  __device__ std::uint32_t rope_place(int buffer, int slice) const {
    return shared_address(s.rope[buffer]) +
           place_in_column(single_place(warp, 4 * slice + lane / 8), lane % 8);
  }
  /// Of the next step; of a token that is skipped anything: a branch here would wait for the load.
  __device__ void request_scales() {
    const auto* const anything = reinterpret_cast<const std::uint8_t*>(params.schedule.header);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * i + lane / 4;
      const std::uint8_t* const at = address_of(next, token, kScaleOffset + lane % 4 * 4);
      raw_scale[i] = __ldg(reinterpret_cast<const float*>(live >> (16 + token) & 1 ? at : anything));
    }
  }

  /// Scales of the next step as f16. Those that f16 does not hold well lose a power of two, the token's own,
  /// with which the products are multiplied later.
  __device__ void take_scales() {
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!(live >> (16 + 8 * i + lane / 4) & 1)) raw_scale[i] = 0.0f;
      const float size = fabsf(raw_scale[i]);
      fits = fits && size <= KeptScales::kLargest && (size >= KeptScales::kSmallest || size == 0.0f);
    }
    apart = __any_sync(~0u, !fits);
    exponents = 0;
    if (apart) {
#pragma unroll
      for (int i = 0; i < 2; ++i) take_exponent(i);
    }
    scales = pack_f16x2(raw_scale[0], raw_scale[1]);
  }
  __device__ void take_exponent(int i) {
    const float size = fabsf(raw_scale[i]);
    float most = fmaxf(size, __shfl_xor_sync(~0u, size, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    float least = size == 0.0f ? most : size;
    least = fminf(least, __shfl_xor_sync(~0u, least, 1));
    least = fminf(least, __shfl_xor_sync(~0u, least, 2));
    const int exponent = KeptScales::exponent_of(most, least);
    raw_scale[i] *= power_of_two(-exponent);
    exponents |= (exponent & 0xff) << 8 * i;
  }
  /// Of the warp's token i.
  __device__ int exponent_of(int i) const {
    return static_cast<std::int8_t>(__shfl_sync(~0u, exponents, i % 8 * 4) >> i / 8 * 8);
  }
  /// What is said of the warp's tokens. Bits of a slice's four go to the half that the slice lies in.
  __device__ void note(int third) const {
    const int exponent = exponent_of(lane % 16), place = single_place(warp, lane % 16);
    HalfNotes& notes = s.notes[third][place / kRoundTokens];
    if (lane < 16) notes.exponent[place % kRoundTokens] = static_cast<std::int8_t>(exponent);
    if (lane < 2) {
      HalfNotes& half = s.notes[third][lane];
      reinterpret_cast<std::uint8_t*>(&half.live)[warp] = static_cast<std::uint8_t>(live >> 8 * lane);
      reinterpret_cast<std::uint8_t*>(&half.apart)[warp] = apart;
    }
  }

  __device__ void store_unit(const uint4& raw, int unit, std::uint32_t place) const {
    const std::uint32_t both = __shfl_sync(~0u, scales, unit % 8 * 4 + lane / 8);
    const std::uint32_t factor = __byte_perm(both, 0, unit < 8 ? 0x1010 : 0x3232);
    const std::uint32_t at = (place ^ unit % 4 * 16) + unit % 4 * 128 + unit / 4 * kSliceBytes;
    store_shared(at, dequantise(raw.x, raw.y, factor));
    store_shared(at + kGroupColumnBytes, dequantise(raw.z, raw.w, factor));
  }
  __device__ void adapt_ropes(int buffer) const {
    if (C.q_dtype == DType::kBFloat16 && !apart) return;
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const int own = exponent_of(4 * slice + lane / 8);
      const std::uint32_t at = rope_place(buffer, slice);
      store_shared(at, adapt_rope<C.q_dtype>(load_shared(at), own));
    }
  }

  /// Begins the first step's copies.
  __device__ void begin(const StepPlace& at) {
#pragma unroll
    for (int unit = 0; unit < kRingUnits; ++unit) {
      request<true>(unit);
      if (unit + 1 < kRingUnits) copy_async_commit();
    }
    request_scales();
    request_ropes(at);
    copy_async_commit();  // rope parts with the last unit: there are always as many groups behind a unit
    take_scales();
  }
  /// Dequantises a step's tokens, and requests the next ones of this step and of the one after it. `more`:
  /// there is such a step.
  __device__ void fill(const StepPlace& at, bool more) {
    const int stage = at.stage();
    const std::uint32_t place = shared_address(s.kv[stage][warp / 2]) + lane / 8 * 2 * kGroupColumnBytes +
                                place_in_column(warp % 2 * 4, lane % 8);
    const std::uint32_t empty = shared_address(s.kv_empty[stage]), parity = at.parity() ^ 1;
    barrier_wait(empty, parity);  // before the stage's notes of its tokens are written, too
    note(at.third());
    request_scales();
    copy_async_wait_for<kRingUnits - 1>();
    uint4 raw = load_shared(raw_place(0));
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit + kRingUnits < kUnits) {
        request<false>(unit + kRingUnits);
      } else {
        request<true>(unit + kRingUnits - kUnits);
      }
      if (unit + 1 < kUnits) copy_async_commit();
      if (unit > 0 && unit % kSliceUnits == 0) barrier_wait(empty + unit / kSliceUnits * 8, parity);
      uint4 following{};
      if (unit + 1 < kUnits) {
        copy_async_wait_for<kRingUnits - 1>();
        following = load_shared(raw_place(unit + 1));
      }
      store_unit(raw, unit, place);
      raw = following;
    }
    adapt_ropes(at.third());
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.kv_full[stage]));
    if (more) request_ropes({at.step + 1});
    copy_async_commit();
    take_scales();
  }
};

/// Calls begin() for the first step, then fill() for each, one step behind the walk.
template <LatentWideConfig C>
__device__ inline void load_single(const AttentionParams& params, Shared& s, int warp, int lane) {
  SingleLoader<C> loader{params, s, warp, lane};
  RoundCursor<C> cursor(params, s, 0, warp, lane);
  StepPlace at;
  TokenId id = 0;  // of the step after those that are known
  int left = 0;    // steps that are known, and not yet filled
#pragma unroll 1
  for (int lead = 2; lead > 0 || left > 0;) {
    asm volatile("" : "+r"(loader.lane), "+r"(loader.warp));  // what follows from them takes no registers
    cursor.lane = loader.lane, cursor.warp = loader.warp;
    const bool known = cursor.at_step();
    loader.shift(cursor.resolve(id));
    left += known;
    if (known || lead == 2) cursor.next();
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
