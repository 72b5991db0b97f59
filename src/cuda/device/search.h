// Searches by a whole warp.
#pragma once

#include <cstdint>

namespace halftone::cuda {

/// The last of `count` numbers, which do not fall, that is not above `at`, or 0. A step divides what is left
/// by 32; of numbers that do fall it is some one of them.
template <class At>
__device__ inline std::int32_t last_begun(const std::int32_t* begins, std::int32_t count, At at) {
  const int lane = threadIdx.x % 32;
  std::int32_t low = 0, high = count;
  while (high - low > 1) {
    const std::int32_t step = (high - low - 1) / 32 + 1;
    const std::int64_t probe = low + std::int64_t{step} * lane;
    const unsigned begun = __ballot_sync(~0u, probe < high && begins[probe] <= at);
    low +=
        (__popc(begun | 1U) - 1) * step;  // the begun ones come first; low counts as one, even if it is not
    high = min(high, low + step);
  }
  return low;
}

}  // namespace halftone::cuda
