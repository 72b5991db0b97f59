// Block tables: garbage behind the live entries, bad live entries, shared pages, tables that change between
// runs.
#include <climits>
#include <utility>

#include "format/status.h"
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

class Tables : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(Tables);

TEST_P(Tables, DeadEntriesAreNeverUsed) {
  for (const auto& [format, out] : formats_and_outs()) {
    for (const BlockTableMode mode : {BlockTableMode::kTrusted, BlockTableMode::kClamped}) {
      AttentionCase row = table_case(format, out);
      row.table_mode = mode;
      const Problem p = make_problem(row);
      const Outputs expected = run(p);
      for (const std::int32_t garbage : {INT_MAX, INT_MIN, -1, 0, 1 << 20, 0x7fc00000}) {
        for (std::int64_t r = 0; r < 4; ++r) {
          for (std::int64_t c = live_columns(p, r); c < p.cache->block_table.shape()[1]; ++c)
            entry(p, r, c) = garbage;
        }
        const Outputs actual = run(p);
        expect_same_bits(expected, actual, format);
        EXPECT_EQ(actual.status.as<std::int32_t>()[0], 0) << "a dead entry set the status";
      }
    }
  }
}

/// Clamped: the tokens of a bad entry are left out, as if masked, and the status word says so.
TEST_P(Tables, BadLiveEntryIsExcludedWhenClamped) {
  for (const auto& [format, out] : formats_and_outs()) {
    for (const std::int32_t bad : {-1, INT_MIN, INT_MAX, 1000000}) {
      AttentionCase row = table_case(format, out);
      row.table_mode = BlockTableMode::kClamped;
      const Problem p = make_problem(row);
      const reference::Dequantised d = dequantised(*p.cache);
      const Outputs clean = run(p);
      entry(p, 0, 1) = bad;  // tokens 16 to 31 of request 0
      entry(p, 2, 8) = bad;  // the last token of request 2
      const Outputs outputs = run(p);
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 1);
      EXPECT_EQ(row_bytes(clean.out, 1, 2), row_bytes(outputs.out, 1, 2)) << "a healthy neighbour changed";

      const Problem twin = without_two_pages(row, d);
      EXPECT_EQ(judge(twin, outputs), "") << format << ", entry " << bad;
    }
  }
}

/// Trusted: it is refused where the table can be read, else left out as if clamped.
TEST_P(Tables, BadLiveEntryWhenTrusted) {
  for (const std::string& format : formats_of_runners()) {
    AttentionCase row = table_case(format, DType::kFloat16);
    const Problem p = make_problem(row);
    row.table_mode = BlockTableMode::kClamped;
    const Problem clamped = make_problem(row);
    const auto pages = static_cast<std::int32_t>(p.cache->pages.shape()[0]);
    for (const std::int32_t bad : {-1, INT_MIN, INT_MAX, pages}) {
      const std::int32_t good = std::exchange(entry(p, 2, 1), bad);
      if (runner().checks_values()) {
        const Prepared ready(p);
        ready.refuses(kOutOfRange, {"block_table[2, 1]", std::to_string(bad), std::to_string(pages - 1)},
                      [](AttentionArgs&) {});
      } else {
        const Outputs outputs = run(p);
        EXPECT_EQ(outputs.status.as<std::int32_t>()[0], kStatusBadPage) << format;
        entry(clamped, 2, 1) = bad;
        expect_same_bits(run(clamped), outputs, format);
      }
      entry(p, 2, 1) = good;
    }
  }
}

TEST_P(Tables, EveryEntryBadGivesEmptyRows) {
  for (const DType out : kOutTypes) {
    for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      for (const int workers : {0, 7}) {
        AttentionCase row = table_case("int8-head", out);
        row.table_mode = BlockTableMode::kClamped;
        row.policy = policy;
        row.workers = workers;
        const Problem p = make_problem(row);
        for (std::int64_t c = 0; c < live_columns(p, 2); ++c) entry(p, 2, c) = -1;
        const Outputs outputs = run(p);
        expect_empty_rows(p, outputs, 2, 3);
        EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 1);
      }
    }
  }
}

