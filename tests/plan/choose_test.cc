// Which kernels a plan has, and which requests each of them serves.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "halftone/attention.h"
#include "plan/backend.h"
#include "plan/plan.h"
#include "tests/plan/decode_problem.h"

namespace halftone {
namespace {

/// The names of a plan's kernels, and where the first one ends.
struct Kernels {
  std::vector<std::string> names;
  int few_rows = 0;
  friend bool operator==(const Kernels&, const Kernels&) = default;
};

TEST(Passes, LongAndShortRequestsHavePassesOfTheirOwn) {
  const auto kernels = [](int group, int q_len, SplitPolicy policy, int min_q_len = 1) {
    AttentionProblem p = decode_problem();
    p.q_heads = p.kv_heads() * group;
    p.max_q_len = q_len;
    p.min_q_len = min_q_len;
    p.policy = policy;
    const PlanInfo info = plan(p).info();
    Kernels found{{}, info.passes.front().max_rows};
    for (const PassInfo& pass : info.passes) found.names.push_back(pass.config);
    EXPECT_EQ(info.config, info.passes.back().config);
    EXPECT_EQ(info.passes.back().max_rows, group * q_len);
    EXPECT_EQ(info.passes.front().min_rows, 1);
    if (info.passes.size() > 1) {
      EXPECT_EQ(info.passes[1].min_rows, found.few_rows + 1);
    }
    return found;
  };
  // Rows share their bits on the CPU: the policy is no matter.
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    EXPECT_EQ(kernels(4, 1, policy), (Kernels{{"cpu-decode"}, 4}));
    EXPECT_EQ(kernels(4, 16, policy), (Kernels{{"cpu-speculative"}, 64}));
    EXPECT_EQ(kernels(4, 17, policy), (Kernels{{"cpu-decode", "cpu-chunk"}, 16}));
    EXPECT_EQ(kernels(17, 4, policy), (Kernels{{"cpu-speculative", "cpu-chunk"}, 64}));
    EXPECT_EQ(kernels(65, 100, policy), (Kernels{{"cpu-prefill"}, 6500}));
    EXPECT_EQ(kernels(4, 17, policy, 4), (Kernels{{"cpu-decode", "cpu-chunk"}, 16}));
    EXPECT_EQ(kernels(4, 17, policy, 5), (Kernels{{"cpu-chunk"}, 68}));
  }
}

/// A backend whose kernels have bits of their own.
planning::Backend backend_of_rows(int (*variant)(const AttentionProblem&, const planning::Kernel&)) {
  static constexpr std::array<planning::Kernel, 4> kTable{{{"rows-8", 8, 8, 64, 1024, 0, "few"},
                                                           {"rows-16", 16, 16, 64, 1024, 0, "more"},
                                                           {"rows-64", 0, 64, 64, 1024, 0, "many"},
                                                           {"any", 8, 8, 64, 1024, 0, "the rest", true}}};
  static_assert(planning::is_consistent(kTable));
  planning::Backend backend{};
  backend.kernels = kTable;
  backend.rows_share_bits = false;
  backend.variant = variant;
  return backend;
}

/// "NAME min-max" of every pass.
std::vector<std::string> choices(const planning::Backend& backend, int group, int q_len, SplitPolicy policy,
                                 int min_q_len = 1) {
  AttentionProblem p = decode_problem();
  p.q_heads = p.kv_heads() * group;
  p.max_q_len = q_len;
  p.min_q_len = min_q_len;
  p.policy = policy;
  std::vector<std::string> all;
  for (const planning::Choice& c : planning::choose_kernels(backend, p)) {
    const std::string end = c.max_rows == INT32_MAX ? "" : fmt::format("{}", c.max_rows);
    all.push_back(
        fmt::format("{} {}-{}", backend.kernels[static_cast<std::size_t>(c.index)].name, c.min_rows, end));
  }
  return all;
}

using Names = std::vector<std::string>;

TEST(ChooseKernels, OneForTheBoundsIfItFits) {
  const auto backend =
      backend_of_rows([](const auto&, const planning::Kernel& k) { return k.universal ? -1 : 0; });
  constexpr auto kPolicy = SplitPolicy::kReproducible;
  EXPECT_EQ(choices(backend, 4, 1, kPolicy), Names{"rows-8 0-"});
  EXPECT_EQ(choices(backend, 4, 4, kPolicy), Names{"rows-16 0-"});
  EXPECT_EQ(choices(backend, 4, 5, kPolicy), (Names{"rows-8 0-8", "rows-64 9-"}));
  EXPECT_EQ(choices(backend, 9, 2, kPolicy), (Names{"rows-16 0-16", "rows-64 17-"}));
  EXPECT_EQ(choices(backend, 17, 1, kPolicy), Names{"rows-64 0-"});
}

/// The kernel of a request of so many packed rows depends on the group alone, never on max_q_len.
TEST(ChooseKernels, BatchInvariantGoesByTheRequest) {
  const auto backend =
      backend_of_rows([](const auto&, const planning::Kernel& k) { return k.universal ? -1 : 0; });
  constexpr auto kPolicy = SplitPolicy::kBatchInvariant;
  EXPECT_EQ(choices(backend, 4, 2, kPolicy), Names{"rows-8 0-"}) << "no request can have more than 8 rows";
  for (const int q_len : {3, 4, 5, 1000}) {
    EXPECT_EQ(choices(backend, 4, q_len, kPolicy), (Names{"rows-8 0-8", "rows-64 9-"})) << q_len;
  }
  EXPECT_EQ(choices(backend, 9, 1, kPolicy), Names{"rows-16 0-"});
  EXPECT_EQ(choices(backend, 9, 2, kPolicy), (Names{"rows-16 0-16", "rows-64 17-"}));
  for (const int q_len : {1, 2, 1000}) {
    EXPECT_EQ(choices(backend, 17, q_len, kPolicy), Names{"rows-64 0-"}) << q_len;
  }
}

/// No pass for few rows where no request of so few is expected, unless bits depend on it; the other one then
/// takes any number of rows.
TEST(ChooseKernels, NoneThatNoRequestIsExpectedToNeed) {
  const auto backend =
      backend_of_rows([](const auto&, const planning::Kernel& k) { return k.universal ? -1 : 0; });
  const Names both = {"rows-8 0-8", "rows-64 9-"};
  for (const SplitPolicy policy : {SplitPolicy::kFast, SplitPolicy::kReproducible}) {
    EXPECT_EQ(choices(backend, 4, 100, policy), both);
    EXPECT_EQ(choices(backend, 4, 100, policy, 2), both) << "8 rows are still few";
    EXPECT_EQ(choices(backend, 4, 100, policy, 3), Names{"rows-64 0-"});
    EXPECT_EQ(choices(backend, 4, 100, policy, 100), Names{"rows-64 0-"});
    EXPECT_EQ(choices(backend, 4, 4, policy, 4), Names{"rows-16 0-"}) << "one kernel for the bounds, as ever";
    EXPECT_EQ(choices(backend, 17, 3, policy, 3), Names{"rows-64 0-"});
  }
  for (const int min_q_len : {1, 2, 3, 100}) {
    EXPECT_EQ(choices(backend, 4, 100, SplitPolicy::kBatchInvariant, min_q_len), both) << min_q_len;
  }
  AttentionProblem lists = decode_problem();
  lists.listed.top_k = 64;
  lists.max_q_len = 100;
  for (const int min_q_len : {1, 100}) {
    lists.min_q_len = min_q_len;
    const std::vector<planning::Choice> found = planning::choose_kernels(backend, lists);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].index, 0) << "a query is scheduled as a request: 4 rows";
  }
}

