// What follows from a row of the table: threads, registers, shared memory.
#pragma once

#include "cuda/attention/items.h"
#include "cuda/device/ring.h"
#include "cuda/prefill/config.h"

namespace halftone::cuda {

template <PrefillConfig C>
struct PrefillTraits {
  static constexpr int kDim = C.head_dim;
  static constexpr int kRows = rows_of(C);
  static constexpr int kChunks = kDim / 64;  // of 64 dims: a row of 128 bytes, swizzled over 8 rows
  static constexpr int kComputeWarps = 4 * C.warpgroups;
  static constexpr int kThreads = 32 * kComputeWarps + 128;
  static constexpr int kQueryWarps = 2;
  // All of what a block gets: 128 registers for each of 512 threads, or 168 for each of 384.
  static constexpr int kOtherRegisters = C.warpgroups == 3 ? 32 : 40;
  static constexpr int kComputeRegisters = C.warpgroups == 3 ? 160 : 232;
  static constexpr int kTileBytes = C.kv_tile * kDim * 2;
  static constexpr int kQueryBytes = 64 * kDim * 2;  // of a warpgroup
  static constexpr int kItems = 4;

  struct Shared {
    alignas(1024) std::uint8_t q[C.warpgroups][kQueryBytes];  // [chunk][row][64]
    alignas(1024) std::uint8_t k[C.stages][kTileBytes];       // [chunk][token][64]
    alignas(1024) std::uint8_t v[C.stages][kTileBytes];
    DeviceItem items[kItems];  // row_end < 0: no more
    alignas(8) std::uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
    std::uint64_t q_full[C.warpgroups], q_empty[C.warpgroups];
    std::uint64_t item_full[kItems], item_empty[kItems];
    std::uint32_t live[C.stages];  // bit i: tile i of 16 tokens is there
    // What need not be kept in registers, which are dear: of a warp the tokens before and from which tiles
    // need a mask, and its item; of the packed rows what few tiles ask for.
    struct WarpState {
      int unmasked_from, unmasked_to, item;
    } warp_state[kComputeWarps];
    int position[kRows];
    float slope[kRows];    // ALiBi, base 2
    float rescale[kRows];  // of O and the sum, when an offset is raised
  };
  static constexpr int kMaxShared = 227 * 1024;
  static_assert(sizeof(Shared) <= kMaxShared);
};

/// Roles of the warps behind the compute warps.
enum PrefillRole : int { kLoadKeys, kTakeItems, kLoadQueries };

}  // namespace halftone::cuda
