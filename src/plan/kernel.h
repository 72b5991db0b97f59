// A row of a backend's table of attention kernels, and how one is chosen.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halftone/attention.h"

namespace halftone::planning {

struct Backend;

/// What one worker takes at a time.
struct Kernel {
  std::string_view name;
  std::int32_t max_rows;      ///< chosen when a request has at most this many packed rows; 0: any number
  std::int32_t row_block;     ///< packed rows of a unit
  std::int32_t kv_tile;       ///< tokens: one step of the softmax and the granularity of splits
  std::int32_t split_tokens;  ///< batch_invariant: distance of the split boundaries
  std::int32_t unit_bytes;    ///< cache that a worker could read in the time that beginning a unit takes it
  std::string_view use;       ///< what it is made for
  bool universal = false;     ///< for what no other row serves, or none without staging
  /// 0: workers share a line of units (plan/work.h). Else units wait in a queue (plan/queue.h), of as many
  /// heads at a time as have so many bytes of K and V, or with a mask of more.
  std::int64_t queue_bytes = 0;
  bool latent = false;        ///< made for latent caches, which no other row serves
  std::int32_t together = 1;  ///< of the plan's workers that share each unit: to the schedule they are one
};

namespace detail {

constexpr bool is_consistent_part(std::span<const Kernel> table) {
  const auto power_of_two = [](std::int32_t x) { return x > 0 && (x & (x - 1)) == 0; };
  for (std::size_t i = 0; i < table.size(); ++i) {
    const Kernel& c = table[i];
    if (c.row_block < 1 || c.kv_tile % kTileTokens != 0 || c.split_tokens % c.kv_tile != 0) return false;
    if (!power_of_two(c.kv_tile) || !power_of_two(c.split_tokens)) return false;
    if (c.kv_tile != table[0].kv_tile || c.split_tokens != table[0].split_tokens) return false;
    if (c.universal) return i > 0 && i + 1 == table.size();
    const bool last = i + 1 == table.size() || table[i + 1].universal;
    if (last && c.max_rows != 0) return false;
    if (i > 0 && table[i - 1].max_rows == 0 && c.max_rows != 0) return false;
    if (i > 0 && c.max_rows != 0 && c.max_rows <= table[i - 1].max_rows) return false;
    if (c.together < 1 || (c.together > 1 && c.queue_bytes > 0)) return false;
  }
  return !table.empty();
}

}  // namespace detail

/// Whether a table has rows in order of rising max_rows, the last ones, of which a problem has one at most,
/// without a limit, then possibly a universal one, with steps that the scheduler can shift by. Rows for
/// latent caches, if there are any, come first and are so among themselves.
constexpr bool is_consistent(std::span<const Kernel> table) {
  std::size_t latent = 0;
  while (latent < table.size() && table[latent].latent) ++latent;
  for (const Kernel& kernel : table.subspan(latent)) {
    if (kernel.latent) return false;
  }
  if (latent > 0 && !detail::is_consistent_part(table.first(latent))) return false;
  return detail::is_consistent_part(table.subspan(latent));
}

/// A row of a backend's table, the requests that it is chosen for, and the reason, for people.
struct Choice {
  int index = 0;
  int variant = 0;            ///< what Backend::variant says of it
  std::int32_t min_rows = 0;  ///< packed rows of its requests
  std::int32_t max_rows = INT32_MAX;
  std::string reason;
};

/// The kernels of a plan, those of few rows first; none if the backend has no row for the problem. Depends
/// only on shapes and bounds of an already validated problem.
/// One kernel, the smallest unit that holds the packed rows of every request, if there is one. Else two: the
/// smallest unit that holds one query for the requests that fit into it, or several of the largest if only a
/// kernel that stages keys holds one, and for the others one of the fewest units that hold them, or,
/// batch-invariant, the largest; without the first one, in whose place the second serves every request, if
/// none that fits into it is expected (min_q_len).
/// Where rows do not share bits, a batch-invariant problem always has these two, so that max_q_len and
/// min_q_len decide nothing, and only the first of them if no request can need the second.
std::vector<Choice> choose_kernels(const Backend& backend, const AttentionProblem& problem);

}  // namespace halftone::planning
