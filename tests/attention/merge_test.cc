// Merging partial results over disjoint keys gives attention over all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <vector>

#include "halftone/attention.h"
#include "halftone/error.h"
#include "testing/cases.h"
#include "tests/expect_error.h"

namespace halftone::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A request over plain f32 K and V, cut into parts at `cuts`.
struct Parts {
  Problem whole;
  Reference reference;
  std::vector<Tensor> out, lse;
};

Tensor rows_of(const Tensor& x, std::int64_t begin, std::int64_t end) {
  const std::int64_t row = x.shape()[1] * x.shape()[2];
  std::vector<float> values;
  for (std::int64_t i = begin * row; i < end * row; ++i) values.push_back(x.get(i));
  return Tensor::of(x.dtype(), {end - begin, x.shape()[1], x.shape()[2]}, values);
}

Parts cut(const std::vector<int>& cuts, int kv_len, int q_len, DType part_dtype, std::uint64_t seed) {
  Parts parts;
  AttentionCase row;
  row.plain = DType::kFloat32;
  row.q_dtype = DType::kFloat32;
  row.out_dtype = DType::kFloat32;
  row.requests = {{q_len, kv_len}};
  row.seed = seed;
  parts.whole = make_problem(row);
  parts.reference = make_reference(parts.whole);
  int begin = 0;
  for (std::size_t i = 0; i <= cuts.size(); ++i) {
    const int end = i < cuts.size() ? cuts[i] : kv_len;
    row.requests = {{q_len, end - begin}};
    row.out_dtype = part_dtype;
    Problem part = make_problem(row);
    part.q = parts.whole.q.clone();
    part.k = rows_of(parts.whole.k, begin, end);
    part.v = rows_of(parts.whole.v, begin, end);
    Outputs outputs = run_problem(part);
    parts.out.push_back(std::move(outputs.out));
    parts.lse.push_back(std::move(outputs.lse));
    begin = end;
  }
  return parts;
}

std::vector<TensorView> views(const std::vector<Tensor>& tensors) {
  std::vector<TensorView> result;
  for (const Tensor& t : tensors) result.push_back(t.view());
  return result;
}

TEST(Merge, TwoPartsEqualOneShot) {
  for (const int at : {1, 16, 64, 100, 333, 499}) {
    const Parts parts = cut({at}, 500, 3, DType::kFloat32, static_cast<std::uint64_t>(at));
    const Outputs merged = make_outputs(parts.whole);
    halftone::merge(views(parts.out), views(parts.lse), merged.out.view(), merged.lse.view());
    EXPECT_EQ(judge(parts.whole, parts.reference, merged), "") << "cut at " << at;
    EXPECT_TRUE(merged.out.guards_intact() && merged.lse.guards_intact());
  }
}

TEST(Merge, ManyPartsSomeOfThemEmpty) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Random random(seed);
    std::vector<int> cuts;
    for (std::int64_t n = random.integer(0, 40); n > 0; --n)
      cuts.push_back(static_cast<int>(random.integer(0, 300)));
    std::sort(cuts.begin(), cuts.end());
    const Parts parts = cut(cuts, 300, 2, DType::kFloat32, 100 + seed);
    const Outputs merged = make_outputs(parts.whole);
    halftone::merge(views(parts.out), views(parts.lse), merged.out.view(), merged.lse.view());
    EXPECT_EQ(judge(parts.whole, parts.reference, merged), "") << "seed " << seed;
  }
}

TEST(Merge, LseMayBeAbsent) {
  const Parts parts = cut({7}, 40, 1, DType::kFloat32, 3);
  const Outputs with = make_outputs(parts.whole), without = make_outputs(parts.whole);
  halftone::merge(views(parts.out), views(parts.lse), with.out.view(), with.lse.view());
  halftone::merge(views(parts.out), views(parts.lse), without.out.view(), TensorView{});
  EXPECT_TRUE(same_bytes(with.out, without.out));
}

