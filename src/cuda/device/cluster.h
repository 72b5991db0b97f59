// A cluster of thread blocks: who one is, and what one block writes and signals in another's shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace halftone::cuda {

/// Of the block in its cluster; 0 without clusters.
__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// All threads of the cluster: what they wrote to shared memory before is visible afterwards.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Where `shared`, an address in this block's shared memory, lies in that of block `rank`.
__device__ inline std::uint32_t cluster_address(std::uint32_t shared, int rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

/// Arrives at a barrier of any block of the cluster (cluster_address()).
__device__ inline void cluster_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Copies `bytes` (a multiple of 16) from `shared`, in this block's shared memory, to another block's; its
/// barrier counts them. What the calling warp wrote there a fence_async_shared() has made visible. That
/// barrier alone tells when the copy ends: what it reads is written again only after word from that block.
__device__ inline void cluster_copy(std::uint32_t address, std::uint32_t shared, int bytes,
                                    std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address),
      "r"(shared), "r"(bytes), "r"(barrier)
      : "memory");
}

/// tensor_load() (tma.h) to the same places of the blocks of which `blocks` has bits; the barrier of each of
/// them counts all bytes.
__device__ inline void tensor_load_to(std::uint16_t blocks, std::uint32_t shared, const CUtensorMap& map,
                                      std::uint32_t barrier, int x, int y, int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "h"(blocks)
      : "memory");
}

}  // namespace halftone::cuda
