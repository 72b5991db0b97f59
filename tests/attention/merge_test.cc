// Merging partial results over disjoint keys gives attention over all of them, on every backend.
#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <vector>

#include "halftone/attention.h"
#include "halftone/error.h"
#include "tests/expect_error.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using reference::rounding_step;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::array kTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

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

/// Parts of a merge and its outputs, which begin as NaN.
struct Merge {
  std::vector<Tensor> parts, part_lse;
  Tensor out, lse;
};

/// `lse` draws the LSE of a (part, row and head); values of empty parts are NaN.
template <class Lse>
Merge make_merge(Random& random, int count, const std::vector<std::int64_t>& shape, bool mixed, DType out,
                 Lse&& lse) {
  Merge m{{}, {}, Tensor(out, shape), Tensor(DType::kFloat32, {shape[0], shape[1]})};
  const std::int64_t pairs = shape[0] * shape[1];
  for (int i = 0; i < count; ++i) {
    std::vector<float> values(static_cast<std::size_t>(pairs * shape[2])),
        lses(static_cast<std::size_t>(pairs));
    for (float& x : values) x = random.normal();
    for (std::size_t j = 0; j < lses.size(); ++j) {
      lses[j] = lse(i, j);
      if (lses[j] != -kInfinity) continue;
      const auto at = values.begin() + static_cast<std::ptrdiff_t>(j) * shape[2];
      std::fill_n(at, shape[2], std::numeric_limits<float>::quiet_NaN());
    }
    m.parts.push_back(Tensor::of(mixed ? random.pick(kTypes) : DType::kFloat32, shape, values));
    m.part_lse.push_back(Tensor::of(DType::kFloat32, {shape[0], shape[1]}, lses));
  }
  return m;
}

/// The outputs against the definition in double.
void expect_merged(const Merge& m) {
  const double limit = 1.25e-6 * (1 + static_cast<double>(m.parts.size()) / 128);
  const std::int64_t dim = m.out.shape()[2];
  for (std::int64_t pair = 0; pair < m.lse.numel(); ++pair) {
    double top = -INFINITY, sum = 0;
    for (const Tensor& lse : m.part_lse) top = std::max(top, double{lse.get(pair)});
    std::vector<double> weights;
    for (const Tensor& lse : m.part_lse) {
      weights.push_back(top == -INFINITY ? 0 : std::exp(lse.get(pair) - top));
      sum += weights.back();
    }
    if (sum == 0) {
      ASSERT_EQ(m.lse.get(pair), -kInfinity) << "LSE " << pair;
    } else {
      const double lse = top + std::log(sum);
      ASSERT_NEAR(m.lse.get(pair), lse, limit * std::max(1.0, std::abs(lse))) << "LSE " << pair;
    }
    for (std::int64_t i = pair * dim; i < (pair + 1) * dim; ++i) {
      double x = 0, largest = 0;
      for (std::size_t part = 0; part < m.parts.size(); ++part) {
        if (m.part_lse[part].get(pair) == -kInfinity) continue;
        x += weights[part] / sum * m.parts[part].get(i);
        largest = std::max(largest, std::abs(double{m.parts[part].get(i)}));
      }
      ASSERT_NEAR(m.out.get(i), x, limit * largest + 2 * rounding_step(m.out.dtype(), std::abs(x)))
          << "element " << i;
    }
  }
}

class MergeOnRunners : public OnRunners {
 protected:
  void merge(const Merge& m) const { runner().merge(m.parts, m.part_lse, m.out, m.lse); }

  /// A merge of `parts` keeps the rule of the oracle; exponentials of a GPU are approximate.
  void expect_whole(const Parts& parts) const {
    const Outputs merged = make_outputs(parts.whole);
    runner().merge(parts.out, parts.lse, merged.out, merged.lse);
    const double slack = runner().device().type == DeviceType::kCpu ? 0 : 4e-6;
    EXPECT_EQ(testing::judge(parts.whole, parts.reference, merged, slack, slack), "");
  }
};
HALFTONE_ON_EVERY_RUNNER(MergeOnRunners);

