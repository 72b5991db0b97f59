// What a kernel of latent attention for many heads over bf16 receives.
#pragma once

#include <cuda.h>

#include "cuda/append/params.h"
#include "cuda/attention/params.h"

namespace halftone::cuda {

struct LatentBf16Params {
  AttentionParams attention;
  StepParams step;
  bool ahead;   // whether tokens of lists come to L2 a step ahead: worth it where nobody read them lately
  bool copied;  // lists and their tokens come from the kernel before this one, which has waited for those
                // before
  CUtensorMap latent;  // [page][8 tokens][64 dims][token][dim]: boxes of box_tokens and half of the latent
  CUtensorMap rope;    // the same: boxes of box_tokens and the rope part
  CUtensorMap q;       // [token][head][dim], where q_boxes: boxes of 64 packed rows
  int box_tokens;      // 16, 32 or 64: no more than a page has, or a block brings of a step
  bool q_boxes;        // 64 packed rows of a unit are whole tokens, or a part of one
};

}  // namespace halftone::cuda
