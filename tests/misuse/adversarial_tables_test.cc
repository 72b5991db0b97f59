// Block tables: garbage behind the live entries, bad live entries, shared pages, tables that change between
// runs.
#include <climits>

#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

AttentionCase decode(const std::string& format) { return table_case(format, DType::kFloat32); }

TEST(Tables, DeadEntriesAreNeverUsed) {
  for (const std::string& format : typical_formats()) {
    for (const BlockTableMode mode : {BlockTableMode::kTrusted, BlockTableMode::kClamped}) {
      AttentionCase row = decode(format);
      row.table_mode = mode;
      const Problem p = make_problem(row);
      const Outputs expected = run_problem(p);
      for (const std::int32_t garbage : {INT_MAX, INT_MIN, -1, 0, 1 << 20, 0x7fc00000}) {
        for (std::int64_t r = 0; r < 4; ++r) {
          for (std::int64_t c = live_columns(p, r); c < p.cache->block_table.shape()[1]; ++c)
            entry(p, r, c) = garbage;
        }
        const Outputs actual = run_problem(p);
        expect_same_bits(expected, actual, format);
        EXPECT_EQ(actual.status.as<std::int32_t>()[0], 0) << "a dead entry set the status";
      }
    }
  }
}

TEST(Tables, BadLiveEntryIsRefusedWhenTrusted) {
  for (const std::int32_t bad : {-1, INT_MIN, INT_MAX}) {
    const Problem p = make_problem(decode("int8-head"));
    const Prepared ready(p);
    entry(p, 2, 3) = bad;
    ready.refuses(kOutOfRange, {"block_table[2, 3]", std::to_string(bad)}, [](AttentionArgs&) {});
  }
  const Problem p = make_problem(decode("int8-head"));
  const Prepared ready(p);
  const auto pages = static_cast<std::int32_t>(p.cache->pages.shape()[0]);
  entry(p, 0, 0) = pages;
  ready.refuses(kOutOfRange, {"block_table[0, 0]", std::to_string(pages), std::to_string(pages - 1)},
                [](AttentionArgs&) {});
}

/// Clamped: the tokens of a bad entry are left out, as if masked, and the status word says so.
TEST(Tables, BadLiveEntryIsExcludedWhenClamped) {
  for (const std::string& format : typical_formats()) {
    for (const std::int32_t bad : {-1, INT_MIN, INT_MAX, 1000000}) {
      AttentionCase row = decode(format);
      row.table_mode = BlockTableMode::kClamped;
      const Problem p = make_problem(row);
      const Dequantised d = dequantised(*p.cache);
      const Outputs clean = run_problem(p);
      entry(p, 0, 1) = bad;  // tokens 16 to 31 of request 0
      entry(p, 2, 8) = bad;  // the last token of request 2
      const Outputs outputs = run_problem(p);
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 1);
      EXPECT_EQ(row_bytes(clean.out, 1, 2), row_bytes(outputs.out, 1, 2)) << "a healthy neighbour changed";

      const Problem twin = without_two_pages(row, d);
      EXPECT_EQ(judge(twin, make_reference(twin), outputs), "") << format << ", entry " << bad;
    }
  }
}

TEST(Tables, EveryEntryBadGivesEmptyRows) {
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    AttentionCase row = decode("int8-head");
    row.table_mode = BlockTableMode::kClamped;
    row.policy = policy;
    row.workers = 7;
    const Problem p = make_problem(row);
    for (std::int64_t c = 0; c < live_columns(p, 2); ++c) entry(p, 2, c) = -1;
    const Outputs outputs = run_problem(p);
    expect_empty_rows(p, outputs, 2, 3);
    EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 1);
  }
}

