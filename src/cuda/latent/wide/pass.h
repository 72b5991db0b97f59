// The warps of a pair behind the one that copies (copy.h): raw codes become f16 in the stage that is K of one
// product and V of the other. Each block has half of a step's tokens and passes them on to the other one.
#pragma once

#include "cuda/device/cluster.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/wide/traits.h"

namespace halftone::cuda::wide {

__device__ inline uint4 load_shared(std::uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
__device__ inline std::uint32_t load_shared_16(std::uint32_t at) {
  std::uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
  return x;
}
__device__ inline void store_shared(std::uint32_t at, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

/// Eight codes, with a scale twice.
__device__ inline uint4 dequantise(std::uint32_t a, std::uint32_t b, std::uint32_t scale) {
  return {mul_f16x2(e4m3x2_to_f16x2(a), scale), mul_f16x2(e4m3x2_to_f16x2(a, true), scale),
          mul_f16x2(e4m3x2_to_f16x2(b), scale), mul_f16x2(e4m3x2_to_f16x2(b, true), scale)};
}
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

/// From where a round's tokens arrive to the stage, and on to the other block.
template <LatentWideConfig C>
struct Passer {
  Shared& s;
  int rank, warp, lane;

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
  __device__ void convert_round(const StepPlace& at, std::uint32_t parity) const {
    const std::uint32_t raw = shared_address(s.raw) + lane * 16;
    const std::uint32_t scales = shared_address(s.scales) + lane / 8 * 2;
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
      if (chunk == 0) adapts = C.q_dtype == DType::kFloat16 || s.notes[at.third()][rank].apart != 0;
      convert_chunk(raw + chunk * (kChunkTokens * kLatentDims), scales + chunk * (kChunkTokens * 8),
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
    uint4 codes[3];
    std::uint32_t scale[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i == 2 && !three) break;
      codes[i] = load_shared(raw + (first + 3 * i) * kLatentDims);
      scale[i] = load_shared_16(scales + (first + 3 * i) * 8);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i == 2 && !three) break;
      const std::uint32_t at = to + place_in_column(first + 3 * i, lane % 8);
      const std::uint32_t both = __byte_perm(scale[i], 0, 0x1010);
      store_shared(at, dequantise(codes[i].x, codes[i].y, both));
      store_shared(at + kGroupColumnBytes, dequantise(codes[i].z, codes[i].w, both));
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
      store_shared(place, adapt_rope<C.q_dtype>(load_shared(place), notes.exponent[token]));
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
      copy(s.rope[at.third()] + kRoundTokens * rank * 128, kRoundTokens * 128);
      copy(&s.notes[at.third()][rank], sizeof(HalfNotes));
    }
    copy(s.kv[at.stage()][kChunks * rank + first], chunks * kGroupBytes);
    if (first + chunks < kChunks) return;
    barrier_expect_bytes(full, kChunks * (kGroupBytes + kGroupColumnBytes) + int(sizeof(HalfNotes)));
  }
};

}  // namespace halftone::cuda::wide
