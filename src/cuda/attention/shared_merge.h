// Who merges the parts of a cut unit.
#pragma once

#include <cstdint>

#include "cuda/device/ptx.h"

namespace halftone::cuda {

/// The parts of a cut unit share its rows, in pieces, and each merges some: who comes too early and has other
/// work leaves its pieces to the last one to arrive. Nobody must wait for that to be correct, so it does not
/// matter which CTAs run at the same time.
///
/// A unit's first counter has the number of parts that are there in its low half and, in its high half, a bit
/// for each that left its pieces. The second one counts who is done: the last one clears both.
struct SharedMerge {
  static constexpr int kOwners = 16;
  static constexpr long long kPatience = 1 << 16;  // clocks

  /// How many of the parts own pieces: the first ones.
  static __device__ int owners(int parts) { return parts < kOwners ? parts : kOwners; }
  /// The first piece of an owner; the next one's is where its own end.
  static __device__ int first_piece(int pieces, int owner, int owners) { return pieces * owner / owners; }

  /// Bits of the owners whose pieces this part merges. By one thread, after the part's stores. `patient()`:
  /// whether there is no other work, asked when the part has been counted.
  template <class Function>
  static __device__ std::uint32_t arrive(std::int32_t* counters, int part, int parts,
                                         const Function& patient) {
    const std::uint32_t own = part < kOwners ? 1u << part : 0u;
    const auto here = static_cast<std::uint32_t>(count_arrival(counters));
    if (static_cast<int>(here & 0xffff) == parts - 1) return own | here >> 16;
    if (own == 0) return 0;
    if (patient()) {
      const long long begin = clock64();
      do {
        if ((read_arrivals(counters) & 0xffff) == parts) return own;
      } while (clock64() - begin < kPatience);
    }
    return (add_arrivals(counters, static_cast<int>(own << 16)) & 0xffff) == parts ? own : 0;
  }
  static __device__ void leave(std::int32_t* counters, int parts) {
    if (atomicAdd(counters + 1, 1) == parts - 1) counters[0] = counters[1] = 0;
  }
};

}  // namespace halftone::cuda
