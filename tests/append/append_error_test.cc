// Every user error of append and dequantize: a typed Error that names the argument, and not a byte changed.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "halftone/cache.h"
#include "tests/append/cache_support.h"
#include "tests/expect_error.h"

namespace halftone {
namespace {

using namespace halftone::testing;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr auto kInvalid = ErrorCode::kInvalidArgument;
constexpr auto kRange = ErrorCode::kOutOfRange;

// A healthy append of 6 tokens to two requests, which each test spoils in one way.
class AppendErrorTest : public ::testing::Test {
 protected:
  static constexpr int kTokens = 6, kHeads = 2, kDim = 64;

  AppendErrorTest()
      : cache_({parse_format("int8-head"), parse_format("int4-g32"), kHeads, kDim, 0, 16},
               std::vector<int>{40, 40}, random_) {
    k_ = random_values(random_, kTokens, kHeads, kDim);
    v_ = random_values(random_, kTokens, kHeads, kDim);
    view_ = cache_.view();
    args_.k = k_.view();
    args_.v = v_.view();
    args_.cu_seqlens = cu_.view();
  }

  void use_slots() {
    args_.cu_seqlens = {};
    args_.slot_mapping = slots_.view();
  }

  // Expects an error and untouched pages, then repairs `args_` and `view_`.
  void refused(ErrorCode code, const std::vector<std::string>& words, const std::function<void()>& spoil) {
    const PagedKv view = view_;
    const AppendArgs args = args_;
    spoil();
    const Cache before = cache_.clone();
    expect_error(code, words, [&] { append(view_, args_); });
    EXPECT_TRUE(same_bytes(before.pages, cache_.pages)) << words.front();
    EXPECT_TRUE(cache_.guards_intact());
    view_ = view;
    args_ = args;
  }

