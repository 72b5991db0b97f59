// The warpgroup that brings tokens of codes to a block that shares none: raw codes by cp.async, a token by a
// warp, then as f16 to the stage that is K of one product and V of the other. Rope parts go to their places
// as they are, and from there to the stage, too, if they are V. Of each slice of 16 tokens a warp has four.
// All four warps dequantise, since a block has twice the tokens of one of a pair.
#pragma once

#include "cuda/latent/wide/copy.h"
#include "cuda/latent/wide/pass.h"

namespace halftone::cuda::wide {

inline constexpr int kRingUnits = 8, kUnitTokens = 16;  // tokens of a warp: in the ring, of a step
static_assert(4 * kRingUnits == kRoundTokens);

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// kBytes, or 0 if `bit` is 0: selected here, since the compiler would move the bit to where it is the
/// number, in two instructions more than a predicate takes.
template <int kBytes>
__device__ inline int bytes_if(std::uint32_t bit) {
  int bytes;
  asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %1, 0;\n\tselp.b32 %0, %2, 0, p;\n\t}"
      : "=r"(bytes)
      : "r"(bit), "n"(kBytes));
  return bytes;
}
template <int kPending>
__device__ inline void copy_async_wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <LatentWideConfig C>
struct SingleLoader {
  using Codes = Sixteen<C.codes>;
  using Kept = KeptScales<C.codes>;
  static constexpr int kUnits = kUnitTokens, kSliceUnits = 4;
  const AttentionParams& params;
  Shared& s;
  unsigned warp, lane;

  // Where the lane's token of this step lies, and of the next one; any if it is skipped.
  std::uint64_t here = 0, next = 0;
  int next_slot = 0;       // of scales apart
  std::uint32_t live = 0;  // of the warp's 16 tokens: bits of this step, then of the next one
  // Of the next step, of token lane / 4, and of that + 8: the lane's scales, and mins. f32: one, of group
  // lane % 4; f16 and e8m0: of two groups, from 2 (lane % 4) on.
  std::uint32_t raw_scale[2] = {}, raw_min[2] = {};
  std::uint32_t scale[2] = {}, min[2] = {};  // kept ones; of f32 both tokens' in scale[0]
  std::uint32_t exponents = 0;               // what these tokens' scales have lost, base 2: a byte each
  bool apart = false;                        // whether any token's have

  __device__ void shift(int slot) {
    next_slot = max(slot, 0);
    here = next, next = reinterpret_cast<std::uint64_t>(token_at<C>(params.cache, next_slot));
    live = live >> 16 | __ballot_sync(~0u, slot >= 0) << 16;
  }
  /// Of the lane that has the token: to find out where it lies takes more instructions than a second shuffle.
  static __device__ const std::uint8_t* address_of(std::uint64_t tokens, int token, int offset) {
    return reinterpret_cast<const std::uint8_t*>(__shfl_sync(~0u, tokens, token)) + offset;
  }
  __device__ std::uint32_t raw_place(int unit) const {
    return shared_address(s.raw) + (kRingUnits * warp + unit % kRingUnits) * Codes::kTokenBytes +
           lane * Codes::kBytes;
  }
  /// A token that is skipped becomes zeros.
  template <bool kNext>
  __device__ void request(int unit) const {
    const std::uint8_t* const from = address_of(kNext ? next : here, unit, lane * Codes::kBytes);
    const int bytes = bytes_if<Codes::kBytes>(live & 1u << (unit + 16 * kNext));
    if constexpr (Codes::kBytes == 16) {
      copy_async(raw_place(unit), from, bytes);
    } else {
      copy_async_8(raw_place(unit), from, bytes);
    }
  }
  /// Of the next step, once there is room.
  __device__ void request_ropes(const StepPlace& at) const {
    barrier_wait(shared_address(&s.rope_empty[at.third()]), at.third_parity() ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = 4 * i + lane / 8;
      copy_async(rope_place(at.third(), i), address_of(next, from, Record<C>::kRopeAt + lane % 8 * 16),
                 bytes_if<16>(live & 1u << (16 + from)));
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
      const bool has = live >> (16 + token) & 1;
      if constexpr (Record<C>::kApart) {
        const std::uint8_t* const own =
            scales_apart(params.cache, __shfl_sync(~0u, next_slot, token)) + lane % 4 * 2;
        raw_scale[i] = __ldcg(reinterpret_cast<const std::uint16_t*>(has ? own : anything));
      } else {
        const std::uint8_t* const own = address_of(next, token, Record<C>::kScalesAt + lane % 4 * 4);
        const auto* const at = reinterpret_cast<const std::uint32_t*>(has ? own : anything);
        raw_scale[i] = __ldcg(at);
        if constexpr (Kept::kMins) raw_min[i] = __ldcg(at + Record<C>::kGroups / 2);
      }
    }
  }

