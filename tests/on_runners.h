// Tests that are written once and run on every backend of this machine: TEST_P over runners(), names that end
// in /cpu and /cuda. CMake labels files that include this one `cuda` as well in CUDA builds.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "testing/runner.h"

namespace halftone::testing {

class OnRunners : public ::testing::TestWithParam<const Runner*> {
 protected:
  const Runner& runner() const { return *GetParam(); }
  Outputs run(const Problem& p) const { return runner().run(p); }
  std::string judge(const Problem& p, const Outputs& outputs) const { return runner().judge(p, outputs); }

  /// For cases that a backend may lack; a test that asks must find one that is served.
  bool serves(const Problem& p) {
    asked_ = true;
    const bool served = runner().serves(p);
    served_ += served ? 1 : 0;
    return served;
  }
  void TearDown() override {
    EXPECT_TRUE(!asked_ || served_ > 0) << runner().name() << " serves none of the cases";
  }

 private:
  bool asked_ = false;
  int served_ = 0;
};

inline std::string runner_name(const ::testing::TestParamInfo<const Runner*>& info) {
  return std::string(info.param->name());
}

}  // namespace halftone::testing

/// Instantiates the tests TEST_P(suite, ...) of this file.
#define HALFTONE_ON_EVERY_RUNNER(suite)                                                     \
  INSTANTIATE_TEST_SUITE_P(All, suite, ::testing::ValuesIn(::halftone::testing::runners()), \
                           ::halftone::testing::runner_name)