  Random random_{31};
  Cache cache_;
  Tensor k_, v_;
  Tensor cu_ = Tensor::of({3}, std::vector<std::int32_t>{0, 4, 6});
  Tensor slots_ = Tensor::of({6}, std::vector<std::int64_t>{0, 1, 2, 3, 17, 33});
  PagedKv view_;
  AppendArgs args_;
};

TEST_F(AppendErrorTest, TheHealthyCallsWork) {
  EXPECT_NO_THROW(append(view_, args_));
  use_slots();
  EXPECT_NO_THROW(append(view_, args_));
}

TEST_F(AppendErrorTest, NonFiniteInputs) {
  for (const bool by_slots : {false, true}) {
    if (by_slots) use_slots();
    for (const float bad : {kNan, kInf, -kInf, 0x1.8p100f, -std::numeric_limits<float>::max()}) {
      const float k = k_.get(3 * 128 + 64 + 5), v = v_.get(5 * 128 + 63);
      refused(kInvalid, {"k[3, 1, 5]", "finite"}, [&] { k_.set(3 * 128 + 64 + 5, bad); });
      k_.set(3 * 128 + 64 + 5, k);
      refused(kInvalid, {"v[5, 0, 63]", "finite"}, [&] { v_.set(5 * 128 + 63, bad); });
      v_.set(5 * 128 + 63, v);
    }
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<float> values = k_.to_floats();
    values[7] = kInf;
    const Tensor half = Tensor::of(dtype, {kTokens, kHeads, kDim}, values);
    refused(kInvalid, {"k[0, 0, 7] is inf"}, [&] { args_.k = args_.v = half.view(); });
  }
}

TEST_F(AppendErrorTest, SlotsBeyondTheCacheOrTwice) {
  use_slots();
  const std::int64_t capacity = view_.pages.shape[0] * 16;
  const auto set = [&](int i, std::int64_t slot) {
    slots_.as<std::int64_t>()[static_cast<std::size_t>(i)] = slot;
  };
  refused(kRange, {"slot_mapping[2] is " + std::to_string(capacity), "slots 0 to"},
          [&] { set(2, capacity); });
  refused(kRange, {"slot_mapping[2]"}, [&] { set(2, std::numeric_limits<std::int64_t>::max()); });
  refused(kInvalid, {"slot_mapping", "tokens 1 and 2", "slot 1"}, [&] { set(2, 1); });
  refused(kInvalid, {"tokens 0 and 5", "slot 0"}, [&] { set(2, 2), set(5, 0); });
  set(5, 33);
  set(1, -1);
  set(2, -1);
  EXPECT_NO_THROW(append(view_, args_)) << "two skipped tokens are no conflict";
}

TEST_F(AppendErrorTest, CumulativeLengths) {
  const auto spoil = [&](std::vector<std::int32_t> cu, std::vector<std::string> words,
                         ErrorCode code = kInvalid) {
    const Tensor t = Tensor::of({3}, cu);
    refused(code, words, [&] { args_.cu_seqlens = t.view(); });
  };
  spoil({1, 4, 6}, {"cu_seqlens[0] is 1"});
  spoil({0, 7, 6}, {"cu_seqlens[2] is 6", "cu_seqlens[1] = 7"});
  spoil({0, -1, 6}, {"cu_seqlens[1] is -1"});
  spoil({0, 4, 5}, {"cu_seqlens[2] is 5", "6 tokens"});
  spoil({0, 4, INT_MAX}, {"cu_seqlens[2]"});
  const Tensor two = Tensor::of({2}, std::vector<std::int32_t>{0, 6});
  refused(kInvalid, {"cu_seqlens", "shape [2]", "[3]"}, [&] { args_.cu_seqlens = two.view(); });
}

TEST_F(AppendErrorTest, AFullCacheAndBadLengths) {
  const auto lengths = cache_.lengths.as<std::int32_t>();
  const int capacity = static_cast<int>(view_.block_table.shape[1]) * 16;
  refused(kRange, {"cache.lengths[0]", "+ 4 new tokens", std::to_string(capacity)},
          [&] { lengths[0] = capacity - 3; });
  refused(kRange, {"cache.lengths[0]"}, [&] { lengths[0] = INT_MAX; });
  refused(kRange, {"cache.lengths[0] is -1"}, [&] { lengths[0] = -1; });
  lengths[0] = 0;
  EXPECT_NO_THROW(append(view_, args_));
}

TEST_F(AppendErrorTest, LengthsAdvanceOnceTheTokensAreThere) {
  args_.advance = true;
  const auto lengths = cache_.lengths.as<std::int32_t>();
  lengths[0] = 40;
  k_.as<float>()[0] = kNan;
  refused(kInvalid, {"k[0, 0, 0]"}, [] {});
  EXPECT_EQ(lengths[0], 40);
  k_.as<float>()[0] = 1;
  refused(kInvalid, {"cache.lengths overlaps cu_seqlens"},
          [&] { args_.cu_seqlens.data = view_.lengths.data; });
  refused(kInvalid, {"advance is true", "slot_mapping", "pass cu_seqlens"}, [&] { use_slots(); });
  const std::vector<std::int32_t> before(lengths.begin(), lengths.end());
  append(view_, args_);
  EXPECT_EQ(lengths[0], before[0] + 4);
  EXPECT_EQ(lengths[1], before[1] + 2);
}

TEST_F(AppendErrorTest, BadTableEntries) {
  const auto table = cache_.block_table.as<std::int32_t>();
  const std::int32_t good = table[0];
  for (const std::int32_t bad : {-1, INT_MAX, INT_MIN, static_cast<std::int32_t>(view_.pages.shape[0])}) {
    refused(kRange, {"cache.block_table[0, 0] is " + std::to_string(bad)}, [&] { table[0] = bad; });
  }
  table[0] = good;
  const auto second = static_cast<std::size_t>(view_.block_table.shape[1]);
  const std::int32_t other = table[second];
  refused(kInvalid, {"cache.block_table", "tokens 0 and 4"}, [&] { table[second] = table[0]; });
  table[second] = other;
}

TEST_F(AppendErrorTest, ClampedTablesExcludeTheTokenAndSetTheStatus) {
  Cache clean = cache_.clone();
  append(clean.view(), args_);
  cache_.block_table.as<std::int32_t>()[0] = -1;  // request 0 loses its four tokens
  view_.table_mode = BlockTableMode::kClamped;
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{4});
  args_.status = status.view();
  append(view_, args_);
  EXPECT_EQ(status.as<std::int32_t>()[0], 4 | 1) << "sticky";
  Cache expected = cache_.clone();
  expected.pages.fill_bytes(0xFF);
  AppendArgs tail = args_;
  tail.status = {};
  tail.k = rows(args_.k, 4, 2);
  tail.v = rows(args_.v, 4, 2);
  const Tensor cu = Tensor::of({3}, std::vector<std::int32_t>{0, 0, 2});
  tail.cu_seqlens = cu.view();
  append(expected.view(), tail);
  EXPECT_TRUE(same_bytes(cache_.pages, expected.pages));
}

TEST_F(AppendErrorTest, PresenceRankShapeDtypeDevice) {
  refused(kInvalid, {"slot_mapping and cu_seqlens are both absent"}, [&] { args_.cu_seqlens = {}; });
  refused(kInvalid, {"both present"}, [&] { args_.slot_mapping = slots_.view(); });
  refused(kInvalid, {"k is absent"}, [&] { args_.k = {}; });
  refused(kInvalid, {"cache.pages is absent"}, [&] { view_.pages = {}; });
  refused(kInvalid, {"cache.block_table is absent"}, [&] { view_.block_table = {}; });
  refused(kInvalid, {"cache.lengths is absent"}, [&] { view_.lengths = {}; });
  refused(kInvalid, {"k has a null address"}, [&] { args_.k.data = nullptr; });
  refused(kInvalid, {"k has rank 2"}, [&] { args_.k.rank = 2; });
  refused(kInvalid, {"k has rank -1"}, [&] { args_.k.rank = -1; });
  refused(kInvalid, {"k has rank 99"}, [&] { args_.k.rank = 99; });
  refused(kInvalid, {"k has shape [6, 3, 64]", "[n, 2, 64]"}, [&] { args_.k.shape[1] = 3; });
  refused(kInvalid, {"k has shape [-6"}, [&] { args_.k.shape[0] = -6; });
  refused(kInvalid, {"63 bits"}, [&] { args_.k.shape[0] = std::numeric_limits<std::int64_t>::max() / 2; });
  refused(kInvalid, {"k has stride", "57 bits"},
          [&] { args_.k.strides[0] = std::numeric_limits<std::int64_t>::max() / 2; });
  refused(kInvalid, {"v has shape [5, 2, 64]"}, [&] { args_.v.shape[0] = 5; });
  refused(kInvalid, {"v is f16", "must be f32"}, [&] { args_.v.dtype = DType::kFloat16; });
  refused(kInvalid, {"k is int8"}, [&] { args_.k.dtype = DType::kInt8; });
  refused(kInvalid, {"k is of an unknown dtype"}, [&] { args_.k.dtype = static_cast<DType>(200); });
  refused(kInvalid, {"cu_seqlens is int64"}, [&] { args_.cu_seqlens.dtype = DType::kInt64; });
  refused(kInvalid, {"v is on cuda:1", "cpu"}, [&] { args_.v.device = {DeviceType::kCuda, 1}; });
  refused(kInvalid, {"k has stride 2 in dimension 2"}, [&] { args_.k.strides[2] = 2; });
  refused(kInvalid, {"cache.pages has shape"}, [&] { view_.pages.shape[1] -= 16; });
  refused(kInvalid, {"cache.pages has stride", "multiple of 16"}, [&] { view_.pages.strides[0] += 8; });
  refused(kInvalid, {"cache.pages has stride"}, [&] { view_.pages.strides[0] = 0; });
  refused(kInvalid, {"cache.table_mode is 9"}, [&] { view_.table_mode = static_cast<BlockTableMode>(9); });
  refused(kInvalid, {"kv_heads"}, [&] { view_.spec.kv_heads = 0; });
  const Tensor status(DType::kInt64, {1});
  refused(kInvalid, {"status is int64"}, [&] { args_.status = status.view(); });
}

TEST_F(AppendErrorTest, MisalignedPointers) {
  for (const std::size_t shift : {1u, 2u, 8u}) {
    refused(kInvalid, {"cache.pages starts " + std::to_string(shift) + " bytes past"},
            [&] { view_.pages.data = static_cast<std::uint8_t*>(view_.pages.data) + shift; });
  }
  for (const std::size_t shift : {1u, 2u}) {
    refused(kInvalid, {"k starts " + std::to_string(shift) + " bytes past"},
            [&] { args_.k.data = static_cast<std::uint8_t*>(args_.k.data) + shift; });
    refused(kInvalid, {"cu_seqlens starts"},
            [&] { args_.cu_seqlens.data = static_cast<std::uint8_t*>(args_.cu_seqlens.data) + shift; });
    refused(kInvalid, {"cache.lengths starts"},
            [&] { view_.lengths.data = static_cast<std::uint8_t*>(view_.lengths.data) + shift; });
  }
}

TEST_F(AppendErrorTest, AliasedInputs) {
  refused(kInvalid, {"cache.pages overlaps k"}, [&] { args_.k.data = view_.pages.data; });
  refused(kInvalid, {"cache.pages overlaps cache.lengths"}, [&] { view_.lengths.data = view_.pages.data; });
  refused(kInvalid, {"cache.pages overlaps v"}, [&] {
    // A view that runs backwards from just behind the pages reaches into them.
    args_.v.data = static_cast<std::uint8_t*>(view_.pages.data) + view_.pages.numel() + 1024;
    args_.v.strides[0] = -args_.v.strides[0];
  });
  const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
  refused(kInvalid, {"status overlaps cu_seqlens"}, [&] {
    args_.status = status.view();
    args_.status.data = args_.cu_seqlens.data;
  });
}

TEST_F(AppendErrorTest, RopeTablesAndPositions) {
  RopeTables tables(random_, kTokens, 16);
  const auto with = [&](const std::function<void(Rope&)>& spoil) {
    return [&, spoil] {
      args_.rope = tables.rope(RopePairing::kHalf);
      spoil(args_.rope);
    };
  };
  refused(kInvalid, {"rope.cos is present", "kNone"}, with([](Rope& r) { r.pairing = RopePairing::kNone; }));
  refused(kInvalid, {"rope.pairing is 7"}, with([](Rope& r) { r.pairing = static_cast<RopePairing>(7); }));
  refused(kInvalid, {"rope.sin is absent"}, with([](Rope& r) { r.sin = {}; }));
  refused(kInvalid, {"rope.positions has shape"}, with([](Rope& r) { r.positions.shape[0] = 3; }));
  refused(kInvalid, {"rope.sin has shape"}, with([](Rope& r) { r.sin.shape[1] = 8; }));
  const Tensor wide(DType::kFloat32, {64, 33}), thin(DType::kFloat32, {64, 0});
  refused(kInvalid, {"rope.cos.shape[1] is 33", "use 32"},
          with([&](Rope& r) { r.cos = r.sin = wide.view(); }));
  refused(kInvalid, {"rope.cos.shape[1] is 0"}, with([&](Rope& r) { r.cos = r.sin = thin.view(); }));
  const auto positions = tables.positions.as<std::int32_t>();
  refused(kRange, {"rope.positions[2] is 64", "0 to 63"}, with([&](Rope&) { positions[2] = 64; }));
  refused(kRange, {"rope.positions[2] is -1"}, with([&](Rope&) { positions[2] = -1; }));
  positions[2] = 5;
  refused(kInvalid, {"rope.sin[5, 3] is"}, with([&](Rope&) { tables.sin.set(5 * 16 + 3, kNan); }));
}

TEST_F(AppendErrorTest, StaticScales) {
  Cache fixed({parse_format("fp8"), parse_format("int8-static-head-asym"), kHeads, kDim, 0, 16},
              std::vector<int>{40, 40}, random_);
  fixed.calibrate(k_, v_);
  PagedKv& view = view_;
  const auto with = [&](const std::function<void(PagedKv&)>& spoil) {
    return [&, spoil] {
      view = fixed.view();
      spoil(view);
    };
  };
  for (const float bad : {0.0f, -1.0f, kNan, kInf, 1e-40f}) {
    const float good = fixed.k_scale.get(0);
    refused(kInvalid, {"cache.k_scale.scale[0] is", "finite"},
            with([&](PagedKv&) { fixed.k_scale.set(0, bad); }));
    fixed.k_scale.set(0, good);
  }
  const float min = fixed.v_min.get(1);
  refused(kInvalid, {"cache.v_scale.min[1] is"}, with([&](PagedKv&) { fixed.v_min.set(1, kInf); }));
  fixed.v_min.set(1, min);
  refused(kInvalid, {"cache.k_scale.scale is absent"}, with([](PagedKv& v) { v.k_scale = {}; }));
  refused(kInvalid, {"cache.v_scale.min is absent"}, with([](PagedKv& v) { v.v_scale.min = {}; }));
  refused(kInvalid, {"cache.k_scale.min is present", "symmetric"},
          with([](PagedKv& v) { v.k_scale.min = v.k_scale.scale; }));
  refused(kInvalid, {"cache.v_scale.scale has shape [1]"},
          with([](PagedKv& v) { v.v_scale.scale.shape[0] = 1; }));
  refused(kInvalid, {"cache.k_scale.scale is present"}, [&] { view_.k_scale.scale = fixed.k_scale.view(); });
  view_ = fixed.view();
  EXPECT_NO_THROW(append(view_, args_));
}

TEST_F(AppendErrorTest, ANewStaticScaleGivesTheNewResult) {
  Cache fixed({parse_format("fp8"), parse_format("fp8"), kHeads, kDim, 0, 16}, std::vector<int>{40, 40},
              random_);
  fixed.calibrate(k_, v_);
  append(fixed.view(), args_);
  const Cache first = fixed.clone();
  fixed.k_scale.set(0, fixed.k_scale.get(0) * 3);
  append(fixed.view(), args_);
  EXPECT_FALSE(same_bytes(first.pages, fixed.pages));
}

// --- dequantize
// --------------------------------------------------------------------------------------------------------------

class DequantizeTest : public AppendErrorTest {
 protected:
  DequantizeTest() {
    append(view_, args_);
    cache_.lengths.as<std::int32_t>()[0] = 4;
    cache_.lengths.as<std::int32_t>()[1] = 2;
    k_out_ = Tensor(DType::kFloat32, {kTokens, kHeads, kDim});
    v_out_ = Tensor(DType::kFloat32, {kTokens, kHeads, kDim});
  }
  void refused(ErrorCode code, const std::vector<std::string>& words, const PagedKv& view,
               const TensorView& k, const TensorView& v) {
    expect_error(code, words, [&] { dequantize(view, k, v); });
    for (const std::uint8_t b : k_out_.bytes()) ASSERT_EQ(b, 0xFF) << "untouched";
    for (const std::uint8_t b : v_out_.bytes()) ASSERT_EQ(b, 0xFF) << "untouched";
  }
  Tensor k_out_, v_out_;
};

TEST_F(DequantizeTest, WritesEveryElementOfEitherOutput) {
  dequantize(view_, k_out_.view(), {});
  for (const float x : k_out_.to_floats()) ASSERT_TRUE(std::isfinite(x));
  for (const std::uint8_t b : v_out_.bytes()) ASSERT_EQ(b, 0xFF);
  dequantize(view_, {}, v_out_.view());
  for (const float x : v_out_.to_floats()) ASSERT_TRUE(std::isfinite(x));
  EXPECT_TRUE(k_out_.guards_intact() && v_out_.guards_intact());
}

TEST_F(DequantizeTest, HalfAndStridedOutputsRoundTheF32Values) {
  dequantize(view_, k_out_.view(), v_out_.view());
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Tensor fused(dtype, {kTokens, kHeads, 2 * kDim});
    TensorView k = fused.view(), v = fused.view();
    k.shape[2] = v.shape[2] = kDim;
    v.data = static_cast<std::uint16_t*>(v.data) + kDim;
    EXPECT_THROW(dequantize(view_, k, v), Error) << "interleaved views count as overlapping";
    dequantize(view_, k, {});
    dequantize(view_, {}, v);
    for (int row = 0; row < kTokens * kHeads; ++row) {
      for (int d = 0; d < kDim; ++d) {
        ASSERT_EQ(fused.get(row * 2 * kDim + d),
                  reference::from_bits16(dtype, reference::to_bits16(dtype, k_out_.get(row * kDim + d))));
        ASSERT_EQ(fused.get(row * 2 * kDim + kDim + d),
                  reference::from_bits16(dtype, reference::to_bits16(dtype, v_out_.get(row * kDim + d))));
      }
    }
  }
}

