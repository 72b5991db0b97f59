// What a kernel of dense latent attention receives.
#pragma once

#include <cuda.h>

#include "cuda/attention/params.h"

namespace halftone::cuda {

struct LatentDenseParams {
  AttentionParams attention;
  CUtensorMap latent;  // [page][8 tokens][64 dims][token][dim]: boxes of box_tokens and half of the latent
  CUtensorMap rope;    // the same: boxes of box_tokens and the rope part
  CUtensorMap q;       // [token][head][dim], where q_boxes: boxes of 64 packed rows
  int box_tokens;      // 16, 32 or 64: no more than a page has, or a block brings of a step
  bool q_boxes;        // 64 packed rows of a unit are whole tokens, or a part of one
};

}  // namespace halftone::cuda
