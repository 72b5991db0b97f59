// Parts of cut units: a warpgroup leaves what it has of one in a slot of the workspace, and all who have a
// part of these rows share their merge.
#pragma once

#include "cuda/attention/shared_merge.h"
#include "cuda/attention/states.h"
#include "cuda/prefill/compute.h"

namespace halftone::cuda {

/// A part's rows of a warpgroup, or of those that share them.
template <PrefillConfig C>
struct UnitParts {
  using Traits = PrefillTraits<C>;
  static constexpr int kDims = Consumer<C>::kValueDim;
  Consumer<C>& c;
  const DeviceItem& item;
  int index;  // of the item

  const Slots<C.value_dim> slots{c.p};

  __device__ void store() const {
    const int slot = item.work.partial;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = c.first_row() + 8 * r;
      float* const to = slots.values(slot, row) + c.share() * kDims + c.lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < kDims / 8; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = {c.o[4 * j + 2 * r], c.o[4 * j + 2 * r + 1]};
      }
      if (c.lane() % 4 != 0 || c.share() != 0) continue;
      *slots.state(slot, row) = {c.softmax.empty(r) ? kMinus : c.softmax.offset[r], c.softmax.sum[r]};
    }
  }
  /// Bits of the owners whose rows are to be merged here, when the part is stored.
  __device__ std::uint32_t arrive() const {
    std::uint32_t& merges = c.s.merges[c.rows_index()];
    shared_rows_barrier(c);
    if (c.thread % (128 * C.shares) == 0) {
      static_assert(2 * Traits::kRowGroups <= kArrivalCounters);
      std::int32_t* const counters =
          c.p.arrivals + std::int64_t{item.first_slot} * kArrivalCounters + 2 * c.rows_index();
      merges = SharedMerge::arrive(counters, item.work.partial - item.first_slot, item.parts, [&] {
        return ItemReader<C>{c.s, index + 1}.next() == nullptr;
      });
      SharedMerge::leave(counters, item.parts);
    }
    shared_rows_barrier(c);
    __threadfence();
    return merges;
  }
};

}  // namespace halftone::cuda
