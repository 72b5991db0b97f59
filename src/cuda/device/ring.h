// A ring of stages in shared memory between who fills it and who reads it: each stage has a barrier that says
// it is full and one that says it is empty.
#pragma once

#include <cstdint>

namespace halftone::cuda {

/// A place in a ring of kStages, for either side.
template <int kStages>
struct RingPlace {
  int stage = 0;
  std::uint32_t parity = 0;  // of the phase that ends when the stage is full

  /// The place of what comes `index`-th, from 0: for who counts that anyway.
  static __device__ RingPlace of(std::uint32_t index) {
    return {static_cast<int>(index % kStages), index / kStages % 2};
  }
  /// Of the phase that ends when it is empty again. A fresh barrier has passed it: the first round finds all
  /// stages empty.
  __device__ std::uint32_t empty_parity() const { return parity ^ 1; }
  __device__ int previous() const { return stage == 0 ? kStages - 1 : stage - 1; }
  __device__ void advance() {
    stage += 1;
    if (stage == kStages) stage = 0, parity ^= 1;
  }
};

/// The same in one register, for kernels that are short of them.
template <int kStages>
struct PackedRingPlace {
  static constexpr std::uint32_t kParity = 1u << 31, kLast = kStages - 1;
  std::uint32_t place = 0;  // the stage and, above, the parity

  __device__ std::uint32_t parity() const { return place >> 31; }
  __device__ int stage() const { return static_cast<int>(place & ~kParity); }
  __device__ PackedRingPlace previous() const {
    return {stage() == 0 ? place + (kParity + kLast) : place - 1};
  }
  __device__ void advance() { place = stage() == kLast ? place + (kParity - kLast) : place + 1; }
};

}  // namespace halftone::cuda