/// The status word is sticky: a clean run does not clear it, nor bits that are not its own.
TEST(Tables, StatusIsStickyAndOptional) {
  AttentionCase row = decode("int8-head");
  row.table_mode = BlockTableMode::kClamped;
  const Problem p = make_problem(row);
  Outputs outputs = make_outputs(p);
  outputs.status.as<std::int32_t>()[0] = 0x40;
  attend(p.problem, arguments(p, outputs));
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0x40);
  const std::int32_t good = entry(p, 0, 0);
  entry(p, 0, 0) = -1;
  attend(p.problem, arguments(p, outputs));
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0x41);
  entry(p, 0, 0) = good;
  attend(p.problem, arguments(p, outputs));
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0x41);
  AttentionArgs args = arguments(p, outputs);
  args.status = TensorView{};
  entry(p, 0, 0) = -1;
  attend(p.problem, args);
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0x41);
}

/// An entry that no query can see, because of the window, is dead as well.
TEST(Tables, EntriesOutsideTheWindowAreDead) {
  AttentionCase row = decode("int8-head");
  row.mask = {.causal = true, .window_left = 20};
  const Problem p = make_problem(row);
  const Outputs expected = run_problem(p);
  entry(p, 0, 0) = -1;
  entry(p, 2, 2) = INT_MAX;
  expect_same_bits(expected, run_problem(p), "window");
}

TEST(Tables, PagesSharedByTwoSequences) {
  for (const std::string& format : typical_formats()) {
    AttentionCase row = decode(format);
    row.requests = {{1, 96}, {1, 96}};
    const Problem p = make_problem(row);
    // The twin: request 1 holds copies of the bytes of request 0's first four pages.
    const std::int64_t bytes = p.cache->pages.shape()[1];
    for (std::int64_t c = 0; c < 4; ++c) {
      std::copy_n(p.cache->pages.bytes().begin() + entry(p, 0, c) * bytes, bytes,
                  p.cache->pages.bytes().begin() + entry(p, 1, c) * bytes);
    }
    const Outputs copied = run_problem(p);
    for (std::int64_t c = 0; c < 4; ++c) entry(p, 1, c) = entry(p, 0, c);
    expect_same_bits(copied, run_problem(p), format);
  }
}

/// One page named by every entry of every request.
TEST(Tables, OnePageForEverything) {
  AttentionCase row = decode("int4-g32");
  const Problem p = make_problem(row);
  const std::int32_t page = entry(p, 0, 0);
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t c = 0; c < live_columns(p, r); ++c) entry(p, r, c) = page;
  }
  EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "");
}

/// The table belongs to run(), not to schedule(): pages may move between runs of one schedule.
TEST(Tables, TableChangedBetweenRunsOfOneSchedule) {
  const Problem p = make_problem(decode("int8-g64"));
  const Prepared ready(p);
  run(ready.plan, ready.args, ready.workspace.view());
  const Outputs first = run_problem(p);
  expect_same_bits(first, ready.outputs, "before");
  std::swap(entry(p, 0, 0), entry(p, 2, 4));
  std::swap(entry(p, 1, 0), entry(p, 1, 1));
  run(ready.plan, ready.args, ready.workspace.view());
  expect_same_bits(run_problem(p), ready.outputs, "after");
  EXPECT_FALSE(same_bytes(first.out, ready.outputs.out));
}

/// Reordering pages in memory changes no bit.
TEST(Tables, PageOrderDoesNotMatter) {
  const Problem p = make_problem(decode("int4-row"));
  const Outputs expected = run_problem(p);
  const std::int64_t count = p.cache->pages.shape()[0], bytes = p.cache->pages.shape()[1];
  const Tensor original = p.cache->pages.clone();
  for (std::int64_t page = 0; page < count; ++page) {
    std::copy_n(original.bytes().begin() + page * bytes, bytes,
                p.cache->pages.bytes().begin() + (count - 1 - page) * bytes);
  }
  for (std::int64_t r = 0; r < 4; ++r) {
    for (std::int64_t c = 0; c < live_columns(p, r); ++c) {
      entry(p, r, c) = static_cast<std::int32_t>(count - 1) - entry(p, r, c);
    }
  }
  expect_same_bits(expected, run_problem(p), "reversed pages");
}

}  // namespace
}  // namespace halftone::testing
