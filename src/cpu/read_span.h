// One span of one token and KV head, from codes to values.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "format/codec.h"
#include "format/head_dim.h"
#include "format/part.h"
#include "format/place_table.h"

namespace halftone::cpu {

/// A stored scale or min.
inline float load_param(DType dtype, const std::uint8_t* address) {
  if (dtype == DType::kFloat16) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, address, sizeof(bits));
    return codec::f32_from_f16(bits);
  }
  if (dtype == DType::kFloat8E8M0) return codec::f32_from_e8m0(*address);
  float value = 0;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

/// `offset`: of the token within its page, whose tile `tile` is.
inline codec::Params params_at(const page::Part& part, const StaticScale& given, const std::uint8_t* tile,
                               int offset, int head, int group) {
  const KvFormat& format = part.format;
  codec::Params params;
  if (format.static_scale()) {
    const int i = format.granularity == Granularity::kHead ? head : 0;
    params.scale = static_cast<const float*>(given.scale.data)[i];
    if (format.asymmetric) params.min = static_cast<const float*>(given.min.data)[i];
  } else if (part.groups > 0) {
    const int before = offset / kTileTokens, token = offset % kTileTokens;
    params.scale = load_param(format.scale_dtype, tile + part.scale_offset(before, token, group));
    if (format.asymmetric) params.min = load_param(format.scale_dtype, tile + part.min_offset(token, group));
  }
  return params;
}

/// The codes of a token, in the order of its dims. `table`: page::table_of(part).
template <class Code>
void gather(const page::Part& part, const page::PlaceTable* table, int token, const std::uint8_t* tile,
            Code* codes) {
  const std::uint8_t* data = tile + part.data_offset;
  if constexpr (sizeof(Code) == 2) {
    std::memcpy(codes, data + token * part.row_bytes, static_cast<std::size_t>(part.dim) * 2);
  } else if (table == nullptr) {
    const std::uint8_t* row = data + token * part.row_bytes;
    if (part.format.dtype == DType::kInt4) {
      for (int d = 0; d < part.dim; ++d) codes[d] = row[d / 2] >> (d % 2 * 4) & 15;
    } else {
      std::memcpy(codes, row, static_cast<std::size_t>(part.dim));
    }
  } else {
    const std::uint16_t* bytes = table->token(token);
    if (part.format.dtype == DType::kInt4) {
      for (int u = 0; u < table->units; ++u) {
        codes[2 * u] = data[bytes[u]] & 15;
        codes[2 * u + 1] = data[bytes[u]] >> 4;
      }
    } else {
      for (int u = 0; u < table->units; ++u) codes[u] = data[bytes[u]];
    }
  }
}

/// What dequantize() gives, but for a rotation. `offset` as above.
template <class Codec>
void read_span(const page::Part& part, const page::PlaceTable* table, const StaticScale& given,
               const std::uint8_t* tile, int offset, int head, float* x) {
  std::array<typename Codec::Code, kMaxSpanDims> codes;
  gather(part, table, offset % kTileTokens, tile, codes.data());
  const int groups = std::max(part.groups, 1), width = part.dim / groups;
  for (int g = 0; g < groups; ++g) {
    const codec::Params params = params_at(part, given, tile, offset, head, g);
    for (int d = g * width; d < (g + 1) * width; ++d) x[d] = Codec::decode(params, codes[d]);
  }
}

}  // namespace halftone::cpu
