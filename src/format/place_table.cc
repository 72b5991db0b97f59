#include "format/place_table.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>
#include <vector>

#include "format/head_dim.h"
#include "format/page.h"

namespace halftone::page {
namespace {

struct Entry {
  std::once_flag once;
  std::vector<std::uint16_t> bytes;
  PlaceTable table;
};

void fill(Entry& entry, KvPart which, DType dtype, int dim) {
  const int dims_per_unit = dtype == DType::kInt4 ? 2 : 1;
  entry.table.units = dim / dims_per_unit;
  entry.bytes.reserve(static_cast<std::size_t>(kTileTokens * entry.table.units));
  for (int token = 0; token < kTileTokens; ++token) {
    for (int d = 0; d < dim; d += dims_per_unit) {
      const Place place = which == KvPart::kK ? place_k(dtype, token, d, dim) : place_v(dtype, token, d, dim);
      entry.bytes.push_back(static_cast<std::uint16_t>(place.byte));
    }
  }
  entry.table.bytes = entry.bytes.data();
}

}  // namespace

const PlaceTable& place_table(KvPart which, DType dtype, int dim) {
  static std::array<Entry, 2 * 3 * kHeadDims.size()> entries;
  const std::size_t kind = dtype == DType::kInt4 ? 0 : dtype == DType::kInt8 ? 1 : 2;
  const auto dim_index = static_cast<std::size_t>(std::ranges::find(kHeadDims, dim) - kHeadDims.begin());
  Entry& entry = entries[(dim_index * 3 + kind) * 2 + (which == KvPart::kV ? 1 : 0)];
  std::call_once(entry.once, [&] { fill(entry, which, dtype, dim); });
  return entry.table;
}

}  // namespace halftone::page
