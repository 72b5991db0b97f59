// What rows of the case table are made of: formats, dims and options, in lists that rows walk through or draw
// from.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

inline constexpr std::array kDims = {64, 80, 96, 128, 192, 256};
inline constexpr int kWideDim = 512;  ///< also one; in rows of its own, behind those of the others
inline constexpr std::array kPages = {16, 32, 64, 128, 256};
inline constexpr std::array kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr std::array kPolicies = {SplitPolicy::kReproducible, SplitPolicy::kFast,
                                         SplitPolicy::kBatchInvariant};
inline constexpr std::array<Mask, 9> kMasks = {Mask{},
                                               Mask{.causal = true},
                                               Mask{.causal = true, .window_left = 32},
                                               Mask{.window_left = 16, .window_right = 16},
                                               Mask{.causal = true, .window_left = 0},
                                               Mask{.window_right = 3},
                                               Mask{.causal = true, .window_left = 200},
                                               Mask{.window_left = 5},
                                               Mask{.causal = true, .window_left = 70, .window_right = 4}};

/// Every named format and general forms of each remaining combination of dtype, granularity and symmetry.
const std::vector<std::string>& format_texts();

/// Whether groups of the format divide `dim`.
bool fits(const std::string& format, int dim);

/// Pairs that deployments use: K with more bits than V, and neighbours in size either way.
struct FormatPair {
  const char* k;
  const char* v;
};
inline constexpr std::array kMixedPairs = {
    FormatPair{"bf16", "fp8"},
    FormatPair{"bf16", "int8-tensor"},
    FormatPair{"bf16", "int8-head"},
    FormatPair{"bf16", "int4-row"},
    FormatPair{"bf16", "int4-g32"},
    FormatPair{"bf16", "int4-g64"},
    FormatPair{"fp8", "int8-static-head"},
    FormatPair{"fp8", "int8-head"},
    FormatPair{"fp8-static-head", "int4-row"},
    FormatPair{"fp8-static-head", "int4-g32"},
    FormatPair{"fp8", "int4-g64"},
    FormatPair{"fp8-token-head", "int4-row"},
    FormatPair{"fp8-token", "int4-g32"},
    FormatPair{"int8-tensor", "fp8-static-head"},
    FormatPair{"int8-static-head", "int8-token"},
    FormatPair{"int8-static-head", "int4-token"},
    FormatPair{"int8-tensor", "int4-g32"},
    FormatPair{"int8-head", "fp8"},
    FormatPair{"int8-head", "int8-static-head"},
    FormatPair{"int8-token", "int4-row"},
    FormatPair{"int8-head", "int4-g32"},
    FormatPair{"int8-head", "int4-g64"},
    FormatPair{"int8-g32", "int4-g32"},
    FormatPair{"int4-row", "int8-head"},
    FormatPair{"int4-row", "int4-g32"},
    FormatPair{"int4-g32", "int8-token"},
    FormatPair{"int4-g32", "int4-row"},
};
inline constexpr std::array kMixedDims = {64, 128};

}  // namespace halftone::testing