  /// Scales of the next step as f16. Those that f16 does not hold well lose a power of two, the token's own,
  /// with which the products are multiplied later.
  __device__ void take_scales() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!(live >> (16 + 8 * i + lane / 4) & 1))
        raw_scale[i] = Kept::kPowers ? Kept::kOnePowers : 0, raw_min[i] = 0;
    }
    apart = __any_sync(~0u, own_sizes(0).exponent() != 0 || own_sizes(1).exponent() != 0);
    exponents = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!apart) {
        keep(i, 0);
        continue;
      }
      typename Kept::Sizes sizes = own_sizes(i);
      sizes.share();
      exponents |= (sizes.exponent() & 0xff) << 8 * i;
      keep(i, sizes.exponent());
    }
    if constexpr (Kept::kFloats) {
      scale[0] = pack_f16x2(__uint_as_float(raw_scale[0]), __uint_as_float(raw_scale[1]));
    }
  }
  __device__ void keep(int i, int exponent) {
    if constexpr (Kept::kFloats) {
      if (exponent == 0) return;
      raw_scale[i] = __float_as_uint(__uint_as_float(raw_scale[i]) * power_of_two(-exponent));
    } else if constexpr (Kept::kPowers) {
      scale[i] = Kept::powers(raw_scale[i], exponent);
    } else {
      scale[i] = Kept::kept_scales(raw_scale[i], exponent);
      if constexpr (Kept::kMins) min[i] = Kept::kept_mins(raw_min[i], exponent);
    }
  }
  __device__ typename Kept::Sizes own_sizes(int i) const {
    typename Kept::Sizes sizes;
    if constexpr (Kept::kFloats) {
      sizes.add(__uint_as_float(raw_scale[i]));
    } else if constexpr (Kept::kPowers) {
      sizes.add_power(raw_scale[i]);
      if (lane % 4 < 3) sizes.add_power(raw_scale[i] >> 8);  // there are seven
    } else {
      sizes.add_pair(raw_scale[i], raw_min[i]);
    }
    return sizes;
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

  /// Of the lane's dims of a token, twice.
  __device__ std::uint32_t own_scale(const std::uint32_t (&of)[2], int unit) const {
    const bool upper = Kept::kFloats ? unit >= 8 : lane / 4 % 2 != 0;
    const std::uint32_t both = __shfl_sync(~0u, of[Kept::kFloats ? 0 : unit / 8], unit % 8 * 4 + lane / 8);
    return __byte_perm(both, 0, upper ? 0x3232 : 0x1010);
  }
  __device__ void store_unit(const Codes& raw, int unit, std::uint32_t place) const {
    const std::uint32_t own = own_scale(scale, unit), own_min = Kept::kMins ? own_scale(min, unit) : 0;
    const std::uint32_t at = (place ^ unit % 4 * 16) + unit % 4 * 128 + unit / 4 * kSliceBytes;
    if constexpr (Codes::kAll) {
      store_shared(at, raw.eight(false, own, own_min));
      store_shared(at + kGroupColumnBytes, raw.eight(true, own, own_min));
    } else {  // no branch but round the stores
      const uint4 low = raw.eight(false, own, own_min), high = raw.eight(true, own, own_min);
      if (Codes::has(lane)) store_shared(at, low), store_shared(at + kGroupColumnBytes, high);
    }
  }
  __device__ void adapt_ropes(int buffer) const {
    if (C.q_dtype == DType::kBFloat16 && !apart) return;
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const int own = exponent_of(4 * slice + lane / 8);
      const std::uint32_t at = rope_place(buffer, slice);
      store_shared(at, adapt_rope<C.q_dtype>(load_shared_16_bytes(at), own));
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
    Codes raw = Codes::load(raw_place(0));
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit + kRingUnits < kUnits) {
        request<false>(unit + kRingUnits);
      } else {
        request<true>(unit + kRingUnits - kUnits);
      }
      if (unit + 1 < kUnits) copy_async_commit();
      if (unit > 0 && unit % kSliceUnits == 0) barrier_wait(empty + unit / kSliceUnits * 8, parity);
      Codes following{};
      if (unit + 1 < kUnits) {
        copy_async_wait_for<kRingUnits - 1>();
        following = Codes::load(raw_place(unit + 1));
      }
      store_unit(raw, unit, place);
      raw = following;
    }
    if constexpr (kRotaryV<C>) {
#pragma unroll 1
      for (int i = lane / 8; i < kUnits; i += 4) {
        narrow_rope(s, at, single_place(warp, i), lane % 8, exponent_of(i));
      }
    } else {
      adapt_ropes(at.third());
    }
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
__device__ inline void load_single(const LatentWideParams& params, Shared& s, unsigned warp, unsigned lane) {
  SingleLoader<C> loader{params.attention, s, warp, lane};
  RoundCursor<C> cursor(params, s, 0, warp, lane);
  StepPlace at;
  TokenId id = 0;  // of the step after those that are known
  int left = 0;    // steps that are known, and not yet filled
#pragma unroll 1
  for (int lead = 2; lead > 0 || left > 0;) {
    asm volatile("" : "+r"(loader.lane), "+r"(loader.warp));  // what follows from them takes no registers
    cursor.lane = loader.lane, cursor.warp = loader.warp;
    const bool known = cursor.at_step();
    if (known) cursor.wait_for_step();
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
