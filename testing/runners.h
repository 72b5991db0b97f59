// The runners by name, for the list of them and for tests of one.
#pragma once

#include "testing/runner.h"

namespace halftone::testing {

const Runner& cpu_runner();
/// Of CUDA builds: device 0, whether or not there is one.
const Runner& cuda_runner();
/// Of CUDA builds: whether device 0 can run the library's kernels.
bool has_cuda_runner();

}  // namespace halftone::testing
