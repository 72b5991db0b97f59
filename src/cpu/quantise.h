// Rows of fp32 to codes, in vectors: the bits of codec.h.
#pragma once

#include <cstdint>

#include "format/codec.h"
#include "halftone/types.h"

namespace halftone::cpu {

/// Extent of `count` values; NaN does not count.
codec::Range row_range(const float* x, int count);

/// codec::Codec<dtype, asymmetric>::encode() of `count` values, to as many codes of 16 bits or in a byte
/// each. 16 bits: none is NaN.
void encode_row(DType dtype, bool asymmetric, const codec::Params& params, const float* x, int count,
                void* codes);

}  // namespace halftone::cpu