/// The status word is sticky: a clean run does not clear it, nor bits that are not its own.
TEST_P(Tables, StatusIsStickyAndOptional) {
  for (const DType out : kOutTypes) {
    AttentionCase row = table_case("int8-head", out);
    row.table_mode = BlockTableMode::kClamped;
    const Problem p = make_problem(row);
    PlacedRun calls(runner(), p);
    calls.write(calls.args.status, Tensor::of({1}, std::vector<std::int32_t>{0x40}));
    const auto status_after_run = [&] {
      calls.schedule();
      calls.run();
      return calls.outputs().status.as<std::int32_t>()[0];
    };
    const auto set_entry = [&](std::int32_t page) {
      entry(p, 0, 0) = page;
      calls.write(cache_of(calls.args).block_table, p.cache->block_table);
    };
    EXPECT_EQ(status_after_run(), 0x40);
    const std::int32_t good = entry(p, 0, 0);
    set_entry(-1);
    EXPECT_EQ(status_after_run(), 0x41);
    set_entry(good);
    EXPECT_EQ(status_after_run(), 0x41);
    set_entry(-1);
    calls.args.status = TensorView{};
    EXPECT_EQ(status_after_run(), 0x41);
  }
}

/// An entry that no query can see, because of the window, is dead as well.
TEST_P(Tables, EntriesOutsideTheWindowAreDead) {
  for (const DType out : kOutTypes) {
    AttentionCase row = table_case("int8-head", out);
    row.mask = {.causal = true, .window_left = 20};
    const Problem p = make_problem(row);
    const Outputs expected = run(p);
    entry(p, 0, 0) = -1;
    entry(p, 2, 2) = INT_MAX;
    expect_same_bits(expected, run(p), "window");
  }
}

TEST_P(Tables, PagesSharedByTwoSequences) {
  for (const auto& [format, out] : formats_and_outs()) {
    AttentionCase row = table_case(format, out);
    row.requests = {{1, 96}, {1, 96}};
    const Problem p = make_problem(row);
    // The twin: request 1 holds copies of the bytes of request 0's first four pages.
    const std::int64_t bytes = p.cache->pages.shape()[1];
    for (std::int64_t c = 0; c < 4; ++c) {
      std::copy_n(p.cache->pages.bytes().begin() + entry(p, 0, c) * bytes, bytes,
                  p.cache->pages.bytes().begin() + entry(p, 1, c) * bytes);
    }
    const Outputs copied = run(p);
    for (std::int64_t c = 0; c < 4; ++c) entry(p, 1, c) = entry(p, 0, c);
    expect_same_bits(copied, run(p), format);
  }
}

/// One page named by every entry of every request.
TEST_P(Tables, OnePageForEverything) {
  for (const DType out : kOutTypes) {
    const Problem p = make_problem(table_case("int4-g32", out));
    const std::int32_t page = entry(p, 0, 0);
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t c = 0; c < live_columns(p, r); ++c) entry(p, r, c) = page;
    }
    EXPECT_EQ(judge(p, run(p)), "");
  }
}

/// The table belongs to run(), not to schedule(): pages may move between runs of one schedule.
TEST_P(Tables, TableChangedBetweenRunsOfOneSchedule) {
  for (const auto& [format, out] :
       {std::pair{"int8-g64", DType::kFloat32}, std::pair{"int8-g64", DType::kFloat16},
        std::pair{"bf16", DType::kFloat16}}) {
    const Problem p = make_problem(table_case(format, out));
    const PlacedRun calls(runner(), p);
    calls.schedule();
    calls.run();
    const Outputs first = calls.outputs();
    expect_same_bits(run(p), first, "before");
    std::swap(entry(p, 0, 0), entry(p, 2, 4));
    std::swap(entry(p, 1, 0), entry(p, 1, 1));
    calls.write(cache_of(calls.args).block_table, p.cache->block_table);
    calls.clear();
    calls.run();
    const Outputs second = calls.outputs();
    expect_same_bits(run(p), second, "after");
    EXPECT_FALSE(same_bytes(first.out, second.out));
  }
}

/// Reordering pages in memory changes no bit.
TEST_P(Tables, PageOrderDoesNotMatter) {
  for (const DType out : kOutTypes) {
    const Problem p = make_problem(table_case("int4-row", out));
    const Outputs expected = run(p);
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
    expect_same_bits(expected, run(p), "reversed pages");
  }
}

}  // namespace
}  // namespace halftone::testing
