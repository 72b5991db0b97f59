// Bits of a status word: what a call met in values that lie on the device, or that BlockTableMode::kClamped
// tolerates.
#pragma once

#include <cstdint>

namespace halftone {

/// A live block-table entry, slot or position was out of bounds, or (CUDA) a length beyond the block table.
inline constexpr std::int32_t kStatusBadPage = 1;
/// append (CUDA) met a value that is not finite or beyond 2^100.
inline constexpr std::int32_t kStatusNonFinite = 2;
/// run (CUDA): the schedule has more queries than q has rows; the rows beyond were left out.
inline constexpr std::int32_t kStatusBadQueries = 4;
/// append and run (CUDA): a static scale is not finite, positive and normal, or a static min is not finite.
inline constexpr std::int32_t kStatusBadScale = 8;
/// append (CUDA): a value of V, whose f16 scale is stored beside its codes, exceeds kMaxScaledV (rotated V:
/// that over the root of the block).
inline constexpr std::int32_t kStatusLargeV = 16;
/// run (CUDA): the schedule has more keys than k and v have rows, or requests of many queries more than the
/// plan's max_total_kv or max_prompt_kv; the tokens beyond were left out.
inline constexpr std::int32_t kStatusBadKeys = 32;

/// Values of V up to which attention on CUDA takes stored f16 scales: it multiplies probabilities and scales
/// in f16, and what is left of f16's range belongs to small probabilities.
inline constexpr float kMaxScaledV = 2048.0f;

}  // namespace halftone
