// The judge is judged first: the oracle against hand-worked values and against a naive long double loop that
// shares no code with it, and the tolerance rule against errors made on purpose.
#include "reference/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/random.h"
#include "reference/sanitizer.h"
#include "reference/tensor.h"
#include "testing/cases.h"

namespace halftone::testing {
namespace {

using reference::from_bits16;
using reference::OracleParams;
using reference::OracleResult;
using reference::PlainResult;
using reference::round_to;
using reference::to_bits16;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The definition, key by key: no ranges, no blocks.
OracleResult naive(const OracleParams& p, const std::vector<float>& q, const std::vector<float>& k,
                   const std::vector<float>& v) {
  OracleResult result;
  for (std::int64_t i = 0; i < p.q_len; ++i) {
    for (int h = 0; h < p.q_heads; ++h) {
      const int kv_head = h * p.kv_heads / p.q_heads;
      const std::int64_t position = i + p.kv_len - p.q_len;
      std::vector<long double> out(static_cast<std::size_t>(p.v_dim()), 0);
      long double sum =
          p.sinks.empty() ? 0 : std::exp(static_cast<long double>(p.sinks[static_cast<std::size_t>(h)]));
      bool empty = true;
      for (std::int64_t j = 0; j < p.kv_len; ++j) {
        if (p.causal && j > position) continue;
        if (p.window_left >= 0 && j < position - p.window_left) continue;
        if (p.window_right >= 0 && j > position + p.window_right) continue;
        empty = false;
        long double x = 0;
        for (int d = 0; d < p.head_dim; ++d) {
          x += static_cast<long double>(q[static_cast<std::size_t>((i * p.q_heads + h) * p.head_dim + d)]) *
               k[static_cast<std::size_t>((j * p.kv_heads + kv_head) * p.head_dim + d)];
        }
        x *= p.scale != 0 ? static_cast<long double>(p.scale)
                          : 1 / std::sqrt(static_cast<long double>(p.head_dim));
        if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
        if (!p.alibi_slopes.empty()) {
          x -= p.alibi_slopes[static_cast<std::size_t>(h)] * static_cast<long double>(std::abs(position - j));
        }
        const long double weight = std::exp(x);
        sum += weight;
        for (int d = 0; d < p.v_dim(); ++d) {
          out[static_cast<std::size_t>(d)] +=
              weight * v[static_cast<std::size_t>((j * p.kv_heads + kv_head) * p.v_dim() + d)];
        }
      }
      for (const long double x : out) result.out.push_back(empty ? 0 : static_cast<double>(x / sum));
      result.lse.push_back(empty ? -kInfinity : static_cast<double>(std::log(sum)));
    }
  }
  return result;
}

TEST(Random, NormalsAreThoseOfTheCLibrary) {
  Random one_by_one(3), together(3);
  std::vector<float> x(1'000'003);
  together.normals(x);
  std::int64_t different = 0;
  for (const float value : x) different += value != one_by_one.normal() ? 1 : 0;
  EXPECT_EQ(different, 0);
  EXPECT_EQ(one_by_one.next(), together.next());
}

std::vector<float> normals(Random& random, std::int64_t n) {
  std::vector<float> x(static_cast<std::size_t>(n));
  fill(random, Data::kNormal, x, 1, 1);
  return x;
}

TEST(Oracle, HandWorked) {
  // Two keys with logits 0 and ln 3: weights 1/4 and 3/4.
  OracleParams p;
  p.q_len = 1;
  p.kv_len = 2;
  p.head_dim = 1;
  p.scale = 1;
  const std::vector<double> q = {1}, k = {0, std::log(3.0)}, v = {4, 8};
  OracleResult r = attention_oracle(p, q.data(), k.data(), v.data());
  EXPECT_DOUBLE_EQ(r.out[0], 7);
  EXPECT_DOUBLE_EQ(r.lse[0], std::log(4.0));
  // A sink with logit ln 4 doubles the denominator.
  const std::vector<float> sink = {std::log(4.0F)};
  p.sinks = sink;
  r = attention_oracle(p, q.data(), k.data(), v.data());
  EXPECT_NEAR(r.out[0], 3.5, 1e-7);
  EXPECT_NEAR(r.lse[0], std::log(8.0), 1e-7);
}

TEST(Oracle, BottomRightAlignment) {
  OracleParams p;
  p.q_len = 3;
  p.kv_len = 2;
  p.head_dim = 1;
  p.causal = true;
  const std::vector<float> q = {0, 0, 0}, k = {1, 2}, v = {10, 20};
  const OracleResult r = attention_oracle(p, q.data(), k.data(), v.data());
  EXPECT_EQ(r.out, (std::vector<double>{0, 10, 15}));
  EXPECT_EQ(r.lse, (std::vector<double>{-kInfinity, 0, std::log(2.0)}));
}

TEST(Oracle, AgreesWithNaiveLoopForEveryOption) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    OracleParams p;
    p.q_len = random.integer(0, 40);
    p.kv_len = random.integer(0, 150);
    p.kv_heads = static_cast<int>(random.integer(1, 3));
    p.q_heads = p.kv_heads * static_cast<int>(random.integer(1, 4));
    p.head_dim = static_cast<int>(random.integer(1, 40));
    p.v_head_dim = random.chance(0.5) ? static_cast<int>(random.integer(1, 40)) : 0;
    p.causal = random.chance(0.5);
    if (random.chance(0.5)) p.window_left = static_cast<int>(random.integer(0, 60));
    if (random.chance(0.5)) p.window_right = static_cast<int>(random.integer(0, 60));
    if (random.chance(0.5)) p.scale = 0.3;
    if (random.chance(0.5)) p.softcap = 3;
    const std::vector<float> slopes = normals(random, p.q_heads), sinks = normals(random, p.q_heads);
    if (random.chance(0.5)) p.alibi_slopes = slopes;
    if (random.chance(0.5)) p.sinks = sinks;
    const std::vector<float> q = normals(random, p.q_len * p.q_heads * p.head_dim);
    const std::vector<float> k = normals(random, p.kv_len * p.kv_heads * p.head_dim);
    const std::vector<float> v = normals(random, p.kv_len * p.kv_heads * p.v_dim());
    const OracleResult expected = naive(p, q, k, v);
    const OracleResult actual = attention_oracle(p, q.data(), k.data(), v.data());
    ASSERT_EQ(actual.out.size(), expected.out.size()) << "seed " << seed;
    ASSERT_EQ(actual.lse.size(), expected.lse.size()) << "seed " << seed;
    for (std::size_t i = 0; i < expected.out.size(); ++i)
      ASSERT_NEAR(actual.out[i], expected.out[i], 1e-12) << seed;
    for (std::size_t i = 0; i < expected.lse.size(); ++i) {
      if (expected.lse[i] == -kInfinity) {
        ASSERT_EQ(actual.lse[i], -kInfinity) << "seed " << seed;
      } else {
        ASSERT_NEAR(actual.lse[i], expected.lse[i], 1e-12) << "seed " << seed;
      }
    }
    const PlainResult plain = attention_plain_fp32(p, q.data(), k.data(), v.data(), DType::kFloat32);
    for (std::size_t i = 0; i < expected.out.size(); ++i)
      ASSERT_NEAR(plain.out[i], expected.out[i], 1e-4) << seed;
  }
}