TEST_P(MergeOnRunners, TwoPartsEqualOneShot) {
  for (const int at : {1, 16, 64, 100, 333, 499}) {
    SCOPED_TRACE("cut at " + std::to_string(at));
    expect_whole(cut({at}, 500, 3, DType::kFloat32, static_cast<std::uint64_t>(at)));
  }
}

TEST_P(MergeOnRunners, ManyPartsSomeOfThemEmpty) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    std::vector<int> cuts;
    for (std::int64_t n = random.integer(0, 40); n > 0; --n)
      cuts.push_back(static_cast<int>(random.integer(0, 300)));
    std::sort(cuts.begin(), cuts.end());
    expect_whole(cut(cuts, 300, 2, DType::kFloat32, 100 + seed));
  }
}

TEST_P(MergeOnRunners, LseMayBeAbsent) {
  const Parts parts = cut({7}, 40, 1, DType::kFloat32, 3);
  const Outputs with = make_outputs(parts.whole), without = make_outputs(parts.whole);
  runner().merge(parts.out, parts.lse, with.out, with.lse);
  runner().merge(parts.out, parts.lse, without.out, {});
  EXPECT_TRUE(same_bytes(with.out, without.out));
}

/// The parts are rounded once, the result once more; weights sum to one.
TEST_P(MergeOnRunners, SixteenBitParts) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Parts parts = cut({50, 120}, 200, 4, dtype, 4);
    for (const DType out_dtype : kTypes) {
      const Tensor out(out_dtype, parts.whole.q.shape());
      runner().merge(parts.out, parts.lse, out, {});
      const int dim = parts.whole.row.head_dim;
      for (std::int64_t row = 0; row < out.numel() / dim; ++row) {
        double largest = 0;
        for (const Tensor& part : parts.out) {
          for (int d = 0; d < dim; ++d)
            largest = std::max(largest, std::abs(double{part.get(row * dim + d)}));
        }
        const double limit =
            1.01 * (rounding_step(dtype, largest) + rounding_step(out_dtype, largest)) + 1e-6;
        for (int d = 0; d < dim; ++d) {
          const std::int64_t i = row * dim + d;
          ASSERT_NEAR(out.get(i), parts.reference.out[static_cast<std::size_t>(i)], limit);
        }
      }
    }
  }
}

TEST_P(MergeOnRunners, AnyNumberOfPartsOfAnyDim) {
  Random random(1);
  for (const int count : {1, 2, 3, 32, 33, 512}) {
    for (const std::int64_t dim : {1, 7, 64, 80, 128, 256, 2056}) {
      if (count > 33 && dim > 128) continue;
      for (const DType type : kTypes) {
        SCOPED_TRACE(std::to_string(count) + " parts of dim " + std::to_string(dim));
        const Merge m = make_merge(random, count, {5, 3, dim}, dim % 3 != 0, type, [&](int, std::size_t) {
          return random.chance(0.2) ? -kInfinity : 20 * random.normal();
        });
        merge(m);
        expect_merged(m);
      }
    }
  }
}

TEST_P(MergeOnRunners, ManyRows) {
  Random random(2);
  const Merge m = make_merge(random, 4, {700, 9, 128}, true, DType::kBFloat16,
                             [&](int, std::size_t) { return 3 * random.normal(); });
  merge(m);
  expect_merged(m);
}

/// exp(0) is exact, and every other operation is that of the CPU.
TEST_P(MergeOnRunners, EqualLseGivesTheBitsOfTheCpu) {
  Random random(3);
  for (const int count : {1, 5, 64}) {
    const Merge m =
        make_merge(random, count, {4, 8, 128}, true, DType::kFloat32, [&](int part, std::size_t pair) {
          return part > 0 && random.chance(0.3) ? -kInfinity : static_cast<float>(pair) - 7.5F;
        });
    const Tensor expected(DType::kFloat32, {4, 8, 128});
    runners()[0]->merge(m.parts, m.part_lse, expected, {});
    merge(m);
    EXPECT_TRUE(same_bytes(expected, m.out)) << count;
  }
}

TEST_P(MergeOnRunners, AllPartsEmpty) {
  Random random(4);
  for (const DType type : kTypes) {
    const Merge m =
        make_merge(random, 3, {2, 3, 64}, true, type, [](int, std::size_t) { return -kInfinity; });
    merge(m);
    for (std::int64_t i = 0; i < m.out.numel(); ++i) ASSERT_EQ(m.out.get(i), 0.0F);
    for (const float x : m.lse.as<float>()) ASSERT_EQ(x, -kInfinity);
  }
}

