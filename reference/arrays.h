// Arrays of numbers as those of another type. What bits mean is spelt out; the library's own conversions are
// not used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "halftone/types.h"

namespace halftone::reference::loops {

/// to[i] = from[i]: float to double, or double to float.
template <class From, class To>
void convert(const From* from, std::size_t count, To* to);

/// to_bits16() and from_bits16() of arrays.
void to_bits16(DType dtype, const float* from, std::size_t count, std::uint16_t* to);
void from_bits16(DType dtype, const std::uint16_t* from, std::size_t count, float* to);

/// The largest |x[i]| of finite x[i], or 0.
double largest_magnitude(const double* x, std::size_t count);

}  // namespace halftone::reference::loops
