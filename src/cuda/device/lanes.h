// How a row of K or V lies over the lanes of append, dequantise and the universal kernel.
#pragma once

namespace halftone::cuda {

inline constexpr int kChunk = 8;  // consecutive dims that a lane holds

}  // namespace halftone::cuda
