// The warpgroup that brings tokens to a cluster of two blocks: raw codes by cp.async, then as f16 to the
// stage that is K of one product and V of the other. Rope parts go to their places as they are. A block has
// half of the tokens and copies what it has written to the other block.
//
// A warp has one group of 128 dims, hence one scale, of all tokens: two columns of the stage. A unit, what it
// copies and dequantises at a time, is its dims of four tokens; eight lanes have a token.
#pragma once

#include "cuda/device/cluster.h"
#include "cuda/latent/wide/walk.h"

namespace halftone::cuda::wide {

template <LatentWideConfig C>
struct PairLoader {
  static constexpr int kAhead = 2;
  static constexpr int kHalf = kBlockTokens / 2;
  static constexpr int kSliceUnits = kRingUnits / 2;
  static constexpr int kNoteWarp = 3;  // says what a stage's tokens are
  const AttentionParams& params;
  Shared& s;
  unsigned thread;
  int rank;

  __device__ int warp() const { return int(thread / 32); }
  __device__ int lane() const { return int(thread % 32); }

  // Slots of the lane's token of the next step and the one after it, -1 if it is skipped. Bits of all lanes'
  // tokens that are not, of this step and the next one.
  int next = -1, after = -1;
  std::uint32_t live = 0, next_live = 0;
  float4 raw_scale{};       // of the next step
  std::uint32_t scale = 0;  // of the warp's group, f16x2
  int exponent = 0;         // what the token's scales have lost, base 2
  bool apart = false;       // whether any token's have

  __device__ void shift(int slot) {
    next = after, after = slot;
    live = next_live;
    next_live = __ballot_sync(~0u, next >= 0);
  }
  /// Of the token of `next` that lane `lane` has.
  __device__ const std::uint8_t* address_of(int lane, int offset) const {
    return token_at(params.cache, max(__shfl_sync(~0u, next, lane), 0), offset);
  }
  /// Brings tokens to L2, the warp's eight of the step after the next one.
  __device__ void prefetch() const {
    constexpr int kLine = 128;
    const int slot = __shfl_sync(~0u, after, 8 * warp() + lane() / 4);
    if (slot < 0) return;
    const std::uint8_t* const token = token_at(params.cache, slot, 0);
    prefetch_to_l2(token + lane() % 4 * kLine);
    if (lane() % 4 < 2) prefetch_to_l2(token + min((lane() % 4 + 4) * kLine, kTokenBytes - 1));
  }

  __device__ std::uint32_t raw_place(int unit) const {
    return shared_address(s.raw[warp()]) + unit * kUnitBytes + lane() * 16;
  }
  /// The copies of a unit of the next step. A token that is skipped becomes zeros.
  __device__ void request(int unit) const {
    copy_async(raw_place(unit), address_of(4 * unit + lane() / 8, warp() * 128 + lane() % 8 * 16),
               next_live >> lane() / 8 & 1u << 4 * unit ? 16 : 0);
  }
  /// Rope parts of eight tokens of the next step, once there is room.
  __device__ void request_ropes(const StepPlace& at) const {
    barrier_wait(shared_address(&s.rope_empty[at.third()]), at.third_parity() ^ 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = 8 * warp() + 4 * i + lane() / 8;
      copy_async(rope_place(at.third(), i), address_of(from, kRopeOffset + lane() % 8 * 16),
                 next_live >> from & 1 ? 16 : 0);
    }
  }
  __device__ std::uint32_t rope_place(int buffer, int i) const {
    const int row = pair_place(rank, 8 * warp() + 4 * i + lane() / 8);
    return shared_address(s.rope[buffer]) + place_in_column(row, lane() % 8);
  }
  /// Of the next step; of a token that is skipped anything: a branch here would wait for the load.
  __device__ void request_scales() {
    const std::uint8_t* const token = token_at(params.cache, max(next, 0), kScaleOffset);
    const void* const anything = params.schedule.header;
    raw_scale = __ldg(static_cast<const float4*>(next >= 0 ? token : anything));
  }

  /// Scales of the next step as f16. Those that f16 does not hold well lose a power of two, the token's own,
  /// with which the products are multiplied later.
  __device__ void take_scales() {
    if (next < 0) raw_scale = {};
    const float4 x = raw_scale, size = {fabsf(x.x), fabsf(x.y), fabsf(x.z), fabsf(x.w)};
    const auto least_of = [](float y) { return y == 0.0f ? Dequantiser::kLargestScale : y; };
    const float most = fmaxf(fmaxf(size.x, size.y), fmaxf(size.z, size.w));
    const float least =
        fminf(fminf(least_of(size.x), least_of(size.y)), fminf(least_of(size.z), least_of(size.w)));
    exponent = Dequantiser::exponent_of(most, least);
    apart = __any_sync(~0u, exponent != 0);
    const float own = warp() < 2 ? (warp() == 0 ? x.x : x.y) : (warp() == 2 ? x.z : x.w);
    const float kept = own * power_of_two(-exponent);
    scale = pack_f16x2(kept, kept);
  }
  /// What the stage says of the tokens, in both blocks.
  __device__ void note(int stage) const {
    StepNotes& notes = s.notes[stage];
    std::uint32_t four = exponent & 0xff;  // of tokens 4 i + 0..3, in lane 4 i
    if (apart) {
      four |= __shfl_xor_sync(~0u, four, 1) << 8;
      four |= __shfl_xor_sync(~0u, four, 2) << 16;
    }
    const std::uint32_t full = cluster_address(shared_address(&s.kv_full[stage]), rank ^ 1);
    const auto both = [&](std::uint32_t& own, std::uint32_t x) {
      own = x;
      cluster_store(cluster_address(shared_address(&own), rank ^ 1), x, full);
    };
    if (lane() == 0) both(notes.live[rank], live);
    if (lane() == 1) both(notes.apart[rank], apart);
    if (lane() % 4 == 0) {
      both(*reinterpret_cast<std::uint32_t*>(notes.exponent + pair_place(rank, lane())), four);
    }
  }

