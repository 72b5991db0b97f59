// What a decode kernel receives.
#pragma once

#include "cuda/append/params.h"
#include "cuda/attention/params.h"

namespace halftone::cuda {

/// New tokens are the last keys of a request, one for each of its queries.
struct DecodeParams : AttentionParams {
  // With AttentionParams::cache_settled: the promise is about older tokens. Pieces with new ones are read
  // only when the previous kernel of the stream has ended and, where `appends`, this one has written them.
  bool new_tokens_late;
  bool appends;           // writes the new tokens
  std::int32_t* lengths;  // [batch], which become the schedule's; null: no
  AppendParams append;    // with `appends`: token t is query t's
};

}  // namespace halftone::cuda
