// The list of runners: the one place of the tests that asks whether the build has CUDA.
#include "testing/runners.h"

namespace halftone::testing {

const std::vector<const Runner*>& runners() {
  static const std::vector<const Runner*> all = [] {
    std::vector<const Runner*> found = {&cpu_runner()};
#ifdef HALFTONE_WITH_CUDA
    if (has_cuda_runner()) found.push_back(&cuda_runner());
#endif
    return found;
  }();
  return all;
}

}  // namespace halftone::testing
