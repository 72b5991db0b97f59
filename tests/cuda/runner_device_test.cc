// The GPU takes part in the tests that are written once for every backend.
#include <gtest/gtest.h>

#include "testing/runners.h"

namespace halftone::testing {
namespace {

TEST(Runners, TheGpuIsOneOfThem) {
  ASSERT_EQ(runners().size(), 2U);
  EXPECT_EQ(runners()[0]->name(), "cpu");
  EXPECT_EQ(runners()[1]->name(), "cuda");
  EXPECT_EQ(runners()[1]->device().type, DeviceType::kCuda);
}

}  // namespace
}  // namespace halftone::testing
