#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "plan/backend.h"
#include "plan/listed.h"

namespace halftone::planning {
namespace {

/// Whether the kernel reads keys that run() has staged.
bool stages(const Backend& backend, const AttentionProblem& problem, const Kernel& kernel) {
  return backend.staged_key != nullptr && backend.staged_key(problem, kernel).bytes != 0;
}

/// The smallest unit that holds `rows` packed rows, else the largest one, or, `by_bounds`, one of the fewest
/// that do; `in_place`: among kernels that stage nothing, if there are any, be it the universal one. Index -1
/// if no row serves the problem.
Choice choose_kernel(const Backend& backend, const AttentionProblem& problem, std::int64_t rows,
                     bool by_bounds, bool in_place = false) {
  Choice choice;
  choice.index = choice.variant = -1;
  const auto misplaced = [&](int i) { return in_place && stages(backend, problem, backend.kernels[i]); };
  for (int i = 0; i < static_cast<int>(backend.kernels.size()); ++i) {
    const bool found = choice.index >= 0;
    if (found && backend.kernels[i].universal && !misplaced(choice.index))
      continue;  // for what no other serves
    const int variant = backend.variant(problem, backend.kernels[i]);
    if (variant < 0 || (found && misplaced(i))) continue;
    choice.index = i;
    choice.variant = variant;
    if (rows <= backend.kernels[i].max_rows) break;
  }
  if (choice.index < 0) return choice;
  // In several units: the smallest of which there are no more, since fewer rows of the last one are padding.
  const auto units = [&](const Kernel& kernel) {
    return rows / kernel.row_block + (rows % kernel.row_block > 0 ? 1 : 0);
  };
  const Kernel& largest = backend.kernels[choice.index];
  if (!by_bounds || largest.universal || largest.max_rows == 0 || rows <= largest.max_rows) return choice;
  for (int i = 0; i < choice.index; ++i) {
    if (units(backend.kernels[i]) > units(largest)) continue;
    const int variant = backend.variant(problem, backend.kernels[i]);
    if (variant < 0) continue;
    choice.index = i;
    choice.variant = variant;
    break;
  }
  return choice;
}

/// Whether the kernel stages the keys of prompts, of which fewer are stated than of all requests. Alone it
/// would have to find room for the keys of single queries, too.
bool stages_prompts(const Backend& backend, const AttentionProblem& problem, const Kernel& kernel) {
  if (!stages(backend, problem, kernel)) return false;
  return problem.max_prompt_kv != 0 && problem.max_prompt_kv < most_keys(problem);
}

std::string query_heads(std::int64_t group) {
  return fmt::format("{} query head{}", group, group == 1 ? "" : "s");
}

/// `count` packed rows and how a unit of the kernel holds them.
std::string fit(const std::string& count, std::int64_t rows, const Kernel& kernel) {
  std::string text = rows <= kernel.max_rows ? fmt::format("{}, at most {}", count, kernel.max_rows)
                                             : fmt::format("{}, {} at a time", count, kernel.row_block);
  if (kernel.universal) text += "; no other kernel reads these formats, dims and types in place";
  return text;
}

}  // namespace

std::vector<Choice> choose_kernels(const Backend& backend, const AttentionProblem& problem) {
  const std::int64_t group = problem.q_heads / problem.kv_heads(),
                     queries = scheduled_bounds(problem).max_q_len;
  const std::int64_t rows = group * queries;
  // Then bits depend on the kernel, which a request must have whatever the others' lengths and bounds are.
  const bool by_request = !backend.rows_share_bits && problem.policy == SplitPolicy::kBatchInvariant;
  Choice few = choose_kernel(backend, problem, group, false, !problem.is_listed());
  Choice many = choose_kernel(backend, problem, rows, !by_request);
  if (many.index < 0) return {};
  const Kernel &few_rows = backend.kernels[few.index], &many_rows = backend.kernels[many.index];
  // A cache is not staged for a token, whose rows may be several units instead; of the universal kernel, to
  // which several cost more than staging, only where bounds must not decide.
  const bool in_units = group > few_rows.max_rows && few.index != many.index &&
                        stages(backend, problem, many_rows) && (by_request || !few_rows.universal);
  const std::int64_t few_most = in_units ? group : few_rows.max_rows;
  const std::string plural = rows == 1 ? "" : "s";
  const std::string bound =
      problem.is_listed()
          ? fmt::format("{} packed row{} per query and KV head ({})", rows, plural, query_heads(group))
          : fmt::format("{} packed row{} per request and KV head (max_q_len {} x {})", rows, plural, queries,
                        query_heads(group));
  if (by_request && rows <= few_most) {
    few.reason = fit(fmt::format("batch_invariant: {} per KV head", query_heads(group)), group, few_rows);
    return {std::move(few)};
  }
  const bool few_holds_one = group <= few_most;
  const bool all_are_few = rows <= few_most;
  const bool one_serves_all = all_are_few || rows <= many_rows.max_rows || !few_holds_one;
  if (few.index == many.index || (!by_request && one_serves_all)) {
    Choice& choice = all_are_few && !few_rows.universal ? few : many;
    choice.reason = fit(bound, rows, backend.kernels[choice.index]);
    return {std::move(choice)};
  }
  // Lists have returned above: their queries are scheduled one by one, which takes one kernel.
  const bool expects_none = !by_request && group * problem.min_q_len > few_most;
  if (expects_none && !stages_prompts(backend, problem, many_rows)) {
    many.reason = fmt::format("{}; none of at most {} is expected (min_q_len {})",
                              fit(bound, rows, many_rows), few_most, problem.min_q_len);
    return {std::move(many)};
  }
  if (by_request) many = choose_kernel(backend, problem, INT64_MAX, false);
  few.max_rows = static_cast<std::int32_t>(few_most);
  few.reason = fmt::format("requests of at most {} packed rows per KV head (queries x {})", few.max_rows,
                           query_heads(group));
  if (expects_none) {
    few.reason += fmt::format("; none is expected (min_q_len {}), but max_prompt_kv counts prompts alone",
                              problem.min_q_len);
  }
  many.min_rows = few.max_rows + 1;
  many.reason =
      fit(fmt::format("the other requests, of up to {}", bound), INT64_MAX, backend.kernels[many.index]);
  return {std::move(few), std::move(many)};
}

}  // namespace halftone::planning
