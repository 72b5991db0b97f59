// The table of decode kernels: which row serves a cache, with K and V in the same and in different formats.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/decode/config.h"
#include "testing/cases.h"
#include "tests/kv_of.h"

namespace halftone::cuda {
namespace {

KvCacheSpec spec_of(const char* k, const char* v, int head_dim) {
  return {.k_format = parse_format(k), .v_format = parse_format(v), .kv_heads = 1, .head_dim = head_dim};
}

/// A development build has one head_dim.
bool has_dim(int head_dim) { return find_row(spec_of("bf16", "bf16", head_dim), 8) >= 0; }

std::vector<KvCacheSpec> mixed_specs() {
  std::vector<KvCacheSpec> specs;
  for (const testing::AttentionCase& row : testing::attention_cases()) {
    if (row.name.find("mixed-") == 0 && has_dim(row.head_dim)) {
      AttentionProblem problem = testing::attention_problem(row);
      specs.push_back(spec_of(problem));
    }
  }
  return specs;
}

TEST(DecodeTable, MixedCasesMeetTheirKernels) {
  int served = 0;
  for (const KvCacheSpec& kv : mixed_specs()) {
    const std::string name = format_name(kv.k_format) + ":" + format_name(kv.v_format);
    if (find_row(kv, 0) < 0) continue;  // for the universal kernel
    ++served;
    for (const int rows : {8, 16}) {
      const int row = find_row(kv, rows);
      ASSERT_GE(row, 0) << name << " at head_dim " << kv.head_dim << ", " << rows << " rows";
      const DecodeConfig& c = kDecodeTable[static_cast<std::size_t>(row)];
      EXPECT_TRUE(is_mixed(c)) << name;
      EXPECT_EQ(rows_of(c), rows) << name;
      EXPECT_EQ(c.k.dtype, kv.k_format.dtype) << name;
      EXPECT_EQ(c.v.dtype, kv.v_format.dtype) << name;
      // What the ring and the copies are sized for.
      EXPECT_GE(typical_tile_bytes(c.k, kv.head_dim) + typical_tile_bytes(c.v, kv.head_dim),
                page_layout(kv).tile_bytes)
          << name;
    }
  }
  EXPECT_GE(served, has_dim(64) && has_dim(128) ? static_cast<int>(kMixedPairs.size()) * 2 - 1 : 0);
}

TEST(DecodeTable, MixedKernelsHaveCases) {
  const std::vector<KvCacheSpec> specs = mixed_specs();
  for (const DecodeConfig& c : kDecodeTable) {
    if (!is_built(c) || !is_mixed(c)) continue;
    EXPECT_TRUE(std::any_of(specs.begin(), specs.end(),
                            [&](const KvCacheSpec& kv) {
                              const int row = find_row(kv, rows_of(c));
                              return row >= 0 && kDecodeTable[static_cast<std::size_t>(row)] == c;
                            }))
        << "K " << dtype_name(c.k.dtype) << ", V " << dtype_name(c.v.dtype) << ", head_dim " << c.head_dim;
  }
}

TEST(DecodeTable, OrderOfKAndVMatters) {
  if (!has_dim(128)) GTEST_SKIP() << "this build has no kernels for head_dim 128";
  EXPECT_GE(find_row(spec_of("bf16", "int4-g32", 128), 0), 0);
  EXPECT_EQ(find_row(spec_of("int4-g32", "bf16", 128), 0), -1);
  EXPECT_NE(find_row(spec_of("fp8", "int8-head", 128), 8), find_row(spec_of("int8-head", "fp8", 128), 8));
  EXPECT_EQ(find_row(spec_of("int8-head", "int4-g32", 128), 32), -1);
  EXPECT_EQ(find_row(spec_of("int8-head", "int4-g32-f32", 128), 0), -1);
  EXPECT_EQ(find_row(spec_of("int8-token-asym", "int4-g32", 128), 0), -1);
}

TEST(DecodeTable, ManyRowsAreServedByWarpgroups) {
  if (!has_dim(128)) GTEST_SKIP() << "this build has no kernels for head_dim 128";
  const auto family = [](const char* format, int rows) {
    const int row = find_row(spec_of(format, format, 128), rows);
    return row < 0 ? Family::kWarp : kDecodeTable[static_cast<std::size_t>(row)].family;
  };
  for (const char* format : {"bf16", "fp16"}) {  // prefill's
    EXPECT_GE(find_row(spec_of(format, format, 128), 16), 0) << format;
    for (const int rows : {32, 64}) EXPECT_EQ(find_row(spec_of(format, format, 128), rows), -1) << format;
  }
  // Units of 64 rows hold what is between 16, or 32, and that, too.
  for (const char* format : {"fp8", "fp8-token", "int8-tensor", "int8-head", "int8-token"}) {
    EXPECT_EQ(family(format, 16), Family::kWarp) << format;
    EXPECT_EQ(find_row(spec_of(format, format, 128), 32), -1) << format;
    EXPECT_EQ(family(format, 64), Family::kRows) << format;
  }
  for (const char* format : {"int4-token", "int4-row", "int4-g32", "int4-g64"}) {
    EXPECT_EQ(family(format, 16), Family::kWarp) << format;
    EXPECT_EQ(family(format, 32), Family::kWarpgroup) << format;
    EXPECT_EQ(family(format, 64), Family::kRows) << format;
  }
  EXPECT_EQ(find_row(spec_of("fp8", "int8-head", 128), 64), -1);
  EXPECT_EQ(find_row(spec_of("int8-head", "int8-head", 64), 64), -1);
}

/// Units of 32 rows of mma, where they are faster than two of 16.
TEST(DecodeTable, FewFormatsHaveUnitsOf32Rows) {
  const auto has = [](const char* format, int dim) {
    return find_row(spec_of(format, format, dim), 32) >= 0;
  };
  for (const int dim : {64, 96, 192, 256}) {
    if (!has_dim(dim)) continue;
    for (const char* format : {"fp8", "fp8-token"}) EXPECT_TRUE(has(format, dim)) << format << ", " << dim;
    for (const char* format : {"bf16", "int8-head", "int8-token", "int4-row", "int4-g32"}) {
      EXPECT_FALSE(has(format, dim)) << format << ", " << dim;
    }
  }
  if (!has_dim(128)) return;
  for (const char* format : {"int8-g32", "int8-g64"}) EXPECT_TRUE(has(format, 128)) << format;
}

TEST(DecodeTable, EveryNamedFormatHasKernels) {
  for (const NamedFormat& named : named_formats()) {
    for (const int dim : kDecodeDims) {
      if (!has_dim(dim) || dim % std::max(named.format.group_size, 1) != 0) continue;
      for (const int rows : {8, 16}) {
        if (dim > 128 && rows > 8 && !named.format.quantised()) continue;  // prefill's
        KvCacheSpec kv = spec_of("bf16", "bf16", dim);
        kv.k_format = kv.v_format = named.format;
        EXPECT_GE(find_row(kv, rows), 0) << named.name << " at head_dim " << dim << ", " << rows << " rows";
      }
    }
  }
  EXPECT_EQ(find_row(spec_of("int4-g64-sym", "int4-g64-sym", 128), 0), -1);
}

/// Every format that divides it, in units of 8 and of 16 rows.
TEST(DecodeTable, HeadDim80) {
  if (!has_dim(80)) GTEST_SKIP() << "this build has no kernels for head_dim 80";
  for (const char* format : {"bf16", "fp16", "fp8", "fp8-static-head", "fp8-token-head", "int8-tensor",
                             "int8-token", "int8-head", "int4-row", "int4-token"}) {
    const KvCacheSpec kv = spec_of(format, format, 80);
    for (const int rows : {8, 16}) {
      const int row = find_row(kv, rows);
      ASSERT_GE(row, 0) << format << ", " << rows << " rows";
      const DecodeConfig& c = kDecodeTable[static_cast<std::size_t>(row)];
      EXPECT_EQ(rows_of(c), rows) << format;
    }
    EXPECT_EQ(find_row(kv, 32), -1) << format;
  }
  EXPECT_EQ(find_row(spec_of("bf16", "fp8", 80), 0), -1);
}

TEST(DecodeTable, AGroupAsWideAsTheHeadIsATokensScale) {
  for (const int dim : {64, 128}) {
    if (!has_dim(dim)) continue;
    const std::string wide = "int4-g" + std::to_string(dim);
    for (const int rows : {8, 16, 32, 64}) {
      EXPECT_EQ(find_row(spec_of(wide.c_str(), wide.c_str(), dim), rows),
                find_row(spec_of("int4-row", "int4-row", dim), rows));
    }
    EXPECT_EQ(page_layout(spec_of(wide.c_str(), wide.c_str(), dim)).tile_bytes,
              page_layout(spec_of("int4-row", "int4-row", dim)).tile_bytes);
    EXPECT_EQ(find_row(spec_of("bf16", wide.c_str(), dim), 8), find_row(spec_of("bf16", "int4-row", dim), 8));
  }
}

}  // namespace
}  // namespace halftone::cuda
