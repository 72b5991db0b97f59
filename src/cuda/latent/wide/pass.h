// The warps of a pair behind the one that copies (copy.h): raw codes become f16 in the stage that is K of one
// product and V of the other. Each block has half of a step's tokens and passes them on to the other one.
#pragma once

#include "cuda/device/cluster.h"
#include "cuda/latent/wide/codes.h"

namespace halftone::cuda::wide {

/// 8 elements of a rope part where they cannot stay as they are: of f16 queries, and of tokens that lost a
/// power of two. f16 has no room for that: there products get it back before the rope part is added.
template <DType kQuery>
__device__ inline uint4 adapt_rope(const uint4& raw, int exponent) {
  const float factor = kQuery == DType::kFloat16 ? 1.0f : power_of_two(-exponent);
  const auto adapt = [&](std::uint32_t x) {
    const float a = __uint_as_float(x << 16) * factor, b = __uint_as_float(x & 0xffff0000u) * factor;
    return kQuery == DType::kFloat16 ? pack_f16x2(a, b) : pack_bf16x2(a, b);
  };
  return {adapt(raw.x), adapt(raw.y), adapt(raw.z), adapt(raw.w)};
}

/// 8 dims of the rope part of a step's token, from `8 eight` on, become f16 in the stage, as the last dims of
/// the latent do.
__device__ inline void narrow_rope(Shared& s, const StepPlace& at, int token, int eight, int exponent) {
  const float factor = power_of_two(-exponent);
  const auto two = [&](std::uint32_t x) {
    return pack_f16x2(__uint_as_float(x << 16) * factor, __uint_as_float(x & 0xffff0000u) * factor);
  };
  const uint4 raw = load_shared_16_bytes(shared_address(s.rope[at.third()]) + place_in_column(token, eight));
  const int place = (kLatentDims - kRopeDims) / 8 + eight;
  const std::uint32_t group = shared_address(s.kv[at.stage()][token / kGroupTokens]);
  store_shared(
      group + column_of(place) * kGroupColumnBytes + place_in_column(token % kGroupTokens, chunk_of(place)),
      {two(raw.x), two(raw.y), two(raw.z), two(raw.w)});
}

/// From where a round's tokens arrive to the stage, and on to the other block.
template <LatentWideConfig C>
struct Passer {
  using Codes = Sixteen<C.codes>;
  Shared& s;
  int rank;
  unsigned warp, lane;

  __device__ void run() const {
    StepPlace at;
    std::uint32_t parity = 0;  // of the round
#pragma unroll 1
    for (int index = 0; s.queue.has(index); ++index) {
      const int steps = steps_of(s.queue.items[index % unsigned{Queue::kCapacity}].work);
#pragma unroll 1
      for (int left = steps; left > 0; --left, ++at.step) {
        convert_round(at, parity);
        parity ^= 1;
      }
    }
  }

 private:
  static constexpr int kRawStep = Codes::kTokenBytes,
                       kScaleStep = 2 * kTokenScales<C>;  // from token to token

