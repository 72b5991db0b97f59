// merge() on CUDA, for arguments that planning::validate_merge has accepted.
#pragma once

#include <vector>

#include "halftone/types.h"

namespace halftone::cuda {

/// Throws Unsupported beyond kMaxMergeParts parts.
void merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
           const TensorView& out, const TensorView& lse, Stream stream);

}  // namespace halftone::cuda
