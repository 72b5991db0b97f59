// Random problems on the GPU against the double oracle, in ranges of seeds that are tests of their own.
//
// HALFTONE_FUZZ_CASES problems (2000) from HALFTONE_FUZZ_SEED (0) on; with HALFTONE_FUZZ_HEAD_DIM those of
// them whose K or V has so many dims, latent caches apart. HALFTONE_FUZZ_LATENT_CASES (250) more over latent
// caches alone.
//
// ctest: 4 parts
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "testing/latent_cases.h"
#include "tests/cuda/agreement.h"

namespace halftone::testing {
namespace {

constexpr std::uint64_t kRangeLength = 250;

struct SeedRange {
  std::uint64_t begin, end;
};

std::vector<SeedRange> seed_ranges(const char* count, std::uint64_t usual) {
  const char* wanted = std::getenv(count);
  const char* first = std::getenv("HALFTONE_FUZZ_SEED");
  const std::uint64_t begin = first ? std::strtoull(first, nullptr, 10) : 0;
  const std::uint64_t end = begin + (wanted ? std::strtoull(wanted, nullptr, 10) : usual);
  std::vector<SeedRange> ranges;
  for (std::uint64_t at = begin; at < end; at += kRangeLength)
    ranges.push_back({at, std::min(at + kRangeLength, end)});
  return ranges;
}

std::string range_name(const ::testing::TestParamInfo<SeedRange>& info) {
  return std::to_string(info.param.begin) + "_to_" + std::to_string(info.param.end - 1);
}

class DeviceRandomProblems : public ::testing::TestWithParam<SeedRange> {};

TEST_P(DeviceRandomProblems, AgreeWithTheOracle) {
  const auto [begin, end] = GetParam();
  const char* wanted = std::getenv("HALFTONE_FUZZ_HEAD_DIM");
  const int dim = wanted ? std::atoi(wanted) : 0;
  RowCounts counts;
  for (std::uint64_t seed = begin; seed < end && !HasFailure(); ++seed) {
    const AttentionCase row = random_case(seed);
    if (dim > 0 && (row.rope_dim > 0 || (row.head_dim != dim && row.v_head_dim != dim))) continue;
    SCOPED_TRACE("repeat with HALFTONE_FUZZ_SEED=" + std::to_string(seed) +
                 " HALFTONE_FUZZ_CASES=1 HALFTONE_FUZZ_LATENT_CASES=0");
    counts.run(row);
  }
  RecordProperty("table", counts.table);
  RecordProperty("universal", counts.universal);
  RecordProperty("mixed_in_table", counts.mixed_in_table);
  RecordProperty("plain", counts.plain);
  RecordProperty("latent", counts.latent);
  RecordProperty("coded", counts.coded);
  if (end - begin == kRangeLength && dim == 0 && !HasFailure()) {  // every kind is among them
    const int cases = static_cast<int>(kRangeLength);
    EXPECT_GE(counts.table * 10, cases * 5);
    EXPECT_GE(counts.universal * 10, cases * 3);
    EXPECT_GE(counts.mixed_in_table * 100, cases);
    EXPECT_GE(counts.latent, 4);
    EXPECT_GE(counts.coded * 50, cases);
  }
}

class DeviceRandomLatent : public ::testing::TestWithParam<SeedRange> {};

TEST_P(DeviceRandomLatent, AgreeWithTheOracle) {
  const auto [begin, end] = GetParam();
  for (std::uint64_t seed = begin; seed < end && !HasFailure(); ++seed) {
    SCOPED_TRACE("repeat with HALFTONE_FUZZ_SEED=" + std::to_string(seed) +
                 " HALFTONE_FUZZ_CASES=0 HALFTONE_FUZZ_LATENT_CASES=1");
    const AttentionCase row = random_latent_case(seed);
    ASSERT_NO_THROW((void)plan_on_device(make_problem(row)));
    expect_agrees(row);
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceRandomProblems);  // no cases of one kind
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceRandomLatent);
INSTANTIATE_TEST_SUITE_P(Seeds, DeviceRandomProblems,
                         ::testing::ValuesIn(seed_ranges("HALFTONE_FUZZ_CASES", 2000)), range_name);
INSTANTIATE_TEST_SUITE_P(Seeds, DeviceRandomLatent,
                         ::testing::ValuesIn(seed_ranges("HALFTONE_FUZZ_LATENT_CASES", 250)), range_name);

}  // namespace
}  // namespace halftone::testing
