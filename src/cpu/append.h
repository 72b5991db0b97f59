// The CPU backend of append(), and what run() appends.
#pragma once

#include "halftone/attention.h"
#include "plan/work.h"

namespace halftone::cpu {

/// append() for arguments that planning::validate_append has accepted. Checks all values, then RoPE, Hadamard
/// rotation and quantisation, token by token, in parallel; every token's bytes depend on that token alone.
/// Excluded tokens (BlockTableMode::kClamped) set bit 0 of args.status, if present. Throws OutOfRange or
/// InvalidArgument before any byte is written.
void append(const PagedKv& cache, const AppendArgs& args);

/// The same for what run() appends, after planning::validate_run.
void append_step(const AttentionArgs& args, const planning::Schedule& schedule);

}  // namespace halftone::cpu