/// A list is a request whose tokens are the listed keys, in that order and as often; a mask is no matter
/// then.
TEST(Oracle, ListedKeysAreARequestOfTheirOwn) {
  Random random(3);
  OracleParams p;
  p.q_len = 3;
  p.kv_len = 9;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.head_dim = 5;
  p.v_head_dim = 3;
  p.softcap = 4;
  const std::vector<float> sinks = normals(random, 4), q = normals(random, 3 * 4 * 5);
  const std::vector<float> k = normals(random, 9 * 2 * 5), v = normals(random, 9 * 2 * 3);
  p.sinks = sinks;
  const std::vector<std::vector<std::int64_t>> lists = {{8, 0, 0, 3}, {}, {5}};
  OracleParams listed = p;
  listed.lists = lists;
  listed.causal = true;
  const OracleResult actual = attention_oracle(listed, q.data(), k.data(), v.data());
  OracleResult expected;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    OracleParams one = p;
    one.q_len = 1;
    one.kv_len = static_cast<std::int64_t>(lists[i].size());
    std::vector<float> own_k, own_v;
    for (const std::int64_t key : lists[i]) {
      own_k.insert(own_k.end(), k.begin() + key * 10, k.begin() + (key + 1) * 10);
      own_v.insert(own_v.end(), v.begin() + key * 6, v.begin() + (key + 1) * 6);
    }
    const std::vector<float> own_q(q.begin() + static_cast<std::ptrdiff_t>(i) * 20,
                                   q.begin() + static_cast<std::ptrdiff_t>(i + 1) * 20);
    const OracleResult row = naive(one, own_q, own_k, own_v);
    expected.out.insert(expected.out.end(), row.out.begin(), row.out.end());
    expected.lse.insert(expected.lse.end(), row.lse.begin(), row.lse.end());
  }
  ASSERT_EQ(actual.out.size(), expected.out.size());
  for (std::size_t i = 0; i < expected.out.size(); ++i) EXPECT_NEAR(actual.out[i], expected.out[i], 1e-12);
  for (std::size_t i = 0; i < expected.lse.size(); ++i) {
    if (expected.lse[i] == -kInfinity) {
      EXPECT_EQ(actual.lse[i], -kInfinity);
    } else {
      EXPECT_NEAR(actual.lse[i], expected.lse[i], 1e-12);
    }
  }
}

