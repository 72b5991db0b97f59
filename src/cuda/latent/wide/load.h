// The warpgroup that brings tokens: raw codes by cp.async, then as f16 to the stage that is K of one product
// and V of the other. Rope parts go to their places as they are.
//
// A warp has one group of 128 dims, hence one scale, of all tokens: two columns of the stage. What it copies
// and dequantises at a time is a unit, its dims of four tokens; eight lanes have a token. In a cluster of two
// a block has half of the tokens and copies what it has written to the other block.
#pragma once

#include "cuda/device/cluster.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/wide/walk.h"

namespace halftone::cuda::wide {

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_async_wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <LatentWideConfig C>
struct TokenLoader {
  static constexpr bool kPair = C.blocks == 2;
  static constexpr int kHalves = kTokenHalves<C>;
  static constexpr int kSliceUnits = 4;
  static constexpr int kRopeCopies = 2 * kHalves;            // of a warp, four tokens each
  static constexpr int kNoteWarp = 3;                        // says what a stage's tokens are
  static constexpr float kLargestScale = 128.0f;             // times 448 is within f16
  static constexpr float kSmallestScale = 6.103515625e-05f;  // normal in f16
  const AttentionParams& params;
  Shared& s;
  unsigned thread;
  int rank;

  __device__ int warp() const { return int(thread / 32); }
  __device__ int lane() const { return int(thread % 32); }

  // Slots of the lane's tokens of this step and the next one, any if they are skipped; bits of all lanes'
  // tokens that are not.
  int here[kHalves], next[kHalves];
  std::uint32_t live[kHalves], next_live[kHalves];
  // Of this step and, as far as they are known, of the next one: scales of the warp's group and both halves,
  // f16x2; what the token's scales have lost, base 2, a byte of each half, and two bits that say whether any
  // token's have.
  std::uint32_t scales = 0, exponents = 0, next_scales = 0, next_exponents = 0;

  /// Of a step, the half that the loader's half is.
  __device__ int step_half(int half) const { return kPair ? rank : half; }

  /// Of the token of which lane `lane` has the slot.
  __device__ const std::uint8_t* address_of(int slot, int lane, int offset) const {
    return token_at(params.cache, __shfl_sync(~0u, slot, lane), offset);
  }
  /// Goes on to the step after `next`, of which the lane has these slots, or -1.
  __device__ void shift(const int (&slots)[kHalves]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      here[half] = next[half], live[half] = next_live[half];
      next[half] = max(slots[half], 0);
      next_live[half] = __ballot_sync(~0u, slots[half] >= 0);
    }
  }

