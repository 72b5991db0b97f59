// Bits of a status word: what a call met in values that lie on the device, or that BlockTableMode::kClamped
// tolerates.
#pragma once

#include <cstdint>

namespace halftone {

/// A live block-table entry, slot or position was out of bounds.
inline constexpr std::int32_t kStatusBadPage = 1;
/// append (CUDA) met a value that is not finite or beyond 2^100.
inline constexpr std::int32_t kStatusNonFinite = 2;

}  // namespace halftone