TEST(Oracle, MaskedKeysAreNeverRead) {
  OracleParams p;
  p.q_len = 1;
  p.kv_len = 5;
  p.head_dim = 1;
  p.window_left = 1;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> q = {1}, k = {nan, nan, nan, 0, 0}, v = {nan, nan, nan, 1, 2};
  EXPECT_EQ(attention_oracle(p, q.data(), k.data(), v.data()).out[0], 1.5);
}

TEST(Rounding, EveryBitPatternSurvivesAndTiesGoToEven) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float x = from_bits16(dtype, static_cast<std::uint16_t>(bits));
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(from_bits16(dtype, to_bits16(dtype, x))));
        continue;
      }
      ASSERT_EQ(to_bits16(dtype, x), bits);
      ASSERT_EQ(round_to(dtype, x), x);
      const float next = from_bits16(dtype, static_cast<std::uint16_t>(bits + 1));
      if (!std::isfinite(next) || !std::isfinite(x)) continue;
      const float middle = static_cast<float>((static_cast<double>(x) + next) / 2);
      ASSERT_EQ(round_to(dtype, middle), bits % 2 == 0 ? x : next) << bits;
    }
  }
  EXPECT_EQ(round_to(DType::kFloat16, 65519.0F), 65504.0F);
  EXPECT_TRUE(std::isinf(round_to(DType::kFloat16, 65520.0F)));
}

TEST(Judge, FindsErrorsMadeOnPurpose) {
  const std::vector<double> truth = {1, 2, 0, 0};
  const std::vector<float> plain = {1, 2, 0, 0};
  const auto ok = [&](std::vector<float> actual, DType dtype) {
    return reference::judge_output(2, 2, truth.data(), plain.data(), actual.data(), dtype).ok;
  };
  EXPECT_TRUE(ok({1, 2, 0, 0}, DType::kFloat32));
  EXPECT_FALSE(ok({1.000001F, 2, 0, 0}, DType::kFloat32));
  EXPECT_TRUE(ok({1.004F, 2, 0, 0}, DType::kBFloat16));
  EXPECT_FALSE(ok({1.01F, 2, 0, 0}, DType::kBFloat16));
  EXPECT_FALSE(ok({1, 2, 0, 1e-30F}, DType::kFloat32)) << "an empty row must be exactly zero";
  EXPECT_FALSE(ok({1, NAN, 0, 0}, DType::kBFloat16));
  EXPECT_FALSE(ok({1, INFINITY, 0, 0}, DType::kBFloat16));
  const std::vector<double> lse = {3, -kInfinity};
  const std::vector<float> plain_lse = {3, -INFINITY};
  const auto lse_ok = [&](std::vector<float> actual) {
    return reference::judge_lse(2, lse.data(), plain_lse.data(), actual.data()).ok;
  };
  EXPECT_TRUE(lse_ok({3, -INFINITY}));
  EXPECT_FALSE(lse_ok({3.00001F, -INFINITY}));
  EXPECT_FALSE(lse_ok({3, -1e30F}));
  EXPECT_FALSE(lse_ok({-INFINITY, -INFINITY}));
}

TEST(TensorGuards, StrayWritesAreFound) {
  Tensor t(DType::kFloat32, {3});
  EXPECT_TRUE(t.guards_intact());
  if (reference::kAddressSanitizer) GTEST_SKIP() << "AddressSanitizer ends the process at the stray write";
  t.bytes().data()[12] = 7;
  EXPECT_FALSE(t.guards_intact());
}

TEST(CaseTable, NamesAreUniqueAndFindable) {
  std::vector<std::string> names;
  for (const auto& rows : {attention_cases(), benchmark_cases()}) {
    for (const AttentionCase& row : rows) names.push_back(row.name);
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  EXPECT_EQ(find_case("decode-8x1-t8192-b32").requests.size(), 32U);
  EXPECT_THROW(find_case("decode-8x1-t8192-b33"), std::out_of_range);
}

}  // namespace
}  // namespace halftone::testing
