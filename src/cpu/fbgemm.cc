// FBGEMM gen_ai INT4 rows in and out of native pages.
#include <fmt/format.h>

#include <cstring>

#include "cpu/element.h"
#include "cpu/interrupt.h"
#include "cpu/slots.h"
#include "format/codec.h"
#include "format/part.h"
#include "format/place_table.h"
#include "halftone/cache.h"
#include "halftone/error.h"
#include "plan/validate_cache.h"

namespace halftone {
namespace {

// A row's scales must dequantise to finite values: a constant group may have scale 0.
void check_row(const std::uint8_t* row, int groups, std::int64_t token, std::int64_t head) {
  for (int g = 0; g < groups; ++g) {
    codec::FbgemmScaleShift params;
    std::memcpy(&params, row + sizeof(params) * g, sizeof(params));
    const float scale = codec::f32_from_f16(params.scale), shift = codec::f32_from_f16(params.shift);
    if (scale >= 0 && codec::is_finite(scale) && codec::is_finite(shift)) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "rows[{}, {}] has scale {} and shift {} in group {}, but they must be finite and the scale "
            "0 or more: export the row again.",
            token, head, scale, shift, g));
  }
}

template <class Use>
void for_each_row(const PagedKv& cache, KvPart which, const TensorView& rows,
                  const std::vector<std::int64_t>& slots, Use&& use) {
  const PageLayout layout = page_layout(cache.spec);
  const page::Part part = page::part_of(cache.spec, layout, which);
  const page::PlaceTable& table = page::place_table(which, DType::kInt4, part.dim);
  cpu::Interruption interruption;
  const auto tokens = static_cast<std::int64_t>(slots.size());
  for (std::int64_t t = 0; t < tokens && !interruption.poll(t); ++t) {
    for (int head = 0; head < cache.spec.kv_heads; ++head) {
      auto* row = static_cast<std::uint8_t*>(cpu::row_at(rows, t, head));
      use(part, table.token(static_cast<int>(slots[t] % kTileTokens)),
          static_cast<int>(slots[t] % kTileTokens), cpu::tile_of(cache, layout, slots[t], head), row);
    }
  }
  interruption.check();
}

}  // namespace

void import_fbgemm_int4(const PagedKv& cache, KvPart which, const TensorView& rows, const TensorView& slots) {
  const int groups = planning::validate_fbgemm(cache, which, rows, slots);
  const std::vector<std::int64_t> of_token = cpu::explicit_slots(cache, slots, true);
  for (std::int64_t t = 0; t < rows.shape[0]; ++t) {
    for (std::int64_t head = 0; head < rows.shape[1]; ++head) {
      check_row(static_cast<const std::uint8_t*>(cpu::row_at(rows, t, head)), groups, t, head);
    }
  }
  for_each_row(cache, which, rows, of_token,
               [&](const page::Part& part, const std::uint16_t* places, int token, std::uint8_t* tile,
                   const std::uint8_t* row) {
                 for (int g = 0; g < groups; ++g) {
                   std::memcpy(tile + part.scale_offset(token, g), row + 4 * g, 2);
                   std::memcpy(tile + part.min_offset(token, g), row + 4 * g + 2, 2);
                 }
                 for (int u = 0; u < part.dim / 2; ++u)
                   tile[part.data_offset + places[u]] = row[4 * groups + u];
               });
}

void export_fbgemm_int4(const PagedKv& cache, KvPart which, const TensorView& slots, const TensorView& rows) {
  const int groups = planning::validate_fbgemm(cache, which, rows, slots);
  const std::vector<std::int64_t> of_token = cpu::explicit_slots(cache, slots, false);
  for_each_row(cache, which, rows, of_token,
               [&](const page::Part& part, const std::uint16_t* places, int token, const std::uint8_t* tile,
                   std::uint8_t* row) {
                 for (int g = 0; g < groups; ++g) {
                   std::memcpy(row + 4 * g, tile + part.scale_offset(token, g), 2);
                   std::memcpy(row + 4 * g + 2, tile + part.min_offset(token, g), 2);
                 }
                 for (int u = 0; u < part.dim / 2; ++u)
                   row[4 * groups + u] = tile[part.data_offset + places[u]];
               });
}

}  // namespace halftone