TEST(Merge, SixteenBitParts) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Parts parts = cut({50, 120}, 200, 4, dtype, 4);
    for (const DType out_dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const Tensor out(out_dtype, parts.whole.q.shape());
      halftone::merge(views(parts.out), views(parts.lse), out.view(), TensorView{});
      // The parts are rounded once, the result once more; weights sum to one.
      const int dim = parts.whole.row.head_dim;
      for (std::int64_t row = 0; row < out.numel() / dim; ++row) {
        double largest = 0;
        for (const Tensor& part : parts.out) {
          for (int d = 0; d < dim; ++d)
            largest = std::max(largest, std::abs(double{part.get(row * dim + d)}));
        }
        const double limit =
            1.01 * (reference::rounding_step(dtype, largest) + reference::rounding_step(out_dtype, largest)) +
            1e-6;
        for (int d = 0; d < dim; ++d) {
          const std::int64_t i = row * dim + d;
          ASSERT_NEAR(out.get(i), parts.reference.out[static_cast<std::size_t>(i)], limit);
        }
      }
    }
  }
}

TEST(Merge, AllPartsEmpty) {
  const std::vector<Tensor> out = [] {
    std::vector<Tensor> parts;
    for (int i = 0; i < 3; ++i) parts.emplace_back(DType::kFloat32, std::vector<std::int64_t>{2, 3, 64});
    return parts;  // bytes 0xFF: NaN
  }();
  const std::vector<float> empty(6, -kInfinity);
  std::vector<Tensor> lse;
  for (int i = 0; i < 3; ++i) lse.push_back(Tensor::of(DType::kFloat32, {2, 3}, empty));
  const Tensor merged(DType::kFloat32, {2, 3, 64}), merged_lse(DType::kFloat32, {2, 3});
  halftone::merge(views(out), views(lse), merged.view(), merged_lse.view());
  for (const float x : merged.as<float>()) ASSERT_EQ(x, 0.0F);
  for (const float x : merged_lse.as<float>()) ASSERT_EQ(x, -kInfinity);
}

/// A part with LSE -inf contributes nothing, whatever its values are.
TEST(Merge, NanInAnEmptyPartIsIgnored) {
  const Parts parts = cut({20}, 40, 1, DType::kFloat32, 5);
  const Outputs expected = make_outputs(parts.whole), actual = make_outputs(parts.whole);
  halftone::merge(views(parts.out), views(parts.lse), expected.out.view(), expected.lse.view());
  const Tensor nan(DType::kFloat32, parts.whole.q.shape());
  const std::vector<float> values(static_cast<std::size_t>(parts.whole.row.q_heads), -kInfinity);
  const Tensor empty = Tensor::of(DType::kFloat32, {1, parts.whole.row.q_heads}, values);
  halftone::merge({parts.out[0].view(), nan.view(), parts.out[1].view()},
                  {parts.lse[0].view(), empty.view(), parts.lse[1].view()}, actual.out.view(),
                  actual.lse.view());
  EXPECT_TRUE(same_bytes(expected.out, actual.out));
  EXPECT_TRUE(same_bytes(expected.lse, actual.lse));
}

TEST(Merge, ExtremeLseValues) {
  const auto merge_two = [](float lse_a, float lse_b) {
    const std::vector<float> a = {1}, b = {3};
    const Tensor out_a = Tensor::of(DType::kFloat32, {1, 1, 1}, a),
                 out_b = Tensor::of(DType::kFloat32, {1, 1, 1}, b);
    const Tensor la = Tensor::of(DType::kFloat32, {1, 1}, std::vector<float>{lse_a});
    const Tensor lb = Tensor::of(DType::kFloat32, {1, 1}, std::vector<float>{lse_b});
    const Tensor out(DType::kFloat32, {1, 1, 1}), lse(DType::kFloat32, {1, 1});
    halftone::merge({out_a.view(), out_b.view()}, {la.view(), lb.view()}, out.view(), lse.view());
    return std::pair{out.get(0), lse.get(0)};
  };
  EXPECT_EQ(merge_two(1e30F, 1e30F), (std::pair{2.0F, 1e30F}));
  EXPECT_EQ(merge_two(-1e30F, 1e30F), (std::pair{3.0F, 1e30F}));
  EXPECT_EQ(merge_two(-65504.0F, -65504.0F).first, 2.0F);
  EXPECT_EQ(merge_two(200.0F, 0.0F), (std::pair{1.0F, 200.0F}));
  const auto [out, lse] = merge_two(0.0F, 0.0F);
  EXPECT_EQ(out, 2.0F);
  EXPECT_NEAR(lse, std::log(2.0F), 1e-6);
}