  __device__ void convert_round(const StepPlace& at, std::uint32_t parity) const {
    const std::uint32_t raw = shared_address(s.raw) + lane * Codes::kBytes;
    const std::uint32_t scales = shared_address(scales_of<C>(s)) + lane / (Record<C>::kGroupDims / 16) * 2;
    const std::uint32_t to = shared_address(s.kv[at.stage()]) + lane / 8 * 2 * kGroupColumnBytes;
    bool adapts = false;
    int first = warp;  // of a chunk's tokens the warp's are this one and every third
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int group = kChunks * rank + chunk;
      if (chunk % kSliceChunks == 0) {
        barrier_wait(shared_address(&s.kv_empty[at.stage()][group / kSliceChunks]), at.parity() ^ 1);
      }
      barrier_wait(shared_address(&s.raw_full[chunk]), parity);
      if (chunk == 0 && !kRotaryV<C>) {
        adapts = C.q_dtype == DType::kFloat16 || s.notes[at.third()][rank].apart != 0;
      }
      if (kRotaryV<C> && chunk % kSliceChunks == 0) convert_ropes(at, chunk / kSliceChunks);
      convert_chunk(raw + chunk * (kChunkTokens * kRawStep), scales + chunk * (kChunkTokens * kScaleStep),
                    to + group * kGroupBytes, first, shared_address(&s.raw_empty[chunk]));
      first = first == kPassers - 1 ? 0 : first + 1;
      if (chunk == 0 && adapts) adapt_ropes(at);
      if ((chunk + 1) % kPassChunks == 0) pass_on(at, chunk + 1 - kPassChunks, kPassChunks);
    }
  }
  __device__ void convert_chunk(std::uint32_t raw, std::uint32_t scales, std::uint32_t to, int first,
                                std::uint32_t empty) const {
    static_assert(kChunkTokens == 8 && kPassers == 3);
    const bool three = first < 2;
    Codes codes[3];
    std::uint32_t scale[3], min[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i == 2 && !three) break;
      codes[i] = Codes::load(raw + (first + 3 * i) * kRawStep);
      const std::uint32_t from = scales + (first + 3 * i) * kScaleStep;
      scale[i] = load_shared_16_bits(from);
      min[i] = Record<C>::kBits == 4 ? load_shared_16_bits(from + 2 * Record<C>::kGroups) : 0;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i == 2 && !three) break;
      if (!Codes::has(lane)) break;
      const std::uint32_t at = to + place_in_column(first + 3 * i, lane % 8);
      const std::uint32_t scale_twice = __byte_perm(scale[i], 0, 0x1010);
      const std::uint32_t min_twice = __byte_perm(min[i], 0, 0x1010);
      store_shared(at, codes[i].eight(false, scale_twice, min_twice));
      store_shared(at + kGroupColumnBytes, codes[i].eight(true, scale_twice, min_twice));
    }
  }
  /// Of the round, eight lanes a token: they arrived with its first codes.
  __device__ void adapt_ropes(const StepPlace& at) const {
    const HalfNotes& notes = s.notes[at.third()][rank];
    const std::uint32_t ropes = shared_address(s.rope[at.third()]);
#pragma unroll 1
    for (int i = 4 * warp; i < kRoundTokens; i += 4 * kPassers) {
      const int token = i + lane / 8;
      const std::uint32_t place = ropes + place_in_column(kRoundTokens * rank + token, lane % 8);
      store_shared(place, adapt_rope<C.q_dtype>(load_shared_16_bytes(place), notes.exponent[token]));
    }
  }

  /// Rope parts that are V, too, of a slice of the block's tokens, 8 dims a lane, four tokens a turn.
  __device__ void convert_ropes(const StepPlace& at, int slice) const {
    unsigned lane = this->lane;
    asm volatile("" : "+r"(lane));  // what follows from it takes no registers elsewhere
    const HalfNotes& notes = s.notes[at.third()][rank];
#pragma unroll 1
    for (int turn = (warp + slice) % kPassers; turn < 4; turn += kPassers) {
      // Lanes of two tokens write to other banks than those of the tokens 4 on.
      const int i = slice * 16 + turn / 2 * 8 + turn % 2 * 2 + lane / 16 + lane / 8 % 2 * 4;
      narrow_rope(s, at, kRoundTokens * rank + i, lane % 8, notes.exponent[i]);
    }
  }

  /// Chunks that the block has written go to the other block; with the first ones rope parts and notes.
  __device__ void pass_on(const StepPlace& at, int first, int chunks) const {
    fence_async_shared();
    const int part = first / kPassChunks;  // for which one of the warps waits for the others
    const std::uint32_t converted = shared_address(&s.converted[at.stage()][part]);
    __syncwarp();
    if (lane == 0) barrier_arrive(converted);
    if (warp != kPassers - 1 - part) return;
    barrier_wait(converted, at.parity());
    if (lane != 0) return;
    const std::uint32_t full = shared_address(&s.kv_full[at.stage()]);
    const std::uint32_t other = cluster_address(full, rank ^ 1);
    const auto copy = [&](const void* from, int bytes) {
      const std::uint32_t place = shared_address(from);
      cluster_copy(cluster_address(place, rank ^ 1), place, bytes, other);
    };
    if (first == 0) {
      if (kPassesRopes<C>) copy(s.rope[at.third()] + kRoundTokens * rank * 128, kRoundTokens * 128);
      copy(&s.notes[at.third()][rank], sizeof(HalfNotes));
    }
    copy(s.kv[at.stage()][kChunks * rank + first], chunks * kGroupBytes);
    if (first + chunks < kChunks) return;
    constexpr int kGroupTotal = kGroupBytes + (kPassesRopes<C> ? kGroupColumnBytes : 0);
    barrier_expect_bytes(full, kChunks * kGroupTotal + int(sizeof(HalfNotes)));
  }
};

}  // namespace halftone::cuda::wide
