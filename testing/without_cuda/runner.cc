#include "testing/runners.h"

namespace halftone::testing {

const Runner* usable_cuda_runner() { return nullptr; }

}  // namespace halftone::testing
