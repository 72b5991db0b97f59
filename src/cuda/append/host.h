// append() on CUDA, for arguments that planning::validate_append has accepted.
#pragma once

#include "halftone/cache.h"

namespace halftone::cuda {

void append(const PagedKv& cache, const AppendArgs& args, Stream stream);

}  // namespace halftone::cuda