/// A part with LSE -inf contributes nothing, whatever its values are.
TEST_P(MergeOnRunners, NanInAnEmptyPartIsIgnored) {
  Parts parts = cut({20}, 40, 1, DType::kFloat32, 5);
  const Outputs expected = make_outputs(parts.whole), actual = make_outputs(parts.whole);
  runner().merge(parts.out, parts.lse, expected.out, expected.lse);
  parts.out.emplace(parts.out.begin() + 1, DType::kFloat32, parts.whole.q.shape());  // bytes 0xFF: NaN
  const std::vector<float> empty(static_cast<std::size_t>(parts.whole.row.q_heads), -kInfinity);
  parts.lse.insert(parts.lse.begin() + 1, Tensor::of(DType::kFloat32, {1, parts.whole.row.q_heads}, empty));
  runner().merge(parts.out, parts.lse, actual.out, actual.lse);
  EXPECT_TRUE(same_bytes(expected.out, actual.out));
  EXPECT_TRUE(same_bytes(expected.lse, actual.lse));
}

TEST_P(MergeOnRunners, ExtremeLseValues) {
  const auto merge_two = [&](float lse_a, float lse_b) {
    Random random(0);
    const Merge m = make_merge(random, 2, {1, 1, 1}, false, DType::kFloat32,
                               [&](int part, std::size_t) { return part == 0 ? lse_a : lse_b; });
    m.parts[0].set(0, 1), m.parts[1].set(0, 3);
    merge(m);
    return std::pair{m.out.get(0), m.lse.get(0)};
  };
  EXPECT_EQ(merge_two(1e30F, 1e30F), (std::pair{2.0F, 1e30F}));
  EXPECT_EQ(merge_two(-1e30F, 1e30F), (std::pair{3.0F, 1e30F}));
  EXPECT_EQ(merge_two(-65504.0F, -65504.0F).first, 2.0F);
  EXPECT_EQ(merge_two(200.0F, 0.0F), (std::pair{1.0F, 200.0F}));
  const auto [out, lse] = merge_two(0.0F, 0.0F);
  EXPECT_EQ(out, 2.0F);
  EXPECT_NEAR(lse, std::log(2.0F), 1e-6);

  constexpr std::array<float, 4> kExtremes = {1e30F, -1e30F, -65504.0F, 200.0F};
  Random random(5);
  const Merge far =
      make_merge(random, 2, {4, 4, 64}, false, DType::kFloat32,
                 [&](int part, std::size_t pair) { return kExtremes[part == 0 ? pair / 4 : pair % 4]; });
  merge(far);
  expect_merged(far);
}

/// The result lies inside of a wider tensor, at any alignment of its elements.
TEST_P(MergeOnRunners, StridedOrUnaligned) {
  Random random(6);
  for (const DType type : kTypes) {
    const Merge m =
        make_merge(random, 3, {6, 4, 64}, true, type, [&](int, std::size_t) { return random.normal(); });
    merge(m);
    for (const int offset : {0, 1, 8}) {
      const Tensor wide(type, {6, 4, 80});
      const std::unique_ptr<Place> place = runner().place();
      const TensorView base = place->add(wide.view());
      TensorView out = base;
      out.shape[2] = 64;
      out.data = static_cast<std::uint8_t*>(base.data) + offset * dtype_bits(type) / 8;
      halftone::merge(place->add(m.parts), place->add(m.part_lse), out, {});
      place->finish();
      place->read(base, wide);
      for (std::int64_t i = 0; i < wide.numel(); ++i) {
        const std::int64_t d = i % 80 - offset;
        if (d < 0 || d >= 64) {
          ASSERT_TRUE(std::isnan(wide.get(i))) << i;
        } else {
          ASSERT_EQ(wide.get(i), m.out.get(i / 80 * 64 + d)) << i;
        }
      }
    }
  }
}

TEST_P(MergeOnRunners, NoRows) {
  Random random(7);
  merge(make_merge(random, 2, {0, 4, 64}, false, DType::kFloat32, [](int, std::size_t) { return 0.0F; }));
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
