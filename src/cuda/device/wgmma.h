// What surrounds the products of a warpgroup (wgmma_products.h): descriptors of B, batches, barriers.
#pragma once

#include <cstdint>

#include "cuda/device/ptx.h"
#include "cuda/device/wgmma_products.h"

namespace halftone::cuda {

/// Descriptor of a B matrix at shared address `place`, a multiple of 16, of 16 x kColumns 16-bit elements in
/// 8 x 8 core matrices of 128 bytes, not swizzled: those of neighbouring columns are adjacent, the upper half
/// of k follows.
template <int kColumns>
__device__ inline std::uint64_t b_matrix(std::uint32_t place) {
  constexpr std::uint64_t kAlongK = kColumns / 8 * 128 / 16, kAlongColumns = 128 / 16;
  return kAlongColumns << 32 | kAlongK << 16 | (place & 0x3ffffu) >> 4;
}
/// A value that all lanes have, in a form that lets the compiler know: descriptors live in uniform registers.
__device__ inline std::uint32_t uniform(std::uint32_t x) { return __shfl_sync(~0u, x, 0); }
/// What the descriptor of the next such matrix has more.
template <int kColumns>
inline constexpr std::uint64_t kNextBMatrix = kColumns * 16 * 2 / 16;

/// Descriptor of a matrix whose rows of 128 bytes are swizzled over 8 rows, at shared address `place`.
/// K-major: the rows are of M or N. MN-major: of k, and `chunk_bytes` lie between 64 columns and the next 64.
/// `group_bytes` lie between 8 rows and the next 8.
__device__ inline std::uint64_t swizzled_matrix(std::uint32_t place, int chunk_bytes = 16,
                                                int group_bytes = 1024) {
  constexpr std::uint64_t kSwizzle128 = 1;
  return kSwizzle128 << 62 | std::uint64_t(group_bytes / 16) << 32 | std::uint64_t(chunk_bytes / 16) << 16 |
         (place & 0x3ffffu) >> 4;
}
/// The half of that which depends on the place: a place `n` bytes on has n / 16 more.
__device__ inline std::uint32_t swizzled_word(std::uint32_t place, int chunk_bytes = 16) {
  return static_cast<std::uint32_t>(swizzled_matrix(place, chunk_bytes));
}
__device__ inline std::uint64_t swizzled_matrix_of(std::uint32_t word) {
  constexpr std::uint64_t kRest = 1ull << 62 | std::uint64_t{1024 / 16} << 32;
  return kRest | word;
}

/// Before the first product of a batch: registers written before it may be read by it.
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until all batches but the last kPending are complete.
template <int kPending = 0>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Pins values of a batch: the compiler moves their uses neither into nor out of it.
template <int kCount>
__device__ inline void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ inline void pin(std::uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int kCount>
__device__ inline void pin(std::int32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

/// Loads four 8 x 8 matrices of 16-bit elements as fragments: lane 8 i + r says where row r of matrix i is.
__device__ inline void load_matrices(std::uint32_t address, std::uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
/// Stores four 8 x 8 matrices of 16-bit elements held as fragments, transposed: lane 8 i + r says where
/// column r of matrix i goes, 16 bytes.
__device__ inline void store_transposed(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                        std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// A barrier among the 128 threads of team `team`, apart from the others.
__device__ inline void team_barrier(int team) {
  asm volatile("bar.sync %0, 128;" ::"r"(kTeam + team) : "memory");
}
/// Barrier `place` among `kTeams` of them.
template <int kTeams>
__device__ inline void teams_barrier(int place) {
  asm volatile("bar.sync %0, %1;" ::"r"(kTeam + place), "n"(128 * kTeams) : "memory");
}
/// team_barrier(); true if `value` is, of any thread.
__device__ inline bool team_any(int team, bool value) {
  std::uint32_t any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n bar.red.or.pred q, %2, 128, p;\n selp.u32 %0, 1, 0, "
      "q;\n}"
      : "=r"(any)
      : "r"(static_cast<std::uint32_t>(value)), "r"(kTeam + team)
      : "memory");
  return any != 0;
}

}  // namespace halftone::cuda