  __device__ void store_unit(const uint4& raw, int unit, std::uint32_t place) const {
    const std::uint32_t factor = __shfl_sync(~0u, scale, 4 * unit + lane() / 8);
    const std::uint32_t at = (place ^ unit % 2 * 4 * 16) + unit * (4 * 128);
    store_shared(at, Dequantiser::codes(raw.x, raw.y, factor));
    store_shared(at + kColumnBytes, Dequantiser::codes(raw.z, raw.w, factor));
  }
  /// What the warp has written goes to the other block.
  __device__ void pass_on(const void* from, int bytes, int stage) const {
    const std::uint32_t at = shared_address(from);
    cluster_copy(cluster_address(at, rank ^ 1), at, bytes,
                 cluster_address(shared_address(&s.kv_full[stage]), rank ^ 1));
  }
  __device__ void pass_on_slice(int slice, int stage) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pass_on(s.kv[stage][2 * warp() + i] + pair_place(rank, 16 * slice) * 128, 16 * 128, stage);
    }
    cluster_copy_commit();
  }
  /// A lane's rope parts are those that it has copied.
  __device__ void adapt_ropes(int buffer) const {
    if (C.q_dtype == DType::kBFloat16 && !apart) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = __shfl_sync(~0u, exponent, 8 * warp() + 4 * i + lane() / 8);
      const std::uint32_t at = rope_place(buffer, i);
      store_shared(at, Dequantiser::rope<C.q_dtype>(load_shared(at), own));
    }
  }

  /// Begins the first step's copies.
  __device__ void begin(const StepPlace& at) {
    prefetch();
#pragma unroll
    for (int unit = 0; unit < kRingUnits; ++unit) {
      request(unit);
      if (unit + 1 < kRingUnits) copy_async_commit();
    }
    request_scales();
    request_ropes(at);
    copy_async_commit();  // rope parts with the last unit: there are always as many groups behind a unit
    take_scales();
  }
  /// Dequantises a step's tokens, and requests those of the next one. `more`: there is one.
  __device__ void fill(const StepPlace& at, bool more) {
    const int stage = at.stage();
    prefetch();
    const std::uint32_t place = shared_address(s.kv[stage][2 * warp()]) + pair_place(rank, 0) * 128 +
                                place_in_column(lane() / 8, lane() % 8);
    const std::uint32_t empty = shared_address(&s.kv_empty[stage][2 * rank]), parity = at.parity() ^ 1;
    barrier_wait(empty, parity);  // before the stage's notes of its tokens are written, too
    if (warp() == kNoteWarp) note(stage);
    request_scales();
    copy_async_wait_for<kRingUnits - 1>();
    uint4 raw = load_shared(raw_place(0));
#pragma unroll
    for (int unit = 0; unit < kRingUnits; ++unit) {
      request(unit);
      if (unit + 1 < kRingUnits) copy_async_commit();
      if (unit == kSliceUnits) barrier_wait(empty + 8, parity);
      uint4 following{};
      if (unit + 1 < kRingUnits) {
        copy_async_wait_for<kRingUnits - 1>();
        following = load_shared(raw_place(unit + 1));
      }
      store_unit(raw, unit, place);
      raw = following;
      if (unit + 1 == kSliceUnits) {
        copy_async_wait_for<kSliceUnits>();  // all of this step
        adapt_ropes(at.third());
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) {
          pass_on(s.rope[at.third()] + pair_place(rank, 8 * warp()) * 128, 8 * 128, stage);
          pass_on_slice(0, stage);
        }
      }
    }
    fence_async_shared();
    __syncwarp();
    if (lane() == 0) {
      pass_on_slice(1, stage);
      cluster_copy_wait_read<1>();  // P will take the place of rope parts
      // What the same warp of the other block passes on.
      const int notes = warp() == kNoteWarp ? 4 + 4 + kHalf : 0;
      barrier_expect_bytes(shared_address(&s.kv_full[stage]), (2 * kHalf + 8) * 128 + notes);
    }
    if (more) request_ropes({at.step + 1});
    copy_async_commit();
    take_scales();
  }
};

}  // namespace halftone::cuda::wide
