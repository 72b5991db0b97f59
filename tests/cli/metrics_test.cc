// Distances between tensors: by hand, and with values that are not finite.
#include "cli/figures/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace halftone::cli {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(MetricsTest, FiniteValuesByHand) {
  // Two rows of two heads of two dims; head 1 is off by a tenth of 3-4-5.
  const std::vector<double> truth = {1, 0, 3, 4, 0, 1, 3, 4};
  const std::vector<float> actual = {1, 0, 3, 4, 0, 1, 3, 4.5F};
  const OutputError error = compare_output(truth, actual, 2, 2);
  EXPECT_DOUBLE_EQ(error.relative, std::sqrt(0.25 / 52));
  EXPECT_DOUBLE_EQ(error.head_relative[0], 0);
  EXPECT_DOUBLE_EQ(error.head_relative[1], std::sqrt(0.25 / 50));
  EXPECT_DOUBLE_EQ(error.worst_cosine, 27 / std::sqrt(25 * 29.25));
  EXPECT_DOUBLE_EQ(largest_difference(truth, actual), 0.5);
  const std::vector<float> x = {1, 2, 2, 4}, y = {1, 2, 2, 3.5F};
  EXPECT_DOUBLE_EQ(snr_db(x, y), 10 * std::log10(25 / 0.25));
  EXPECT_EQ(snr_db(x, x), std::numeric_limits<double>::infinity());
}

TEST(MetricsTest, NothingIsWorseThanWhatIsNotFinite) {
  const std::vector<double> truth = {1, 0, 3, 4, 0, 1, 3, 4};
  for (const float bad : {kNan, -kNan, kInf, -kInf}) {
    for (const std::size_t at : {0U, 1U, 4U}) {  // all in head 0
      std::vector<float> actual = {1, 0, 3, 4, 0, 1, 3, 4};
      actual[at] = bad;
      const OutputError error = compare_output(truth, actual, 2, 2);
      EXPECT_EQ(error.relative, kInf);
      EXPECT_EQ(error.head_relative, (std::vector<double>{kInf, 0}));
      EXPECT_EQ(error.worst_cosine, -1);
      EXPECT_EQ(largest_difference(truth, actual), kInf);
      const std::vector<float> exact(truth.begin(), truth.end());
      EXPECT_EQ(snr_db(exact, actual), -kInf);
    }
  }
}

TEST(MetricsTest, ErrorsWhereTheTruthIsZero) {
  const std::vector<double> truth = {0, 0, 1, 1};
  EXPECT_EQ(compare_output(truth, std::vector<float>{0, 0, 1, 1}, 2, 2).head_relative,
            (std::vector<double>{0, 0}));
  const OutputError off = compare_output(truth, std::vector<float>{0, 1, 1, 1}, 2, 2);
  EXPECT_EQ(off.head_relative, (std::vector<double>{kInf, 0}));
  EXPECT_DOUBLE_EQ(off.relative, std::sqrt(0.5));
  const OutputError nan = compare_output(truth, std::vector<float>{0, kNan, 1, 1}, 2, 2);
  EXPECT_EQ(nan.relative, kInf);
  EXPECT_EQ(nan.worst_cosine, -1);
  const std::vector<double> lse = {-kInf, 2};  // a query without keys
  EXPECT_DOUBLE_EQ(largest_difference(lse, std::vector<float>{-kInf, 2.5F}), 0.5);
}

}  // namespace
}  // namespace halftone::cli
