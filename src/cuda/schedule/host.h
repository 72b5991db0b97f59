// schedule() on CUDA, for arguments that planning::validate_schedule has accepted.
#pragma once

#include "plan/plan.h"

namespace halftone::cuda {

void schedule(const Plan::Impl& plan, const SequenceLengths& lengths, std::byte* workspace, Stream stream);

}  // namespace halftone::cuda