  /// Of a half's eight units, in the warp's ring.
  __device__ std::uint32_t raw_place(int unit) const {
    return shared_address(s.raw[warp()]) + unit * kUnitBytes + lane() * 16;
  }
  /// The copies of a unit of the half in whose slots are `slots`, bits `lives`. A token that is skipped
  /// becomes zeros.
  __device__ void request(int unit, int slots, std::uint32_t lives) const {
    copy_async(raw_place(unit), address_of(slots, 4 * unit + lane() / 8, warp() * 128 + lane() % 8 * 16),
               lives >> lane() / 8 & 1u << 4 * unit ? 16 : 0);
  }
  /// Rope parts of `next`, of eight tokens of each half, once there is room.
  __device__ void request_ropes(const StepPlace& at) const {
    barrier_wait(shared_address(&s.rope_empty[at.third()]), at.third_parity() ^ 1);
#pragma unroll
    for (int i = 0; i < kRopeCopies; ++i) {
      const int half = i / 2, from = 8 * warp() + i % 2 * 4 + lane() / 8;
      copy_async(rope_place(at.third(), i),
                 address_of(next[half], from, kRopeOffset + lane() % 8 * 16),
                 next_live[half] >> from & 1 ? 16 : 0);
    }
  }
  __device__ std::uint32_t rope_place(int buffer, int i) const {
    const int row = token_place(step_half(i / 2), 8 * warp() + i % 2 * 4 + lane() / 8);
    return shared_address(s.rope[buffer]) + place_in_column(row, lane() % 8);
  }
  /// Of the next step; of a token that is skipped anything: a branch here would wait for the load.
  __device__ float4 load_scales(int half) const {
    const int slots = kPair || half == 0 ? next[0] : next[kHalves - 1];
    const std::uint32_t lives = kPair || half == 0 ? next_live[0] : next_live[kHalves - 1];
    const std::uint8_t* const token = token_at(params.cache, slots, kScaleOffset);
    const void* const anything = params.schedule.header;
    return __ldg(static_cast<const float4*>(lives >> lane() & 1 ? token : anything));
  }
  /// Scales of the next step as f16. Those that f16 does not hold well lose a power of two, the token's own,
  /// with which the products are multiplied later.
  __device__ void take_scales(int half, float4 x) {
    const std::uint32_t lives = kPair || half == 0 ? next_live[0] : next_live[kHalves - 1];
    if (!(lives >> lane() & 1)) x = {};
    const float4 size = {fabsf(x.x), fabsf(x.y), fabsf(x.z), fabsf(x.w)};
    const auto least_of = [](float y) { return y == 0.0f ? kLargestScale : y; };
    const float most = fmaxf(fmaxf(size.x, size.y), fmaxf(size.z, size.w));
    const float least =
        fminf(fminf(least_of(size.x), least_of(size.y)), fminf(least_of(size.z), least_of(size.w)));
    const bool apart = __any_sync(~0u, !(most <= kLargestScale && least >= kSmallestScale));
    const float own = warp() < 2 ? (warp() == 0 ? x.x : x.y) : (warp() == 2 ? x.z : x.w);
    int exponent = 0;
    if (apart && !(most <= kLargestScale && (least >= kSmallestScale || most == 0.0f))) {
      exponent = max(static_cast<int>(__float_as_uint(most) >> 23) - 127 - 6, -100);
    }
    const float kept = own * power_of_two(-exponent);
    const std::uint32_t two = pack_f16x2(kept, kept);
    next_scales = half == 0 ? two : __byte_perm(next_scales, two, 0x5410);
    const std::uint32_t both = (exponent & 0xff) | (apart ? 1u << 16 : 0u);
    next_exponents = half == 0 ? both : next_exponents | (both & 0xff) << 8 | (both & 1u << 16) << 1;
  }
  static __device__ int exponent_of(std::uint32_t exponents, int half) {
    return static_cast<std::int8_t>(exponents >> 8 * half);
  }
  /// What a stage says of its tokens.
  __device__ void note(int stage, int half) const {
    StepNotes& notes = s.notes[stage];
    std::uint32_t four = exponents >> 8 * half & 0xff;  // of tokens 4 i + 0..3, in lane 4 i
    const bool apart = exponents >> 16 + half & 1;
    if (apart) {
      four |= __shfl_xor_sync(~0u, four, 1) << 8;
      four |= __shfl_xor_sync(~0u, four, 2) << 16;
    }
    const std::uint32_t state = shared_address(&notes.tokens[step_half(half)]);
    const std::uint32_t place = shared_address(&notes.exponent[step_half(half)]) + lane();
    if (lane() == 0) notes.tokens[step_half(half)] = {live[half], apart};
    if (lane() % 4 == 0) *reinterpret_cast<std::uint32_t*>(&notes.exponent[step_half(half)][lane()]) = four;
    if constexpr (kPair) {
      const std::uint32_t full = cluster_address(shared_address(&s.kv_full[stage]), rank ^ 1);
      if (lane() == 0) {
        cluster_store(cluster_address(state, rank ^ 1), uint2{live[half], apart}, full);
      }
      if (lane() % 4 == 0) cluster_store(cluster_address(place, rank ^ 1), four, full);
    }
  }

