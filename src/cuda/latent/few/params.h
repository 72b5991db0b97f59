// What a kernel of latent attention for few heads receives.
#pragma once

#include "cuda/append/params.h"
#include "cuda/attention/params.h"

namespace halftone::cuda {

struct LatentFewParams : AttentionParams, StepParams {};

}  // namespace halftone::cuda
