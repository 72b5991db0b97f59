// The CPU backend of merge().
#pragma once

#include <vector>

#include "halftone/types.h"

namespace halftone::cpu {

/// As halftone::merge().
void merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
           const TensorView& out, const TensorView& lse);

}  // namespace halftone::cpu