TEST_F(DequantizeTest, GarbageBehindTheLiveTokensDoesNotMatter) {
  dequantize(view_, k_out_.view(), v_out_.view());
  Cache zeroed = cache_.clone();
  zeroed.pages.fill_bytes(0);
  zeroed.lengths.fill_bytes(0);
  append(zeroed.view(), args_);
  zeroed.lengths = cache_.lengths.clone();
  const reference::Dequantised clean = dequantised(zeroed);
  EXPECT_TRUE(same_bytes(clean.k, k_out_));
  EXPECT_TRUE(same_bytes(clean.v, v_out_));
}

TEST_F(DequantizeTest, ClampedPagesReadAsZeros) {
  cache_.block_table.as<std::int32_t>()[0] = INT_MAX;
  refused(kRange, {"cache.block_table[0, 0]"}, view_, k_out_.view(), v_out_.view());
  view_.table_mode = BlockTableMode::kClamped;
  dequantize(view_, k_out_.view(), v_out_.view());
  const std::vector<float> k = k_out_.to_floats();
  EXPECT_TRUE(std::all_of(k.begin(), k.begin() + 4 * kHeads * kDim, [](float x) { return x == 0; }));
  EXPECT_TRUE(std::any_of(k.begin() + 4 * kHeads * kDim, k.end(), [](float x) { return x != 0; }));
}

