// The list of runners.
#include "testing/runners.h"

namespace halftone::testing {

const std::vector<const Runner*>& runners() {
  static const std::vector<const Runner*> all = [] {
    std::vector<const Runner*> found = {&cpu_runner()};
    if (const Runner* cuda = usable_cuda_runner()) found.push_back(cuda);
    return found;
  }();
  return all;
}

}  // namespace halftone::testing
