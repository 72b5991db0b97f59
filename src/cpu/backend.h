// The CPU backend: runs anywhere, with Highway's run-time dispatch and OpenMP.
#pragma once

#include "plan/backend.h"

namespace halftone::cpu {

const planning::Backend& backend();

}  // namespace halftone::cpu
