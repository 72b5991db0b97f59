// Listed keys as the scheduler sees them: each query is a request of its own with one query, whose keys are
// the places of its lists. Places [0, first) are the first list's, those from the next multiple of
// kListTokens on the second one's; the places between are dead.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "halftone/attention.h"

namespace halftone::planning {

inline constexpr int kMaxListed = 65536;  ///< places of a list

/// No tile of so many keys has keys of both caches.
inline constexpr std::int32_t kListTokens = 64;

/// Where the second list begins behind `first` places.
HT_HOST_DEVICE constexpr std::int32_t second_list_begin(std::int32_t first) {
  return (first + kListTokens - 1) / kListTokens * kListTokens;
}

/// Places of a query whose lists have so many.
HT_HOST_DEVICE constexpr std::int32_t listed_length(std::int32_t first, std::int32_t second) {
  return second == 0 ? first : second_list_begin(first) + second;
}

/// The bounds of what is scheduled: requests or, with lists, queries.
struct ScheduledBounds {
  std::int64_t batch;
  std::int32_t max_q_len;
  std::int32_t max_kv_len;
};
constexpr ScheduledBounds scheduled_bounds(const AttentionProblem& p) {
  if (!p.is_listed()) return {p.batch, p.max_q_len, p.max_kv_len};
  return {std::int64_t{p.batch} * p.max_q_len, 1, listed_length(p.listed.top_k, p.listed.extra_top_k)};
}

}  // namespace halftone::planning
