// The dims for which prefill on a GPU multiplies codes of 8 bits.
#pragma once

#include <string>

namespace halftone::testing {

/// Of K and of V.
struct CodedDims {
  int k, v;

  std::string name() const {
    const std::string dims = std::to_string(k);
    return v == k ? dims : dims + ", " + std::to_string(v) + " of V";
  }
};

/// half_int8 has no kernel for the first.
inline constexpr CodedDims kCodedDims[] = {{64, 64},   {128, 128}, {192, 128},
                                           {192, 192}, {256, 256}, {512, 512}};

}  // namespace halftone::testing
