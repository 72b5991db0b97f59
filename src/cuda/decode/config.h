// The decode kernels that exist, as a table: a row per (format pair, head_dim, packed rows). Plain C++: host
// code chooses a row, the instances_*.cu files instantiate the rows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda/attention/part_config.h"
#include "halftone/cache.h"

namespace halftone::cuda {

/// Whose matrix instructions a kernel is made of.
enum class Family : std::uint8_t {
  kWarp,       // mma: a warp computes whole tiles for its rows
  kWarpgroup,  // wgmma: a team is a warpgroup, its warps share the rows and divide the tiles
  kRows,       // wgmma: the rows are M, tokens N (rows/)
};

struct DecodeConfig {
  PartConfig k, v;
  int head_dim;     // of K and V
  int row_tiles;    // 8 packed rows each, of one warp
  int row_groups;   // warps that read the same tiles, each for its own rows
  int teams;        // of warps that share a ring
  int piece_tiles;  // tiles of 16 tokens in one copy
  int stages;       // of a team's ring
  Family family;
  friend constexpr bool operator==(const DecodeConfig&, const DecodeConfig&) = default;
};

/// Packed rows of a unit.
constexpr int rows_of(const DecodeConfig& c) { return 8 * c.row_tiles * c.row_groups; }

constexpr int team_warps(const DecodeConfig& c) { return c.family == Family::kWarp ? c.row_groups : 4; }

/// Formats of K and V alike. What a named format does not use goes to the universal kernel.
/// Beside a row, here and below: us of 32 and of 128 requests of 8,192 keys, 8 query heads over one, head_dim
/// 128, on an H200 (the universal kernel: 113 to 117 and 403 to 418).
inline constexpr std::array kDecodeParts{
    parts::kBf16,       // 46.9, 149
    parts::kFp16,       // 47.0, 148
    parts::kFp8,        // 29.0, 81.9
    parts::kFp8Token,   // 29.1, 81.3
    parts::kInt8,       // 29.7, 82.7
    parts::kInt8Token,  // 29.7, 82.5
    parts::kInt8G32,    // 30.9, 86.3
    parts::kInt8G64,    // 30.4, 83.8
    parts::kInt8G128,   // 51.7, 139 at head_dim 256
    parts::kInt4Token,  // 21.4, 49.5
    parts::kInt4G32,    // 23.4, 58.9
    parts::kInt4G64,    // 22.0, 53.3
    parts::kInt4G128,   // 36.4, 79.7 at head_dim 256
};

/// K and V in different formats: K, whose errors the softmax magnifies, has as many bits as V or more.
struct PartPair {
  PartConfig k, v;
};
inline constexpr std::array kMixedPairs{
    PartPair{parts::kBf16, parts::kFp8},             // 37.6, 112
    PartPair{parts::kBf16, parts::kInt8Token},       // 38.4, 117
    PartPair{parts::kBf16, parts::kInt4G32},         // 34.9, 103
    PartPair{parts::kBf16, parts::kInt4Token},       // 34.2, 100
    PartPair{parts::kFp8, parts::kInt8Token},        // 29.9, 83.6
    PartPair{parts::kFp8, parts::kInt4G32},          // 25.6, 67.6
    PartPair{parts::kFp8, parts::kInt4Token},        // 24.9, 64.9
    PartPair{parts::kInt8Token, parts::kFp8},        // 29.5, 83.7
    PartPair{parts::kInt8Token, parts::kInt4G32},    // 26.4, 70.1
    PartPair{parts::kInt8Token, parts::kInt4Token},  // 25.5, 67.7
    PartPair{parts::kInt8Token, parts::kInt4G64},    // 25.6, 67.7
    PartPair{parts::kInt8G32, parts::kInt4G32},      // 26.5, 71.2
};

inline constexpr std::array<int, 7> kDecodeDims{64, 80, 96, 128, 192, 256, 512};
inline constexpr std::array<int, 2> kMixedDims{64, 128};

/// Bytes of a tile with f16 scales, which decide how many tiles a copy brings.
constexpr int typical_tile_bytes(const PartConfig& part, int head_dim) {
  const int scales = part.mode == ScaleMode::kStatic ? 0 : part.mode == ScaleMode::kToken ? 1 : head_dim / 32;
  return 16 * (head_dim * dtype_bits(part.dtype) / 8 + scales * (part.dtype == DType::kInt4 ? 4 : 2));
}

/// How a unit's packed rows are spread over warps.
struct RowShape {
  int row_tiles, row_groups, teams;
  Family family = Family::kWarp;
};
/// Figures: int8-head, and int4-g32, with as many query heads over one.
inline constexpr std::array<RowShape, 5> kRowShapes{{
    {1, 1, 8},                      // 29.7, 82.5; 23.4, 58.9
    {2, 1, 8},                      // 33.2, 87.2; 31.0, 76.3
    {4, 1, 2, Family::kWarpgroup},  // 36.0, 103 of int4-g32
    {8, 1, 2, Family::kRows},       // of 48 rows, batch 32, on an H100: 37.9; 41.5
    {2, 2, 4},  // of fp8 at head_dim 96, 5 queries of 32 heads over 8, batch 16: 86.1; by 16 rows 106
}};
/// Beyond head_dim 128 the accumulators of 16 rows do not fit into registers.
inline constexpr std::array<RowShape, 3> kWideRowShapes{{
    {1, 1, 8},  // of int8-head at head_dim 256: 45.5, 137
    {1, 2, 4},  // 53.3, 171
    {1, 4, 2},  // of fp8, 5 queries of 32 heads over 8, batch 16: 205; by 16 rows 259
}};
/// Four warps have all registers that they can use.
inline constexpr std::array<RowShape, 2> kWidestRowShapes{{
    {1, 1, 4},  // of int8-head at head_dim 512: 82.5, 271
    {1, 2, 2},  // 111.6 at batch 32
}};
inline constexpr std::array<RowShape, 2> kMixedRowShapes{{
    {1, 1, 8},  // beside kMixedPairs
    {2, 1, 8},  // K int8-token, V int4-g32: 30.8, 76.8; 16 rows by {1, 1, 8} 31.4, 115
}};

/// A piece of about 4 to 8 KB, and as many in flight as are useful and fit.
constexpr DecodeConfig make_decode_config(const PartConfig& k, const PartConfig& v, int head_dim,
                                          const RowShape& shape) {
  const int bytes = typical_tile_bytes(k, head_dim) + typical_tile_bytes(v, head_dim);
  if (shape.family == Family::kRows) {
    return {k, v, head_dim, shape.row_tiles, 1, shape.teams, 4, bytes > 2560 ? 4 : 6, shape.family};
  }
  if (shape.family == Family::kWarpgroup) {  // a tile for each warp
    return {k, v, head_dim, shape.row_tiles, 1, shape.teams, 4, 4, shape.family};
  }
  if (head_dim > 256) {  // what shared memory leaves room for
    const bool four_bits = bytes <= 12000, eight_bits = !four_bits && bytes <= 20000;
    const int teams = four_bits || shape.row_groups > 1 ? shape.teams : eight_bits ? 3 : 2;
    const int stages = four_bits ? 3 : 2;
    return {k, v, head_dim, shape.row_tiles, shape.row_groups, teams, 1, stages, shape.family};
  }
  const bool one_warp = shape.row_tiles == 1 && shape.row_groups == 1 && head_dim <= 128;
  const int piece_tiles = one_warp && bytes <= 1536 ? 4 : bytes <= 4352 ? 2 : 1;
  const int piece_bytes = piece_tiles * bytes;
  const int teams = piece_bytes > 10000 && shape.teams > 2 ? shape.teams / 2 : shape.teams;
  const bool three = teams == 8 ? piece_bytes <= 5632 : piece_bytes * teams <= 24000;
  return {k, v, head_dim, shape.row_tiles, shape.row_groups, teams, piece_tiles, three ? 3 : 2, shape.family};
}

/// Whether head_dim is several whole groups of a part.
constexpr bool groups_fit(const PartConfig& part, int head_dim) {
  if (part.mode != ScaleMode::kBlock) return true;
  const int dims = 32 * part.group_blocks;
  return head_dim > dims && head_dim % dims == 0;
}

/// Whether `rows` packed rows of the part beside itself are M of wgmma. Up to 32 of 4 bits are faster as N.
constexpr bool in_rows_family(const PartConfig& part, int head_dim, int rows) {
  if (head_dim != 128) return false;
  return dtype_bits(part.dtype) == 4
             ? rows > 32
             : dtype_bits(part.dtype) == 8 && part.mode != ScaleMode::kBlock && rows > 16;
}
/// Whether the kernels with tokens as M of wgmma serve the part beside itself in units of `rows` packed rows.
constexpr bool in_warpgroup_family(const PartConfig& part, int head_dim, int rows) {
  return head_dim == 128 && rows == 32 && part.dtype == DType::kInt4;
}
/// Whether units of `rows` packed rows ever take less time than smaller ones and than prefill, which reads 16
/// bits as fast in units of 64 rows and more. Of mma, 32 rows take as long as twice 16 but for these.
constexpr bool pays(const PartConfig& part, int head_dim, int rows, Family family) {
  if (dtype_bits(part.dtype) == 16) return rows <= (head_dim > 128 ? 8 : 16);
  const bool groups = part.dtype == DType::kInt8 && part.mode == ScaleMode::kBlock;
  return family != Family::kWarp || rows <= 16 || part.dtype == DType::kFloat8E4M3 ||
         (groups && head_dim == 128);
}

/// Rows that do not exist, that no register budget serves without spills, or that others are faster than are
/// left out.
constexpr bool is_built(const DecodeConfig& c) {
  if (c.head_dim == 0) return false;
#ifdef HALFTONE_CUDA_HEAD_DIM  // a smaller build for development
  if (c.head_dim != HALFTONE_CUDA_HEAD_DIM) return false;
#endif
  if (!groups_fit(c.k, c.head_dim) || !groups_fit(c.v, c.head_dim)) return false;
  if (c.head_dim == 80 && rows_of(c) > 16) return false;
  if (!pays(c.k, c.head_dim, rows_of(c), c.family)) return false;
  if (c.k == c.v && in_rows_family(c.k, c.head_dim, rows_of(c))) return c.family == Family::kRows;
  const bool warpgroups = c.k == c.v && in_warpgroup_family(c.k, c.head_dim, rows_of(c));
  return c.family == (warpgroups ? Family::kWarpgroup : Family::kWarp);
}

/// Whether kernels write new tokens of a type of which all KV heads share a scale: of int8, which a named
/// format has. At 96 dims registers do not hold what is known of one head beside another's row.
constexpr bool appends_shared_scales(DType dtype, int head_dim) {
  return dtype == DType::kInt8 && head_dim != 96;
}

constexpr bool is_mixed(const DecodeConfig& c) { return !(c.k == c.v); }

/// The mixed pairs, then K and V in the same format.
constexpr auto make_decode_table() {
  constexpr std::size_t kSame = kDecodeParts.size() * kDecodeDims.size() * kRowShapes.size(),
                        kMixed = kMixedPairs.size() * kMixedDims.size() * kMixedRowShapes.size();
  std::array<DecodeConfig, kSame + kMixed> table{};
  std::size_t row = 0;
  for (const PartPair& pair : kMixedPairs) {
    for (const int dim : kMixedDims) {
      for (const RowShape& shape : kMixedRowShapes)
        table[row++] = make_decode_config(pair.k, pair.v, dim, shape);
    }
  }
  for (const PartConfig& part : kDecodeParts) {
    for (const int dim : kDecodeDims) {
      if (dim <= 128) {
        for (const RowShape& shape : kRowShapes) table[row++] = make_decode_config(part, part, dim, shape);
      } else if (dim > 256) {
        for (const RowShape& shape : kWidestRowShapes)
          table[row++] = make_decode_config(part, part, dim, shape);
      } else {
        for (const RowShape& shape : kWideRowShapes)
          table[row++] = make_decode_config(part, part, dim, shape);
      }
    }
  }
  return table;
}
inline constexpr auto kDecodeTable = make_decode_table();

/// What a plan stores instead of a row for the universal kernel (decode/universal.h), which serves what the
/// table lacks.
inline constexpr int kUniversalKernel = static_cast<int>(kDecodeTable.size());

/// Row of the table that serves a cache in units of `rows` packed rows (0: of any number); -1 if there is
/// none.
constexpr int find_row(const KvCacheSpec& kv, int rows) {
  for (std::size_t row = 0; row < kDecodeTable.size(); ++row) {
    const DecodeConfig& c = kDecodeTable[row];
    if (is_built(c) && c.head_dim == kv.head_dim && (rows == 0 || rows_of(c) == rows) &&
        serves(c.k, kv.k_format, kv.head_dim) && serves(c.v, kv.v_format, kv.head_dim)) {
      return static_cast<int>(row);
    }
  }
  return -1;
}

}  // namespace halftone::cuda
