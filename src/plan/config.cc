#include "plan/config.h"

#include <fmt/format.h>

namespace halftone::planning {
namespace {

constexpr bool is_power_of_two(std::int32_t x) { return x > 0 && (x & (x - 1)) == 0; }

/// Rows in order of rising max_rows, the last one without a limit, then a universal one; steps that the
/// scheduler can shift by.
template <std::size_t N>
constexpr bool is_consistent(const std::array<Config, N>& table) {
  for (std::size_t i = 0; i < N; ++i) {
    const Config& c = table[i];
    if (c.row_block < 1 || c.kv_tile % kTileTokens != 0 || c.split_tokens % c.kv_tile != 0) return false;
    if (!is_power_of_two(c.kv_tile) || !is_power_of_two(c.split_tokens)) return false;
    if (c.kv_tile != table[0].kv_tile || c.split_tokens != table[0].split_tokens) return false;
    if (c.universal) return i > 0 && i + 1 == N;
    if ((c.max_rows == 0) != (i + 1 == N || table[i + 1].universal)) return false;
    if (i > 0 && c.max_rows != 0 && c.max_rows <= table[i - 1].max_rows) return false;
  }
  return true;
}
static_assert(is_consistent(kCpuConfigs) && is_consistent(kCudaConfigs));

}  // namespace

std::span<const Config> configs(Device device) {
  if (device.type == DeviceType::kCpu) return kCpuConfigs;
#ifdef HALFTONE_WITH_CUDA
  return kCudaConfigs;
#else
  return {};
#endif
}

Choice choose_config(const AttentionProblem& problem, Serves* serves) {
  const std::int64_t group = problem.q_heads / problem.kv.kv_heads;
  std::int64_t rows = group * problem.max_q_len;
  std::string count =
      fmt::format("{} packed row{} per request and KV head (max_q_len {} x {} query head{})", rows,
                  rows == 1 ? "" : "s", problem.max_q_len, group, group == 1 ? "" : "s");
  if (problem.device.type == DeviceType::kCuda && problem.policy == SplitPolicy::kBatchInvariant) {
    // Chosen without max_q_len, so that bits do not depend on the longest request of the batch.
    rows = group;
    count = fmt::format("batch_invariant: {} query head{} per KV head", group, group == 1 ? "" : "s");
  }
  const std::span<const Config> table = configs(problem.device);
  Choice choice{-1, {}};
  for (int i = 0; i < static_cast<int>(table.size()); ++i) {
    if (!serves(problem, table[i])) continue;
    choice.index = i;
    if (rows <= table[i].max_rows) break;
  }
  if (choice.index >= 0) {
    const Config& chosen = table[choice.index];
    choice.reason = rows <= chosen.max_rows ? fmt::format("{}, at most {}", count, chosen.max_rows)
                                            : fmt::format("{}, {} at a time", count, chosen.row_block);
    if (chosen.universal) choice.reason += "; no other kernel has these formats, dims and types";
  }
  return choice;
}

}  // namespace halftone::planning
