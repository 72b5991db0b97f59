// FBGEMM INT4 rows in and out of native pages, and static calibration.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "format/codec.h"
#include "format/hadamard.h"
#include "halftone/cache.h"
#include "tests/append/cache_support.h"
#include "tests/expect_error.h"

namespace halftone {
namespace {

using namespace halftone::testing;
constexpr auto kInvalid = ErrorCode::kInvalidArgument;

Tensor slots_of(std::vector<std::int64_t> slots) {
  return Tensor::of({static_cast<std::int64_t>(slots.size())}, slots);
}

PagedKv pages_of(const KvCacheSpec& spec, const Tensor& pages) {
  PagedKv cache;
  cache.spec = spec;
  cache.pages = pages.view();
  return cache;
}

TEST(FbgemmTest, AHandMadeRowDecodesAsPublished) {
  // One 68-byte row: scale 0.5, shift -3, nibble of dim d is d % 16, even dims low.
  codec::FbgemmInt4Row<128, 1> row{};
  row.groups[0] = {0x3800, 0xC200};
  for (int d = 0; d < 128; d += 2) {
    row.nibbles[d / 2] = static_cast<std::uint8_t>(d % 16 | (d + 1) % 16 << 4);
  }
  const Tensor rows(DType::kUInt8, {1, 1, 68});
  std::memcpy(rows.bytes().data(), &row, 68);
  const KvCacheSpec spec{parse_format("int4-row"), parse_format("int4-row"), 1, 128, 0, 16};
  const Tensor pages(DType::kUInt8, {1, page_layout(spec).page_bytes});
  PagedKv cache = pages_of(spec, pages);
  import_fbgemm_int4(cache, KvPart::kK, rows.view(), slots_of({0}).view());
  import_fbgemm_int4(cache, KvPart::kV, rows.view(), slots_of({0}).view());
  const Tensor table = Tensor::of({1, 1}, std::vector<std::int32_t>{0}),
               lengths = Tensor::of({1}, std::vector<std::int32_t>{1});
  cache.block_table = table.view();
  cache.lengths = lengths.view();
  const Tensor k(DType::kFloat32, {1, 1, 128}), v(DType::kFloat32, {1, 1, 128});
  dequantize(cache, k.view(), v.view());
  for (int d = 0; d < 128; ++d) {
    EXPECT_EQ(k.get(d), static_cast<float>(d % 16) * 0.5f - 3.0f) << d;
    EXPECT_EQ(v.get(d), k.get(d));
  }
}

struct RowCase {
  const char* format;
  int dim, groups, bytes;
};
constexpr std::array kRowCases = {RowCase{"int4-row", 128, 1, 68}, RowCase{"int4-g32", 128, 4, 80},
                                  RowCase{"int4-g64", 192, 3, 108}, RowCase{"int4-row", 80, 1, 44},
                                  RowCase{"int4-g32", 256, 8, 160}};

TEST(FbgemmTest, RowsSurviveTheRoundTripBitForBit) {
  Random random(41);
  for (const RowCase& c : kRowCases) {
    for (const KvPart which : {KvPart::kK, KvPart::kV}) {
      const KvCacheSpec spec{parse_format(c.format), parse_format(c.format), 2, c.dim, 0, 32};
      const Tensor pages(DType::kUInt8, {2, page_layout(spec).page_bytes});
      const Tensor rows(DType::kUInt8, {5, 2, c.bytes}), back(DType::kUInt8, {5, 2, c.bytes});
      for (std::uint8_t& b : rows.bytes()) b = static_cast<std::uint8_t>(random.next());
      for (int row = 0; row < 10; ++row) {
        for (int g = 0; g < c.groups; ++g) {
          const std::array<std::uint16_t, 2> params = {codec::f16_from_f32(std::abs(random.normal())),
                                                       codec::f16_from_f32(random.normal())};
          std::memcpy(rows.bytes().data() + row * c.bytes + 4 * g, params.data(), 4);
        }
      }
      const Tensor slots = slots_of({63, 0, 17, 31, 32});
      import_fbgemm_int4(pages_of(spec, pages), which, rows.view(), slots.view());
      export_fbgemm_int4(pages_of(spec, pages), which, slots.view(), back.view());
      EXPECT_TRUE(same_bytes(rows, back)) << c.format << " " << c.dim;
      EXPECT_TRUE(pages.guards_intact() && back.guards_intact());
    }
  }
}

TEST(FbgemmTest, ExportedRowsDecodeToWhatAppendStored) {
  Random random(42);
  for (const RowCase& c : kRowCases) {
    const KvCacheSpec spec{parse_format(c.format), parse_format("bf16"), 2, c.dim, 0, 16};
    Cache cache(spec, std::vector<int>{20}, random);
    const Tensor k = random_values(random, 20, 2, c.dim), v = random_values(random, 20, 2, c.dim);
    cache.append(std::vector<int>{20}, k, v);
    const Tensor rows(DType::kUInt8, {20, 2, c.bytes});
    export_fbgemm_int4(cache.view(), KvPart::kK, slots_of(cache.slots()).view(), rows.view());
    const reference::Dequantised back = dequantised(cache);
    for (int row = 0; row < 40; ++row) {
      const std::uint8_t* bytes = rows.bytes().data() + row * c.bytes;
      for (int d = 0; d < c.dim; ++d) {
        std::array<std::uint16_t, 2> params{};
        std::memcpy(params.data(), bytes + 4 * (d / (c.dim / c.groups)), 4);
        const int q = bytes[4 * c.groups + d / 2] >> (d % 2 * 4) & 15;
        const double x = static_cast<double>(codec::f32_from_f16(params[0])) * q +
                         static_cast<double>(codec::f32_from_f16(params[1]));
        ASSERT_EQ(back.k.get(row * c.dim + d), static_cast<float>(x));
      }
    }
  }
}

TEST(FbgemmTest, UserErrors) {
  Random random(43);
  const KvCacheSpec spec{parse_format("int4-row"), parse_format("int8-head"), 2, 128, 0, 16};
  const Tensor pages(DType::kUInt8, {1, page_layout(spec).page_bytes});
  const PagedKv cache = pages_of(spec, pages);
  const Tensor rows(DType::kUInt8, {2, 2, 68});
  rows.fill_bytes(0);
  const auto refused = [&](ErrorCode code, std::vector<std::string> words, const PagedKv& c, KvPart which,
                           const TensorView& r, std::vector<std::int64_t> s) {
    const Tensor slots = slots_of(s), before = pages.clone();
    expect_error(code, words, [&] { import_fbgemm_int4(c, which, r, slots.view()); });
    EXPECT_TRUE(same_bytes(pages, before));
  };
  const auto k = KvPart::kK;
  refused(ErrorCode::kUnsupported, {"v_format is int8-head", "int4-row"}, cache, KvPart::kV, rows.view(),
          {0, 1});
  refused(ErrorCode::kOutOfRange, {"slots[1] is 16"}, cache, k, rows.view(), {0, 16});
  refused(ErrorCode::kOutOfRange, {"slots[0] is -1"}, cache, k, rows.view(), {-1, 3});
  refused(kInvalid, {"tokens 0 and 1", "slot 3"}, cache, k, rows.view(), {3, 3});
  refused(kInvalid, {"rows has shape [2, 2, 68]", "[3, 2, 68]"}, cache, k, rows.view(), {3, 4, 5});
  TensorView narrow = rows.view();
  narrow.shape[2] = 64;
  refused(kInvalid, {"rows has shape"}, cache, k, narrow, {3, 4});
  PagedKv rotated = cache;
  rotated.spec.rotate_k = true;
  refused(ErrorCode::kUnsupported, {"rotate_k is true"}, rotated, k, rows.view(), {0, 1});
  for (const std::uint16_t bad : {0x7c00, 0x7e00, 0xb800}) {  // inf, NaN, -0.5
    std::memcpy(rows.bytes().data() + 3 * 68, &bad, 2);
    refused(kInvalid, {"rows[1, 1] has scale"}, cache, k, rows.view(), {0, 1});
  }
  const Tensor slots = slots_of({0, 99});
  expect_error(ErrorCode::kOutOfRange, {"slots[1] is 99"},
               [&] { export_fbgemm_int4(cache, k, slots.view(), rows.view()); });
}

// --- calibrate
// ---------------------------------------------------------------------------------------------------------------

TEST(CalibrateTest, ScalesCoverTheValuesPerTensorOrPerHead) {
  std::vector<float> x(2 * 2 * 64, 0.0f);
  x[5] = -12.7f;       // token 0, head 0
  x[64 + 9] = 2.54f;   // token 0, head 1
  x[128 + 3] = 6.35f;  // token 1, head 0
  const Tensor t = Tensor::of(DType::kFloat32, {2, 2, 64}, x);
  EXPECT_EQ(calibrate(t.view(), parse_format("int8-tensor")).scale, std::vector<float>{12.7f / 127.0f});
  EXPECT_EQ(calibrate(t.view(), parse_format("int8-static-head")).scale,
            (std::vector<float>{12.7f / 127.0f, 2.54f / 127.0f}));
  EXPECT_EQ(calibrate(t.view(), parse_format("fp8-static-head")).scale,
            (std::vector<float>{12.7f / 448.0f, 2.54f / 448.0f}));
  const StaticScaleValues asym = calibrate(t.view(), parse_format("int8-static-head-asym"));
  EXPECT_EQ(asym.scale, (std::vector<float>{(6.35f + 12.7f) / 255.0f, 2.54f / 255.0f}));
  EXPECT_EQ(asym.min, (std::vector<float>{-12.7f, 0.0f}));
  EXPECT_TRUE(calibrate(t.view(), parse_format("int8-tensor")).min.empty());
}

TEST(CalibrateTest, RotationIsPartOfTheSample) {
  std::vector<float> x(64, 0.0f);
  x[0] = 8.0f;  // rotates into 64 ones
  const Tensor t = Tensor::of(DType::kFloat32, {1, 1, 64}, x);
  EXPECT_EQ(calibrate(t.view(), parse_format("int8-tensor"), true).scale, std::vector<float>{1.0f / 127.0f});
}

TEST(CalibrateTest, UserErrors) {
  const Tensor t = Tensor::of(DType::kFloat32, {1, 1, 64}, std::vector<float>(64, 1.0f));
  expect_error(kInvalid, {"format is int8-head"}, [&] { calibrate(t.view(), parse_format("int8-head")); });
  t.set(7, std::nanf(""));
  expect_error(kInvalid, {"x[0, 0, 7] is nan"}, [&] { calibrate(t.view(), parse_format("fp8")); });
  const Tensor none(DType::kFloat32, {0, 1, 64}), odd(DType::kFloat32, {1, 1, 59});
  expect_error(kInvalid, {"x has shape [0, 1, 64]"}, [&] { calibrate(none.view(), parse_format("fp8")); });
  expect_error(kInvalid, {"x.shape[2] is 59", "use 64"}, [&] { calibrate(odd.view(), parse_format("fp8")); });
  expect_error(kInvalid, {"x is absent"}, [&] { calibrate({}, parse_format("fp8")); });
}

TEST(CalibrateTest, ZerosGiveAUsableScale) {
  const Tensor t = Tensor::of(DType::kFloat32, {1, 1, 64}, std::vector<float>(64, 0.0f));
  for (const char* name : {"fp8", "int8-tensor", "int4-static-head"}) {
    const float scale = calibrate(t.view(), parse_format(name)).scale[0];
    EXPECT_TRUE(scale > 0 && std::isfinite(1 / scale)) << name;
  }
}

}  // namespace
}  // namespace halftone
