// V of a cache in any format as values of E4M3: what run() writes into the workspace before `fp8` prefill
// over values that have no codes of E4M3 with one scale.
#pragma once

#include "cuda/dequantize/params.h"

namespace halftone::cuda {

/// V of a request and head has one power of two: the smallest that leaves its largest magnitude at 448 at
/// most, of those that are finite and that a query sees. Infinities become NaN.
struct StageValuesParams {
  DequantizeParams rows;     // out: tiles of value_tiles.h, [kv_heads, rows / 16, dim, 16]; whole 64 dims
  const std::int32_t* cu_q;  // [batch + 1] queries of the requests
  std::int32_t window_left;  // keys before a request's first query that it sees; -1: all
  float* units;              // [batch, kv_heads] what values are multiplied by; 0 where all are zero
};

/// Three kernels, which read V twice. cudaError_t as int.
int launch_stage_values(const StageValuesParams& params, void* stream);

}  // namespace halftone::cuda
