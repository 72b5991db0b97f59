// Prompts over quantised caches whose codes prefill reads in their pages, against the double oracle.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "format/status.h"
#include "tests/attention/prefill_cases.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/bounds_checks.h"
#include "tests/cuda/prefill_options.h"
#include "tests/cuda/prefill_plans.h"

namespace halftone::testing {
namespace {

/// One for each compiled kernel.
constexpr const char* kPackedFormats[] = {"fp8",      "fp8-token-head", "int8-static-head", "int8-head",
                                          "int4-row", "int4-g32",       "int4-g64"};

AttentionCase packed_case(const std::string& format, const std::vector<Request>& requests,
                          DType q_dtype = DType::kBFloat16) {
  return staged_case(format, format, 128, requests, q_dtype);
}

class DevicePacked : public ::testing::Test {
 protected:
  /// Whether the problem's prompts are read as codes: not in a build of other head_dims.
  bool has_packed(const Problem& p) {
    if (!has_packed_kernels()) return false;
    const bool has = reads_packed(p);
    EXPECT_TRUE(has) << p.row.name;
    served_ += has ? 1 : 0;
    return has;
  }
  void expect_agrees(const AttentionCase& row) {
    SCOPED_TRACE(row.name);
    const Problem p = make_problem(row);
    if (!has_packed(p)) return;
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "");
    EXPECT_EQ(status_of(outputs), 0);
  }
  void TearDown() override {
    EXPECT_TRUE(served_ > 0 || !has_packed_kernels()) << "no kernel is in this build";
  }

