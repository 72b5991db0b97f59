// Tensor copies: boxes of a tensor that a map describes, from global to shared memory, with bounds and
// swizzle.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace halftone::cuda {

/// Brings a map to where copies find it soon.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Copies the box at these coordinates, innermost first; the barrier counts its bytes, also of what lies
/// outside the tensor, which becomes zeros.
__device__ inline void tensor_load(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int x,
                                   int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void tensor_load(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int x,
                                   int y, int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6, %7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

/// The same, if `wanted`: without a branch, behind which the compiler no longer takes values of all lanes for
/// uniform ones.
__device__ inline void tensor_load_if(bool wanted, std::uint32_t shared, const CUtensorMap& map,
                                      std::uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"
      " @p cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];\n}" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(static_cast<int>(wanted))
      : "memory");
}

/// Copies a box from shared memory; what lies outside the tensor is not written. Complete, as far as shared
/// memory is concerned, after tensor_store_commit() and tensor_store_wait() of the same thread.
__device__ inline void tensor_store(const CUtensorMap& map, std::uint32_t shared, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void tensor_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void tensor_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace halftone::cuda
