// What a decode kernel receives.
#pragma once

#include "cuda/append/params.h"
#include "cuda/attention/params.h"

namespace halftone::cuda {

struct DecodeParams : AttentionParams, StepParams {};

}  // namespace halftone::cuda