/// Where the largest unit is a limited row, or the universal one serves alone.
TEST(ChooseKernels, AmongTheRowsThatServeTheProblem) {
  const auto up_to_16 = backend_of_rows(
      [](const auto&, const planning::Kernel& k) { return k.universal || k.max_rows == 0 ? -1 : 0; });
  const auto universal =
      backend_of_rows([](const auto&, const planning::Kernel& k) { return k.universal ? 0 : -1; });
  // A universal row that would serve what another one serves, too, is no choice.
  const auto large_or_universal = backend_of_rows(
      [](const auto&, const planning::Kernel& k) { return k.universal || k.max_rows == 0 ? 0 : -1; });
  const auto none = backend_of_rows([](const auto&, const planning::Kernel&) { return -1; });
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    EXPECT_EQ(choices(up_to_16, 4, 100, policy), (Names{"rows-8 0-8", "rows-16 9-"}));
    EXPECT_EQ(choices(up_to_16, 9, 100, policy), Names{"rows-16 0-"});
    EXPECT_EQ(choices(up_to_16, 40, 1, policy), Names{"rows-16 0-"});
    EXPECT_EQ(choices(universal, 4, 100, policy), Names{"any 0-"});
    EXPECT_EQ(choices(large_or_universal, 4, 100, policy), Names{"rows-64 0-"});
    EXPECT_EQ(choices(large_or_universal, 4, 1, policy), Names{"rows-64 0-"});
    EXPECT_EQ(choices(none, 4, 100, policy), Names{});
  }
}

