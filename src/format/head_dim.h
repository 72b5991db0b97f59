// Head dimensions, latent dimensions and page sizes that every backend has.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "halftone/format.h"

namespace halftone {

inline constexpr std::array<int, 7> kHeadDims = {64, 80, 96, 128, 192, 256, 512};
inline constexpr std::array<int, 2> kLatentDims = {256, 512};  ///< of V
inline constexpr std::array<int, 2> kRopeDims = {32, 64};      ///< beside a latent
inline constexpr std::array<int, 5> kPageSizes = {16, 32, 64, 128, 256};

inline constexpr int kMaxSpanDims = std::max(kHeadDims.back(), kLatentDims.back());
inline constexpr int kMaxRowDims = std::max(kHeadDims.back(), kLatentDims.back() + kRopeDims.back());

/// The choice with the smallest distance to `value`; of two, the larger.
int nearest_choice(std::span<const int> choices, std::int64_t value);

/// Throws InvalidArgument naming `argument` unless `value` is one of kHeadDims. The remedy is the next larger
/// one, to be padded with zeros: a smaller one would cut the head.
void check_head_dim(std::int64_t value, std::string_view argument);

/// Throws InvalidArgument or Unsupported unless `format` can store a latent of so many dims.
void check_latent_format(const KvFormat& format, int latent_dim, std::string_view argument);

}  // namespace halftone
