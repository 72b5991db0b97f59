// The CPU backend of dequantize().
#pragma once

#include "halftone/cache.h"

namespace halftone::cpu {

/// dequantize() for arguments that planning::validate_dequantize has accepted. Tokens behind a block-table
/// entry that BlockTableMode::kClamped excludes read as zeros. Throws OutOfRange or InvalidArgument before
/// any element is written.
void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out);

}  // namespace halftone::cpu