/// Rows that take several units: the bounds choose the smallest of which there are no more, unless a
/// request's bits may not depend on them.
TEST(ChooseKernels, SeveralUnits) {
  static constexpr std::array<planning::Kernel, 3> kTable{{{"rows-32", 32, 32, 64, 1024, 0, "few"},
                                                           {"rows-48", 48, 48, 64, 1024, 0, "more"},
                                                           {"rows-64", 64, 64, 64, 1024, 0, "many"}}};
  planning::Backend backend{};
  backend.kernels = kTable;
  backend.rows_share_bits = false;
  backend.variant = [](const auto&, const planning::Kernel&) { return 0; };
  constexpr auto kFree = SplitPolicy::kReproducible, kByRequest = SplitPolicy::kBatchInvariant;
  EXPECT_EQ(choices(backend, 80, 1, kFree), Names{"rows-48 0-"});
  EXPECT_EQ(choices(backend, 80, 2, kFree), Names{"rows-64 0-"}) << "no pass that serves nobody";
  EXPECT_EQ(choices(backend, 20, 4, kFree), (Names{"rows-32 0-32", "rows-48 33-"}));
  for (const int q_len : {1, 2, 3, 5}) {
    EXPECT_EQ(choices(backend, 80, q_len, kByRequest), Names{"rows-64 0-"}) << q_len;
  }
  for (const int q_len : {2, 3, 4, 5}) {
    EXPECT_EQ(choices(backend, 20, q_len, kByRequest), (Names{"rows-32 0-32", "rows-64 33-"})) << q_len;
  }
}

/// Whether rows of these limits, 0 for none, make a consistent table; `universal` adds that row.
bool consistent(const std::vector<int>& limits, bool universal = false) {
  std::vector<planning::Kernel> table;
  for (const int limit : limits)
    table.push_back({"row", limit, limit == 0 ? 192 : limit, 128, 4096, 0, "some"});
  if (universal) table.push_back({"any", 8, 8, 128, 4096, 0, "the rest", true});
  return planning::is_consistent(table);
}

TEST(ChooseKernels, TablesEndInRowsWithoutALimit) {
  for (const bool universal : {false, true}) {
    EXPECT_TRUE(consistent({0}, universal));
    EXPECT_TRUE(consistent({0, 0, 0}, universal));
    EXPECT_TRUE(consistent({8, 16, 0}, universal));
    EXPECT_TRUE(consistent({8, 16, 0, 0}, universal));
    EXPECT_FALSE(consistent({}, universal));
    EXPECT_FALSE(consistent({8}, universal)) << "the largest requests fit nowhere";
    EXPECT_FALSE(consistent({8, 0, 16}, universal)) << "a limit after none";
    EXPECT_FALSE(consistent({8, 0, 16, 0}, universal)) << "a limit after none";
    EXPECT_FALSE(consistent({16, 8, 0}, universal)) << "falling";
    EXPECT_FALSE(consistent({8, 8, 0, 0}, universal)) << "equal";
  }
  std::vector<planning::Kernel> table(3, {"row", 0, 64, 128, 4096, 0, "some"});
  EXPECT_TRUE(planning::is_consistent(table));
  table[2].kv_tile = 64;
  EXPECT_FALSE(planning::is_consistent(table)) << "steps that differ";
  table[2].kv_tile = 128, table[2].split_tokens = 8192;
  EXPECT_FALSE(planning::is_consistent(table)) << "splits that differ";
  table[2].split_tokens = 4096, table[1].universal = true;
  EXPECT_FALSE(planning::is_consistent(table)) << "a universal row that is not the last";
}

TEST(ChooseKernels, TablesBeginWithRowsForLatentCaches) {
  const planning::Kernel latent = {"latent", 8, 8, 64, 1024, 0, "latent", false, 0, true},
                         last = {"latents", 0, 128, 64, 1024, 0, "latent", false, 0, true, 2},
                         other = {"row", 0, 64, 128, 4096, 0, "some"};
  const auto is_consistent = [](const std::vector<planning::Kernel>& table) {
    return planning::is_consistent(table);
  };
  EXPECT_TRUE(is_consistent({latent, last, other})) << "other steps than theirs";
  EXPECT_FALSE(is_consistent({latent, last})) << "nothing for other caches";
  EXPECT_FALSE(is_consistent({latent, other})) << "the largest requests over latent caches fit nowhere";
  EXPECT_FALSE(is_consistent({other, latent, last})) << "behind the others";
  EXPECT_FALSE(is_consistent({last, latent, other})) << "falling";
  planning::Kernel none = last;
  none.together = 0;
  EXPECT_FALSE(is_consistent({latent, none, other})) << "no worker";
}

