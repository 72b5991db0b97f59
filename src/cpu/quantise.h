// Rows of fp32 to codes, in vectors: the bits of codec.h.
#pragma once

#include <cstdint>

#include "format/codec.h"
#include "halftone/types.h"

namespace halftone::cpu {

/// Extent of `count` finite values, at least one.
codec::Range row_range(const float* x, int count);

/// codec::Codec<dtype, asymmetric>::encode() of `count` values, none of them NaN, to as many codes, of 16
/// bits or in a byte each.
void encode_row(DType dtype, bool asymmetric, const codec::Params& params, const float* x, int count,
                void* codes);

}  // namespace halftone::cpu
