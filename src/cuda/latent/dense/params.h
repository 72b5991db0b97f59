// What a kernel of dense latent attention receives.
#pragma once

#include <cuda.h>

#include "cuda/attention/params.h"

namespace halftone::cuda {

struct LatentDenseParams {
  AttentionParams attention;
  CUtensorMap kv;  // [page][token][dim]: boxes of 64 dims and box_tokens
  CUtensorMap q;   // [token][head][dim], where q_boxes: boxes of 64 packed rows
  int box_tokens;  // 16 or 32
  bool q_boxes;    // 64 packed rows of a unit are whole tokens, or a part of one
};

}  // namespace halftone::cuda
