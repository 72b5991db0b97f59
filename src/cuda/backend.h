// The CUDA backend: Hopper (sm_90a). Nothing of it allocates device memory, synchronises or reads device
// memory on the host.
#pragma once

#include "plan/backend.h"

namespace halftone::cuda {

const planning::Backend& backend();

}  // namespace halftone::cuda
