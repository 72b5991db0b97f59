// page.h's places as tables, for code that walks a whole token: computed once from page.h, the only
// description.
#pragma once

#include <cstdint>

#include "format/part.h"
#include "halftone/cache.h"

namespace halftone::page {

/// Byte offsets within a tile's data part. A unit is what one byte holds: one dim of an 8-bit format, or the
/// dims (2u, 2u + 1) of a 4-bit format in its low and high nibble.
struct PlaceTable {
  int units = 0;                         ///< per token: dim for 8 bits, dim / 2 for 4 bits
  const std::uint16_t* bytes = nullptr;  ///< [kTileTokens, units]

  const std::uint16_t* token(int t) const { return bytes + t * units; }
};

/// The table of a packed `dtype` (kFloat8E4M3, kInt8 or kInt4) and a valid head dimension. Lives until the
/// process ends; thread-safe.
const PlaceTable& place_table(KvPart which, DType dtype, int dim);

/// The table of a span in fragments; null for one in rows.
inline const PlaceTable* table_of(const Part& part) {
  return part.order == KvOrder::kRows ? nullptr : &place_table(part.which, part.format.dtype, part.dim);
}

}  // namespace halftone::page