 private:
  int served_ = 0;
};

TEST_F(DevicePacked, EveryFormatAndOption) {
  int n = 0;
  for (const char* format : kPackedFormats) {
    for (const Option& option : options()) {
      AttentionCase row = packed_case(format, mixed_requests(), kPrefillTypes[n++ % 2]);
      option.set(row);
      const std::string name = option.name;
      if (name == "batch-invariant" || name == "wide bounds") continue;  // which stage
      row.name += std::string(", ") + option.name;
      expect_agrees(row);
    }
  }
}

TEST_F(DevicePacked, LengthsAtTheEdges) {
  int n = 0;
  for (const char* format : kPackedFormats) {
    for (const bool rotate_v : {false, true}) {
      AttentionCase row = packed_case(format, edge_requests(), kPrefillTypes[n++ % 2]);
      row.rotate_v = rotate_v;
      row.out_dtype = n % 3 == 0 ? DType::kFloat32 : row.q_dtype;
      row.name += rotate_v ? ", V rotated" : "";
      expect_agrees(row);
    }
  }
}

/// Also tables in the mode that does not trust them.
TEST_F(DevicePacked, PagesOfEverySize) {
  int n = 0;
  for (const int page_size : {16, 32, 64, 128, 256}) {
    AttentionCase row = packed_case(kPackedFormats[n++ % 7], mixed_requests());
    row.page_size = page_size;
    row.table_mode = page_size == 32 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
    row.name += ", pages of " + std::to_string(page_size);
    expect_agrees(row);
  }
}

TEST_F(DevicePacked, Groups) {
  int n = 0;
  for (const int group : {1, 3, 5, 12, 16, 65}) {
    const int longest = 170 / group + 3;
    AttentionCase row =
        packed_case(kPackedFormats[n++ % 7],
                    {{longest, 150}, {1, 100}, {longest / 2, 260}, {2, 0}, {0, 9}, {longest - 1, 20}});
    row.q_heads = row.kv_heads * group;
    row.alibi = group % 2 == 1;
    row.sinks = group % 3 == 0;
    row.name += ", group " + std::to_string(group);
    expect_agrees(row);
  }
}

/// Few units: they are cut, and merged as if they were whole, with the same bits every time.
TEST_F(DevicePacked, CutUnits) {
  int n = 0;
  for (const char* format : kPackedFormats) {
    for (const std::vector<Request>& requests :
         {std::vector<Request>{{50, 2500}}, {{65, 3001}, {0, 0}, {20, 0}}, {{100, 500}, {50, 3000}}}) {
      AttentionCase row = packed_case(format, requests);
      row.q_heads = 4 * row.kv_heads;
      row.mask.causal = requests.size() > 1;
      row.workers = 132;  // on any device
      row.rotate_v = n % 2 == 1;
      row.sinks = n % 3 == 1;
      row.out_dtype = n % 4 == 3 ? DType::kFloat32 : row.out_dtype;
      ++n;
      row.name += ", " + std::to_string(requests[0].kv_len) + " keys";
      if (has_packed(make_problem(row))) {
        EXPECT_TRUE(cut_units_agree(row));
      }
    }
  }
}

/// Four and nine parts of a unit, merged with all that the end of a row has.
TEST_F(DevicePacked, Parts) {
  for (const int parts : {4, 9}) {
    AttentionCase row = packed_case(parts == 4 ? "int4-g32" : "int8-head", {{100, parts * 128 - 30}});
    row.kv_heads = 1, row.q_heads = 2;
    row.mask = {};
    row.workers = 132;
    row.rotate_v = row.sinks = row.offset_k = true;
    row.out_dtype = DType::kFloat32;
    row.name += ", " + std::to_string(parts) + " parts";
    SCOPED_TRACE(row.name);
    if (has_packed(make_problem(row))) {
      EXPECT_TRUE(cut_units_agree(row, parts));
    }
  }
}

/// Entries that name no page: their tokens are left out, in both modes of the table.
TEST_F(DevicePacked, BadPagesAreLeftOut) {
  for (const char* format : {"fp8", "int8-head", "int4-g32"}) {
    for (const auto& [bad, column] : {std::pair{-1, 0}, {INT32_MIN, 2}, {INT32_MAX, 332 / 64}}) {
      AttentionCase row = packed_case(format, {{70, 100}, {33, 90}, {150, 333}, {40, 0}}, DType::kFloat16);
      row.mask = {};
      row.q_heads = 8;
      if (has_packed(make_problem(row))) expect_bad_page_is_left_out(row, column, bad);
    }
  }
}

/// Lengths beyond the table, and a table without columns and without an address.
TEST_F(DevicePacked, TablesThatAreTooNarrow) {
  for (const int columns : {0, 1, 3}) {
    AttentionCase row = packed_case("int8-head", {{150, 333}}, DType::kFloat16);
    row.mask = {};
    const Problem p = make_problem(row);
    if (has_packed(p)) expect_narrow_table_is_left_out(p, columns);
  }
}

/// Scales of 4 bits near the end of f16's range: K's tokens lose a power of two, which the logits get back.
TEST_F(DevicePacked, LargeKeys) {
  for (const char* format : {"int4-row", "int4-g32", "int4-g64"}) {
    AttentionCase row = packed_case(format, {{100, 700}, {70, 130}}, DType::kFloat16);
    SCOPED_TRACE(row.name);
    Problem p = make_problem(row);
    if (!has_packed(p)) continue;
    const std::int64_t width = row.kv_heads * row.head_dim;
    for (std::int64_t e = 0; e < p.q.numel(); ++e) p.q.set(e, e % row.head_dim == 0 ? 0x1p-10F : 0.0F);
    for (std::int64_t t = 0; t < p.k.numel() / width;
         ++t) {  // of a few tokens alone, in dims that Q lacks, too
      if (t % 37 == 5) p.k.set(t * width + 1, 60000.0F), p.k.set(t * width, -50000.0F);
    }
    p.cache = refilled(p, {0xFF});
    EXPECT_EQ(judge_device(p, run_on_device(p)), "");
  }
}

/// Logits far apart, tile after tile.
TEST_F(DevicePacked, LogitsThatRiseAndFall) {
  for (const char* format : {"fp8", "int8-head", "int4-g32"}) {
    AttentionCase row = packed_case(format, {{100, 1500}, {64, 700}});
    row.mask = {};
    for (const float step : {0.02F, -0.02F, 0.3F, -0.3F}) {
      SCOPED_TRACE(row.name + ", " + std::to_string(step) + " per key");
      Problem p = make_problem(row);
      if (!has_packed(p)) continue;
      set_linear_logits(p, step);
      EXPECT_EQ(judge_device(p, run_on_device(p)), "");
    }
  }
}

}  // namespace
}  // namespace halftone::testing
