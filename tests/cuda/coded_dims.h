// The dims for which prefill on a GPU multiplies codes of 8 bits.
#pragma once

namespace halftone::testing {

/// Of K; of V value_dim(). half_int8 has no kernel for the first.
inline constexpr int kCodedDims[] = {64, 128, 192, 256, 512};
constexpr int value_dim(int head_dim) { return head_dim == 192 ? 128 : head_dim; }

}  // namespace halftone::testing
