// What a recipe chooses from unless it is told: formats with kernels of their own.
#pragma once

#include <vector>

#include "cli/eval/capture.h"
#include "cli/options/format_choice.h"

namespace halftone::cli {

/// Pairs of formats for K and V that fit every layer and that Hopper has kernels for, which read the cache at
/// the speed of memory (the CPU serves every pair alike), each as it is and, if quantised, rotated; where K
/// and V differ, also with K alone rotated; each with K's channels as they are and treated. Scales computed
/// by append only: static ones would be those of the capture, and values beyond it would be clipped. 16-bit
/// values are those of Q: bf16, or fp16 where the capture has F16. Where Hopper has kernels for none of them,
/// such as for V of another width, the same without asking for kernels.
std::vector<FormatChoice> recipe_choices(const std::vector<CapturedLayer>& layers, bool half_precision);

}  // namespace halftone::cli