/// A table with two rows without a limit, of which a problem has one: units of 64 rows, or prefill's, whose
/// queue others share.
planning::Backend backend_with_prefill(int (*variant)(const AttentionProblem&, const planning::Kernel&)) {
  static constexpr std::array<planning::Kernel, 5> kTable{
      {{"rows-8", 8, 8, 128, 4096, 0, "few"},
       {"rows-16", 16, 16, 128, 4096, 0, "more"},
       {"rows-64", 0, 64, 128, 4096, 0, "many"},
       {"prefill", 0, 192, 128, 4096, 0, "prompts", false, 1 << 20},
       {"any", 8, 8, 128, 4096, 0, "the rest", true}}};
  static_assert(planning::is_consistent(kTable));
  planning::Backend backend = backend_of_rows(variant);
  backend.kernels = kTable;
  return backend;
}

TEST(ChooseKernels, OfTheRowsWithoutALimitTheOneThatAProblemHas) {
  const auto prefill = backend_with_prefill(
      [](const auto&, const planning::Kernel& k) { return k.universal || k.row_block == 64 ? -1 : 0; });
  const auto units_of_64 = backend_with_prefill(
      [](const auto&, const planning::Kernel& k) { return k.universal || k.row_block == 192 ? -1 : 0; });
  const auto neither = backend_with_prefill(
      [](const auto&, const planning::Kernel& k) { return k.universal || k.max_rows == 0 ? -1 : 0; });
  const auto alone = backend_with_prefill(
      [](const auto&, const planning::Kernel& k) { return k.row_block == 192 ? 0 : -1; });
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    EXPECT_EQ(choices(prefill, 4, 1, policy), Names{"rows-8 0-"});
    EXPECT_EQ(choices(prefill, 4, 100, policy), (Names{"rows-8 0-8", "prefill 9-"}));
    EXPECT_EQ(choices(prefill, 17, 1, policy), Names{"prefill 0-"});
    EXPECT_EQ(choices(units_of_64, 4, 100, policy), (Names{"rows-8 0-8", "rows-64 9-"}));
    EXPECT_EQ(choices(neither, 4, 100, policy), (Names{"rows-8 0-8", "rows-16 9-"}));
    EXPECT_EQ(choices(neither, 40, 1, policy), Names{"rows-16 0-"});
    // Plain K and V, which no row for few rows takes: one pass, however few.
    EXPECT_EQ(choices(alone, 4, 1, policy), Names{"prefill 0-"});
    EXPECT_EQ(choices(alone, 4, 100, policy), Names{"prefill 0-"});
  }
}

TEST(Passes, AreDescribed) {
  AttentionProblem p = decode_problem();
  p.max_q_len = 1000;
  p.max_kv_len = 2000;
  const std::string text = plan(p).describe();
  for (const char* part :
       {"pass       1 of 2: requests of 1 to 16 packed rows\nconfig     cpu-decode (",
        "reason     requests of at most 16 packed rows per KV head (queries x 4 query heads)\n",
        "pass       2 of 2: requests of 17 to 4000 packed rows\nconfig     cpu-prefill (",
        "reason     the other requests, of up to 4000 packed rows per request and KV head (max_q_len 1000 x "
        "4 "
        "query heads), 256 at a time\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }
  EXPECT_EQ(plan(decode_problem()).describe().find("pass  "), std::string::npos);
  p.min_q_len = 5;
  const std::string alone = plan(p).describe();
  EXPECT_EQ(alone.find("pass  "), std::string::npos) << alone;
  EXPECT_NE(alone.find("(max_q_len 1000 x 4 query heads), 256 at a time; none of at most 16 is expected "
                       "(min_q_len 5)\n"),
            std::string::npos)
      << alone;
  p.min_q_len = 1;

  std::vector<std::int32_t> kv_lengths = {100, 2000, 0, 300}, cu_q = {0, 1, 1001, 1001, 1005};
  SequenceLengths view;
  view.cu_q = TensorView::contiguous(cu_q.data(), DType::kInt32, {5});
  view.kv_lengths = TensorView::contiguous(kv_lengths.data(), DType::kInt32, {4});
  const std::string explained = planning::explain(plan(p), view);
  for (const char* part : {"\nPass 1 of 2, cpu-decode:\n16 units, ",
                           "\nPass 2 of 2, cpu-prefill:\n128 units, ", "1005 queries, 2400 keys, "}) {
    EXPECT_NE(explained.find(part), std::string::npos) << part << " is not in\n" << explained;
  }
}

}  // namespace
}  // namespace halftone