  __device__ uint4 read_raw(int unit) const {
    uint4 raw;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "r"(raw_place(unit))
                 : "memory");
    return raw;
  }
  static __device__ uint4 dequantise(std::uint32_t a, std::uint32_t b, std::uint32_t scale) {
    return {mul_f16x2(e4m3x2_to_f16x2(a), scale), mul_f16x2(e4m3x2_to_f16x2(a, true), scale),
            mul_f16x2(e4m3x2_to_f16x2(b), scale), mul_f16x2(e4m3x2_to_f16x2(b, true), scale)};
  }
  static __device__ void store(std::uint32_t at, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
  /// `factors`: of byte_perm(), which takes a half's scale twice.
  __device__ void store_unit(const uint4& raw, int unit, std::uint32_t place, std::uint32_t factors) const {
    const std::uint32_t both = __shfl_sync(~0u, scales, 4 * unit + lane() / 8);
    const std::uint32_t factor = kPair ? both : __byte_perm(both, 0, factors);
    const std::uint32_t at = (place ^ unit % 2 * 4 * 16) + unit * (4 * 128);
    store(at, dequantise(raw.x, raw.y, factor));
    store(at + kColumnBytes, dequantise(raw.z, raw.w, factor));
  }
  /// The pair: what the warp has written of its half's slice, or its rope parts, goes to the other block.
  __device__ void pass_on(const void* from, int bytes, int stage) const {
    const std::uint32_t at = shared_address(from);
    cluster_copy(cluster_address(at, rank ^ 1), at, bytes,
                 cluster_address(shared_address(&s.kv_full[stage]), rank ^ 1));
  }
  __device__ void pass_on_slice(int slice, int stage) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pass_on(s.kv[stage][2 * warp() + i] + token_place(rank, 16 * slice) * 128, 16 * 128, stage);
    }
    cluster_copy_commit();
  }
  /// Rope parts where they cannot stay as they are: of f16 queries, and of tokens that lost a power of two.
  /// A lane's are those that it has copied.
  __device__ void adapt_ropes(int buffer) const {
    if (C.q_dtype == DType::kBFloat16 && (exponents >> 16) == 0) return;
#pragma unroll
    for (int i = 0; i < kRopeCopies; ++i) {
      const int from = 8 * warp() + i % 2 * 4 + lane() / 8, own = exponent_of(__shfl_sync(~0u, exponents, from), i / 2);
      // f16 has no room for the power of two: there the products get it back before the rope part is added.
      const float factor = C.q_dtype == DType::kFloat16 ? 1.0f : power_of_two(-own);
      const std::uint32_t at = rope_place(buffer, i);
      uint4 raw;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                   : "r"(at)
                   : "memory");
      const auto adapt = [&](std::uint32_t x) {
        const float a = __uint_as_float(x << 16) * factor, b = __uint_as_float(x & 0xffff0000u) * factor;
        return C.q_dtype == DType::kFloat16 ? pack_f16x2(a, b) : pack_bf16x2(a, b);
      };
      store(at, {adapt(raw.x), adapt(raw.y), adapt(raw.z), adapt(raw.w)});
    }
  }

  /// Begins the first step's copies.
  __device__ void begin(const StepPlace& at) {
#pragma unroll
    for (int unit = 0; unit < kRingUnits; ++unit) {
      request(unit, next[0], next_live[0]);
      if (unit + 1 < kRingUnits) copy_async_commit();
    }
    request_ropes(at);
    copy_async_commit();  // rope parts with the last unit: there are always as many groups behind a unit
#pragma unroll
    for (int half = 0; half < kHalves; ++half) take_scales(half, load_scales(half));
  }
  /// Dequantises a step's tokens, and requests the next ones of this step and of the one after it. `more`:
  /// there is such a step.
  __device__ void fill(const StepPlace& at, bool more) {
    const int stage = at.stage();
    scales = next_scales, exponents = next_exponents;
    std::uint32_t place = shared_address(s.kv[stage][2 * warp()]) + place_in_column(lane() / 8, lane() % 8) +
                          token_place(step_half(0), 0) * 128;
    std::uint32_t empty = shared_address(&s.kv_empty[stage][token_place(step_half(0), 0) / 16]);
    const std::uint32_t parity = at.parity() ^ 1;
    barrier_wait(empty, parity);  // before the stage's notes of its tokens are written, too
    if (warp() == kNoteWarp) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) note(stage, half);
    }
    copy_async_wait_for<kRingUnits - 1>();
    uint4 raw = read_raw(0);
    float4 last_scales;
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      const bool last = half + 1 == kHalves;
      const int slots = last ? next[0] : here[kHalves - 1];
      const std::uint32_t lives = last ? next_live[0] : live[kHalves - 1];
      const std::uint32_t factors = half == 0 ? 0x1010 : 0x3232;
      const float4 raw_scales = load_scales(half);
      if (half > 0) barrier_wait(empty, parity);