TEST(Merge, StridedViews) {
  const Parts parts = cut({20}, 40, 3, DType::kFloat32, 6);
  const Outputs expected = make_outputs(parts.whole);
  halftone::merge(views(parts.out), views(parts.lse), expected.out.view(), expected.lse.view());
  const std::int64_t rows = 3, heads = parts.whole.row.q_heads, dim = parts.whole.row.head_dim;
  // The result lives inside a wider tensor.
  const Tensor wide(DType::kFloat32, {rows, heads, dim + 32});
  TensorView view = wide.view();
  view.shape[2] = dim;
  halftone::merge(views(parts.out), views(parts.lse), view, TensorView{});
  for (std::int64_t r = 0; r < rows * heads; ++r) {
    for (std::int64_t d = 0; d < dim; ++d)
      ASSERT_EQ(wide.get(r * (dim + 32) + d), expected.out.get(r * dim + d));
    for (std::int64_t d = dim; d < dim + 32; ++d) ASSERT_TRUE(std::isnan(wide.get(r * (dim + 32) + d)));
  }
}

TEST(Merge, Refusals) {
  const Tensor part(DType::kFloat32, {2, 3, 64}), lse(DType::kFloat32, {2, 3}),
      out(DType::kFloat32, {2, 3, 64});
  const Tensor wrong_dim(DType::kFloat32, {2, 3, 65}), wrong_lse(DType::kFloat32, {3, 2});
  const Tensor half_lse(DType::kFloat16, {2, 3}), bytes(DType::kUInt8, {2, 3, 64});
  const std::vector<TensorView> parts = {part.view()}, lses = {lse.view()};
  const auto refuses = [&](std::initializer_list<std::string_view> fragments,
                           const std::vector<TensorView>& x, const std::vector<TensorView>& x_lse,
                           const TensorView& to, const TensorView& to_lse = {}, Stream stream = nullptr) {
    expect_error(ErrorCode::kInvalidArgument, fragments,
                 [&] { halftone::merge(x, x_lse, to, to_lse, stream); });
  };
  refuses({"parts has 0 views"}, {}, {}, out.view());
  refuses({"part_lse has 0 views", "parts has 1"}, parts, {}, out.view());
  refuses({"parts[0] has shape", "dimension 2 is 65"}, {wrong_dim.view()}, lses, out.view());
  refuses({"parts[0]", "uint8", "bf16"}, {bytes.view()}, lses, out.view());
  refuses({"parts[0]"}, {TensorView{}}, lses, out.view());
  refuses({"part_lse[0] has shape", "dimension 0 is 3"}, parts, {wrong_lse.view()}, out.view());
  refuses({"part_lse[0]", "f16", "f32"}, parts, {half_lse.view()}, out.view());
  refuses({"out"}, parts, lses, TensorView{});
  refuses({"out", "uint8", "bf16"}, parts, lses, bytes.view());
  refuses({"lse has shape", "dimension 0 is 3"}, parts, lses, out.view(), wrong_lse.view());
  refuses({"stream"}, parts, lses, out.view(), TensorView{}, const_cast<Tensor*>(&out));
  for (const std::uint8_t byte : out.bytes())
    ASSERT_EQ(byte, 0xFF) << "a refusal leaves the output untouched";
}

}  // namespace
}  // namespace halftone::testing
