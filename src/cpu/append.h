// The CPU backend of append().
#pragma once

#include "halftone/cache.h"

namespace halftone::cpu {

/// append() for arguments that planning::validate_append has accepted. Checks all values, then RoPE, Hadamard
/// rotation and quantisation, token by token, in parallel; every token's bytes depend on that token alone.
/// Excluded tokens (BlockTableMode::kClamped) set bit 0 of args.status, if present. Throws OutOfRange or
/// InvalidArgument before any byte is written.
void append(const PagedKv& cache, const AppendArgs& args);

}  // namespace halftone::cpu