TEST_F(DequantizeTest, UserErrors) {
  const TensorView k = k_out_.view(), v = v_out_.view();
  refused(kInvalid, {"k_out and v_out are both absent"}, view_, {}, {});
  TensorView bad = k;
  bad.shape[0] = 5;
  refused(kInvalid, {"k_out.shape[0] is 5", "= 6"}, view_, bad, v);
  bad = k;
  bad.strides[0] = 0;
  refused(kInvalid, {"k_out has stride 0"}, view_, bad, v);
  bad = k;
  bad.strides[1] = 1;
  refused(kInvalid, {"k_out has stride", "share memory"}, view_, bad, v);
  bad = k;
  bad.dtype = DType::kInt8;
  refused(kInvalid, {"k_out is int8"}, view_, bad, v);
  refused(kInvalid, {"k_out overlaps v_out"}, view_, k, k);
  PagedKv view = view_;
  view.pages.data = static_cast<std::uint8_t*>(view.pages.data) + 8;
  refused(kInvalid, {"cache.pages starts 8 bytes"}, view, k, v);
  view = view_;
  view.pages.data = k.data;
  expect_error(kInvalid, {"k_out overlaps cache.pages"}, [&] { dequantize(view, k, v); });
  cache_.lengths.as<std::int32_t>()[1] = 1000;
  refused(kRange, {"cache.lengths[1] is 1000"}, view_, k, v);
}

}  // namespace
}  // namespace halftone
