// What a kernel of latent attention for many heads over codes receives.
#pragma once

#include <cuda.h>

#include "cuda/append/params.h"
#include "cuda/attention/params.h"

namespace halftone::cuda {

struct LatentWideParams {
  AttentionParams attention;
  StepParams step;
  CUtensorMap q;  // [token][head][dim], where q_boxes: boxes of 64 packed rows
  bool q_boxes;   // 64 packed rows of a unit are whole tokens, or a part of one
};

}  // namespace halftone::cuda