#pragma unroll
      for (int unit = 0; unit < kRingUnits; ++unit) {
        request(unit, slots, lives);
        if (unit + 1 < kRingUnits || !last) copy_async_commit();
        if (unit == kSliceUnits) barrier_wait(empty + 8, parity);
        copy_async_wait_for<kRingUnits - 1>();
        const uint4 following = read_raw((unit + 1) % kRingUnits);
        store_unit(raw, unit, place, factors);
        raw = following;
        if (kPair && unit + 1 == kSliceUnits) {
          copy_async_wait_for<kSliceUnits>();  // all of this step
          adapt_ropes(at.third());
          fence_async_shared();
          __syncwarp();
          if (lane() == 0) {
            pass_on(s.rope[at.third()] + token_place(rank, 8 * warp()) * 128, 8 * 128, stage);
            pass_on_slice(0, stage);
          }
        }
      }
      if (!last) take_scales(half, raw_scales);
      last_scales = raw_scales;
      place += kRingUnits * (4 * 128), empty += 2 * 8;
    }
    if constexpr (!kPair) adapt_ropes(at.third());
    fence_async_shared();
    __syncwarp();
    if (lane() == 0) {
      const std::uint32_t full = shared_address(&s.kv_full[stage]);
      if constexpr (kPair) {
        pass_on_slice(1, stage);
        cluster_copy_wait_read<1>();  // P will take the place of rope parts
        // What the same warp of the other block passes on.
        barrier_expect_bytes(full, (kBlockTokens / 2 * 2 + 8) * 128 + (warp() == kNoteWarp ? 8 + 32 : 0));
      } else {
        barrier_arrive(full);
      }
    }
    if (more) request_ropes({at.step + 1});
    copy_async_commit();
    take_scales(kHalves - 1, last_scales);
  }

  /// A step is dequantised, the tokens of the next one are known, those after it asked for.
  __device__ void run() {
    StepCursor<C> cursor{params, s, thread, rank};
    cursor.begin();
    StepPlace at;
    TokenId ids[kHalves] = {};  // of the step after `next`
#pragma unroll 1
    for (int lead = 2; lead >= 0;) {
      thread = thread_index();  // what follows from it takes no registers
      if constexpr (kPair) asm volatile("" : "+r"(rank));
      cursor.thread = thread, cursor.rank = rank;
      int slots[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) slots[half] = cursor.resolve(ids[half], half);
      shift(slots);
      const bool known = cursor.at_step();  // there is a next step
      if (known || lead == 2) cursor.next();
      if (!known && lead == 0) lead = -1;
      cursor.load_ids(ids);
      if (lead == 2) {
        lead = cursor.at_step() ? 1 : -1;
      } else if (lead == 1) {
        lead = 0;
        begin(at);
      } else {
        fill(at, lead >= 0);
        ++at.step;
      }
    }
    copy_async_wait();
  }
};

}  // namespace halftone::cuda::wide
