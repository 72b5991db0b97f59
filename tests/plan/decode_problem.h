// A problem that plan() takes, for tests that change one thing of it.
#pragma once

#include "halftone/attention.h"
#include "halftone/format.h"
#include "tests/kv_of.h"

namespace halftone {

/// Decode of 4 requests of up to 8,192 keys, 32 query heads over 8 KV heads, int8-head, 16 workers, on the
/// CPU.
inline AttentionProblem decode_problem() {
  AttentionProblem p;
  p.batch = 4;
  p.q_heads = 32;
  p.kv = KvCacheSpec::separate(parse_format("int8-head"), parse_format("int8-head"), 8, 128);
  p.max_kv_len = 8192;
  p.workers = 16;
  return p;
}

}  // namespace halftone
