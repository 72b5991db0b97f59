// Prefill on the GPU against the double oracle: every kernel with every option, lengths around the ends of
// row blocks and tiles, every way to pack rows, and cut units.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/attention/prefill_cases.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/prefill_options.h"
#include "tests/cuda/prefill_plans.h"

namespace halftone::testing {
namespace {

/// Runs rows and counts those that had a kernel, so that no test passes for want of one.
class DevicePrefill : public ::testing::Test {
 protected:
  /// In every shape of its kernel.
  void expect_agrees(const AttentionCase& listed) {
    if (!has_prefill(make_problem(listed))) return;
    for (const AttentionCase& row : shapes_of(listed)) {
      SCOPED_TRACE(row.name);
      const Problem p = make_problem(row);
      ++served_;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(judge_device(p, outputs), "");
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0);
    }
  }
  void expect_cut_units_agree(const AttentionCase& listed, std::int32_t parts = 0) {
    if (!has_prefill(make_problem(listed))) return;
    for (const AttentionCase& row : shapes_of(listed)) served_ += cut_units_agree(row, parts) ? 1 : 0;
  }
  void TearDown() override { EXPECT_GT(served_, 0) << "no kernel of prefill is in this build"; }

  int served_ = 0;
};

TEST_F(DevicePrefill, EveryOptionAtTheEdges) {
  std::size_t n = 0;
  const std::vector<AttentionCase> rows = prefill_cases(edge_requests());
  for (const AttentionCase& listed : rows) {
    const std::size_t shape = n % (rows.size() / 2), dtype = n / (rows.size() / 2);
    for (std::size_t i = 0; i < options().size(); ++i) {
      // Half of the rows, plain ones and ones in pages: each of both dtypes what the other one leaves out.
      if (i > 1 && (shape / 2 + shape + dtype + i) % 2 == 0) continue;
      const Option& option = options()[i];
      AttentionCase row = listed;
      option.set(row);
      row.name += std::string(", ") + option.name;
      expect_agrees(row);
    }
    ++n;
  }
}

/// Pages of every size; V stored rotated, which rotates O back.
TEST_F(DevicePrefill, PagesOfEverySizeAndRotatedV) {
  for (const AttentionCase& listed : prefill_cases(edge_requests())) {
    if (listed.plain) continue;
    for (const int page_size : {16, 32, 64, 128, 256}) {
      AttentionCase row = listed;
      row.page_size = page_size;
      row.rotate_v = page_size != 64;
      row.table_mode = page_size == 32 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
      if (page_size == 128) row.out_dtype = DType::kFloat32;
      row.name += ", pages of " + std::to_string(page_size);
      expect_agrees(row);
    }
  }
}

/// Query heads per KV head: 64 rows are whole queries, or not; row blocks end within a query.
TEST_F(DevicePrefill, Groups) {
  for (const int group : {1, 2, 3, 5, 7, 8, 12, 16, 32, 48, 64, 65, 128}) {
    for (AttentionCase row :
         prefill_cases({{1, 100}, {3, 50}, {20, 260}, {9, 9}, {0, 4}, {2, 0}, {16, 81}})) {
      row.kv_heads = group > 16 ? 1 : 2;
      row.q_heads = row.kv_heads * group;
      row.alibi = group % 2 == 1;
      row.sinks = group % 3 == 0;
      row.name += ", group " + std::to_string(group);
      expect_agrees(row);
    }
  }
}

/// Every length around two tiles and two row blocks, in small batches.
TEST_F(DevicePrefill, EveryLengthAroundTheEdges) {
  std::vector<std::vector<Request>> batches;
  for (const int base : {64, 80, 96, 112, 128, 160, 192, 224, 256, 384}) {
    std::vector<Request>& batch = batches.emplace_back();
    for (const int off : {-1, 0, 1}) {
      batch.push_back({base + off, base + off});
      batch.push_back({3, base + off});
      batch.push_back({base + off, 90});
    }
  }
  int n = 0;
  for (const std::vector<Request>& batch : batches) {
    for (AttentionCase row : prefill_cases(batch)) {
      row.q_heads = row.kv_heads = 1;
      row.mask.causal = ++n % 3 != 0;
      row.name += row.mask.causal ? ", causal" : ", full";
      expect_agrees(row);
    }
  }
}

/// Windows of many tiles, some of which the rows of only one warpgroup see, ahead of the tiles of others and
/// behind them.
TEST_F(DevicePrefill, WindowsOfManyTiles) {
  for (AttentionCase row : prefill_cases({{400, 1500}, {300, 1300}, {70, 1250}})) {
    row.q_heads = row.kv_heads = 1;
    for (const int window : {600, 1100}) {
      for (const int workers : {1, 3}) {
        row.mask.window_left = window;
        row.workers = workers;
        expect_agrees(row);
      }
    }
  }
}

/// The shapes of FlashAttention's own tests: all but the longest in one batch.
TEST_F(DevicePrefill, ShapesOfFlashAttentionsTests) {
  const std::vector<Request> shapes = {{1, 239},   {3, 799},   {127, 512}, {127, 513}, {113, 203},
                                       {128, 217}, {113, 211}, {108, 256}, {256, 512}};
  for (const int kv_heads : {1, 2, 6}) {
    for (const bool local : {false, true}) {
      std::vector<AttentionCase> rows = prefill_cases(shapes);
      if (kv_heads == 2) {
        for (const AttentionCase& row : prefill_cases({{1023, 1024}})) rows.push_back(row);
      }
      for (AttentionCase& row : rows) {
        row.q_heads = 6;
        row.kv_heads = kv_heads;
        if (local) row.mask = {.window_left = 57, .window_right = 33};
        row.name += ", " + std::to_string(kv_heads) + " KV heads" + (local ? ", local" : ", causal");
        expect_agrees(row);
      }
    }
  }
}

TEST_F(DevicePrefill, CutUnits) {
  const std::vector<std::vector<Request>> batches = {
      {{100, 2500}}, {{65, 3001}, {0, 0}, {20, 0}}, {{200, 1500}, {130, 900}}, {{200, 500}, {100, 3000}}};
  for (const std::vector<Request>& batch : batches) {
    for (AttentionCase row : prefill_cases(batch)) {
      for (std::size_t i = 0; i < options().size(); ++i) {
        const Option& option = options()[i];
        if (option.name == std::string("batch-invariant")) continue;
        const bool typical =
            row.head_dim == 128 && row.plain.has_value() == (row.q_dtype == DType::kBFloat16);
        if (i > 1 && !typical) continue;
        AttentionCase own = row;
        own.q_heads = own.kv_heads = batch.size() == 2 ? 2 : 1;
        option.set(own);
        own.name += std::string(", ") + option.name + ", " + std::to_string(batch[0].kv_len) + " keys";
        expect_cut_units_agree(own);
      }
    }
  }
}

/// Up to 8 parts are merged several rows at once, 16 share the rows, 32 are weighed together.
TEST_F(DevicePrefill, ManyParts) {
  for (const std::int32_t parts : {4, 8, 9, 17, 35}) {
    for (AttentionCase row : prefill_cases({{100, parts * 128 - 70}})) {
      row.q_heads = row.kv_heads = 1;
      row.mask = {};
      row.workers = 132;  // on any device
      row.rotate_v = !row.plain.has_value() && row.v_head_dim == 0 && row.head_dim < 512;
      row.name += ", " + std::to_string(parts) + " parts";
      expect_cut_units_agree(row, parts);
    }
  }
}

/// Parts where two warpgroups have the same rows, of which one writes the states of both.
TEST_F(DevicePrefill, PartsOfSharedRows) {
  for (const DType dtype : kPrefillTypes) {
    AttentionCase row = prefill_case(dtype, 512, dtype == DType::kFloat16, {{64, 10 * 128 - 70}});
    row.q_heads = row.kv_heads = 1;
    row.mask = {};
    row.workers = 132;
    expect_cut_units_agree(row, 10);
  }
}

/// Workers that have another part to do leave the merge of the first one to whoever comes last.
TEST_F(DevicePrefill, PartsOfBusyWorkers) {
  for (AttentionCase row : prefill_cases({{100, 24 * 128 - 70}})) {
    if (row.head_dim != 128) continue;
    row.q_heads = row.kv_heads = 2;
    row.mask = {};
    row.workers = 3;
    expect_cut_units_agree(row, 3);
  }
}

/// The same requests uncut: within the limits of both, and no slots are used.
TEST_F(DevicePrefill, BatchInvariantUnitsStayWhole) {
  for (AttentionCase row : prefill_cases({{200, 2000}, {300, 700}})) {
    row.policy = SplitPolicy::kBatchInvariant;
    SCOPED_TRACE(row.name);
    const Problem p = make_problem(row);
    if (!has_prefill(p)) continue;
    ++served_;
    const Plan plan = plan_on_device(p);
    const DeviceRun device(p, plan);
    const Outputs outputs = first_outputs(p, device);
    EXPECT_EQ(queue_header(plan, device).partials, 0);
    AttentionCase few = row;
    few.workers = 2;
    const Problem on_two = make_problem(few);
    expect_same_bits(outputs, run_on_device(on_two), "on two workers");
  }
}

/// Logits far apart, tile after tile: the offset of the exponents rises, falls behind or stays.
TEST_F(DevicePrefill, LogitsThatRiseAndFall) {
  for (AttentionCase listed : prefill_cases({{100, 1500}, {64, 700}})) {
    listed.mask = {};
    if (!has_prefill(make_problem(listed))) continue;
    for (const AttentionCase& row : shapes_of(listed)) {
      for (const float step : {0.02F, -0.02F, 0.1F, 0.3F, -0.3F}) {
        SCOPED_TRACE(row.name + ", " + std::to_string(step) + " per key");
        Problem p = make_problem(row);
        ++served_;
        set_linear_logits(p, step);
        EXPECT_EQ(judge_device(p, run_on_device(p)), "");
        p.problem.workers = 1;  // units are long then, since none is cut
        EXPECT_EQ(judge_device(p, run_on_device(p)), "") << "not cut";
      }
    }
  }
}

/// The shapes that serve but chunks of some bounds, in little time.
TEST_F(DevicePrefill, Chunks) {
  for (const DType dtype : kPrefillTypes) {
    AttentionCase row = prefill_case(dtype, 128, dtype == DType::kFloat16, mixed_requests());
    row.q_heads = 6;
    row.workers = 3;
    for (const int window : {-1, 90}) {
      row.mask.window_left = window;
      expect_agrees(row);
    }
  }
}

}  // namespace
}  // namespace halftone::testing
