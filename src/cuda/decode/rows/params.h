// What a decode kernel with rows as M receives.
#pragma once

#include <cuda.h>

#include "cuda/attention/params.h"

namespace halftone::cuda {

struct DecodeRowsParams {
  AttentionParams attention;
  CUtensorMap k;           // codes of K, page_code_map()
  std::int32_t run_tiles;  // tiles of a page that one copy of K brings: 1, 2 or 4
};

}  // namespace halftone::cuda
