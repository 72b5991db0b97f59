// The runners by name, for the list of them and for tests of one.
#pragma once

#include "testing/runner.h"

namespace halftone::testing {

const Runner& cpu_runner();
/// Of CUDA builds: device 0, whether or not there is one.
const Runner& cuda_runner();
/// The same where device 0 can run the library's kernels, else, and in builds without CUDA, null.
const Runner* usable_cuda_runner();

}  // namespace halftone::testing
