// Arithmetic::kFullInt8 and kFp8 on every backend that has them: their operands by the words of
// docs/arithmetic.md, and what a NaN or a dead byte reaches.
#include <cmath>
#include <cstring>
#include <limits>

#include "reference/oracle.h"
#include "tests/attention/coded_arithmetic.h"
#include "tests/attention/select.h"
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

class EightBit : public CodedArithmetic {
 protected:
  void SetUp() override {
    if (runner().name() != std::string_view("cpu")) GTEST_SKIP() << "these arithmetics are the CPU's";
  }
};
HALFTONE_ON_EVERY_RUNNER(EightBit);

constexpr int kBlock = 128;

AttentionCase case_of(const std::string& arithmetic, const std::string& format) {
  AttentionCase row;
  row.name = arithmetic + ", " + format;
  row.k_format = format;
  row.arithmetic = arithmetic;
  row.out_dtype = DType::kFloat32;
  return row;
}

std::vector<AttentionCase> cases(const std::vector<Request>& requests) {
  std::vector<AttentionCase> rows;
  for (const char* arithmetic : {"full_int8", "fp8"}) {
    for (const char* format : {"bf16", "fp8", "fp8-static-head", "int8-tensor", "int8-head", "int4-g32"}) {
      AttentionCase row = case_of(arithmetic, format);
      row.requests = requests;
      row.mask.causal = true;
      rows.push_back(row);
      if (row.k_format == "bf16") {
        row.plain = DType::kBFloat16;
        row.name += ", plain";
        rows.push_back(row);
      }
    }
  }
  return rows;
}

/// Values of E4M3 by their definition: sign, four exponent bits of bias 7, three of mantissa.
double nearest_e4m3(double x) {
  double best = 0;
  for (int code = 0; code < 127; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    const double value = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    const double better = std::abs(std::abs(x) - best) - std::abs(std::abs(x) - value);
    if (better > 0 || (better == 0 && code % 2 == 0)) best = value;
  }
  return std::copysign(best, x);
}

/// A row by the rule of fp8.
std::vector<double> fp8_values(std::span<const float> x) {
  double absmax = 0;
  for (const float value : x) absmax = std::max(absmax, std::abs(double{value}));
  double scale = std::ldexp(1.0, -126);
  while (absmax / scale > 448) scale *= 2;
  std::vector<double> result;
  for (const float value : x) result.push_back(nearest_e4m3(value / scale) * scale);
  return result;
}

/// With one key the LSE is the logit, and the output V's row in a block of its own: one token is its own
/// largest, so integers return it, and E4M3 its rounding.
TEST_P(EightBit, OneKeyShowsTheOperands) {
  for (const char* arithmetic : {"full_int8", "fp8"}) {
    for (const char* format : {"bf16", "fp16", "int8-g32", "int4-g32", "fp8"}) {
      for (const int head_dim : {64, 80, 128, 256, 512}) {
        AttentionCase row = case_of(arithmetic, format);
        if (head_dim % 32 != 0 && row.k_format.find("g32") != std::string::npos) continue;
        row.requests = {{1, 1}, {1, 1}, {1, 1}, {1, 1}};
        row.head_dim = head_dim;
        row.scale = 0.25F;
        row.data = Data::kOutlierChannels;
        const Problem p = make_problem(row);
        if (!serves(p)) continue;
        const Outputs outputs = run(p);
        const bool fp8 = row.arithmetic == "fp8";
        const reference::ExactValues stored = stored_values(*p.cache);
        const std::vector<float> q = p.q.to_floats(), k(stored.k.begin(), stored.k.end());
        const auto dim = static_cast<std::size_t>(head_dim);
        const auto values = [&](const std::vector<float>& x, std::size_t at) {
          const std::span<const float> part = std::span(x).subspan(at, dim);
          return fp8 ? fp8_values(part) : reference::int8_rows(part, head_dim);
        };
        for (int r = 0; r < 4 * row.q_heads; ++r) {
          const auto head = static_cast<std::size_t>(r / (row.q_heads / row.kv_heads));
          const std::vector<double> query = values(q, static_cast<std::size_t>(r) * dim);
          const bool as_stored = fp8 && row.k_format == "fp8";
          const std::vector<double> key =
              as_stored
                  ? std::vector<double>(stored.k.begin() + static_cast<std::ptrdiff_t>(head * dim),
                                        stored.k.begin() + static_cast<std::ptrdiff_t>((head + 1) * dim))
                  : values(k, head * dim);
          double logit = 0, size = 0;
          for (std::size_t d = 0; d < dim; ++d)
            logit += query[d] * key[d], size += std::abs(query[d] * key[d]);
          ASSERT_NEAR(outputs.lse.get(r), logit / 4, 1e-6 * size + 1e-5) << row.name << ", row " << r;
          for (std::size_t d = 0; d < dim; ++d) {
            const auto v = static_cast<float>(stored.v[head * dim + d]);
            const double expected = fp8 && !as_stored ? fp8_values(std::span(&v, 1))[0] : v;
            ASSERT_NEAR(outputs.out.get(r * head_dim + static_cast<int>(d)), expected, std::abs(v) * 1e-6)
                << row.name << ", row " << r << ", dim " << d;
          }
        }
      }
    }
  }
}

/// Codes of a K with one scale per row, and codes of V under static scales, count as they are: with a Q that
/// E4M3 holds, 16-bit arithmetic says the same but for what fp32 rounds.
TEST_P(EightBit, Fp8TakesCodesOfTheCacheAsTheyAre) {
  for (const char* format : {"fp8", "fp8-static-head", "fp8-token-head"}) {
    AttentionCase row = case_of("fp8", format);
    row.v_format = row.k_format == "fp8-token-head" ? "fp8" : row.k_format;
    row.requests = {{40, 300}, {70, 70}};
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    Random random(3);
    for (std::int64_t i = 0; i < p.q.numel(); ++i) {
      p.q.set(i, static_cast<float>(random.integer(-15, 15)) / 16.0F);
    }
    AttentionCase exact = row;
    exact.arithmetic = "16-bit";
    Problem same = make_problem(exact);
    same.q = p.q.clone();
    const Outputs outputs = run(p);
    EXPECT_EQ(testing::judge(same, make_reference(same), outputs), "") << format;
    EXPECT_EQ(judge(p, outputs), "") << format;
  }
}

/// Logits of ALiBi alone: -slope * distance. Weights by the words: codes relative to the largest of 64
/// tokens.
TEST_P(EightBit, WeightsAreCodesOfTheirChunk) {
  AttentionCase row = case_of("full_int8", "bf16");
  row.requests = {{1, 300}, {1, 77}};
  row.alibi = true;
  const Problem p = make_problem(row);
  if (!serves(p) || runner().name() != "cpu") return;
  for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, 0.0F);
  for (int head = 0; head < row.q_heads; ++head) {
    p.alibi_slopes.set(head, 0.003F * static_cast<float>(head * head + 1));
  }
  const Outputs outputs = run(p);
  const std::vector<double> stored = stored_values(*p.cache).v;
  const std::int64_t channels = std::int64_t{row.kv_heads} * row.head_dim;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < row.requests.size(); ++i) {
    const int keys = row.requests[i].kv_len;
    const std::vector<float> given(stored.begin() + first * channels,
                                   stored.begin() + (first + keys) * channels);
    const std::vector<double> v = reference::int8_blocks(given, channels, 0);
    for (int head = 0; head < row.q_heads; ++head) {
      const double slope = p.alibi_slopes.get(head);
      std::vector<double> sums(static_cast<std::size_t>(row.head_dim));
      double sum = 0, unsure = 0;
      for (int t = 0; t < keys; ++t) {
        const int newest = std::min(keys - 1, t / 64 * 64 + 63);
        const double p8 = 255 * std::exp(-slope * (newest - t)),
                     unit = std::exp(-slope * (keys - 1 - newest)) / 255;
        sum += std::exp(-slope * (keys - 1 - t));
        if (std::abs(p8 - std::floor(p8) - 0.5) < 1e-3) unsure += unit;
        const double* value = &v[static_cast<std::size_t>(t * channels + head / 4 * row.head_dim)];
        for (int d = 0; d < row.head_dim; ++d)
          sums[static_cast<std::size_t>(d)] += std::nearbyint(p8) * unit * value[d];
      }
      for (int d = 0; d < row.head_dim; ++d) {
        const std::int64_t at = (static_cast<std::int64_t>(i) * row.q_heads + head) * row.head_dim + d;
        ASSERT_NEAR(outputs.out.get(at), sums[static_cast<std::size_t>(d)] / sum, 1e-6 + 5 * unsure / sum)
            << "request " << i << ", head " << head << ", dim " << d;
      }
      ASSERT_NEAR(outputs.lse.get(static_cast<std::int64_t>(i) * row.q_heads + head), std::log(sum), 1e-5);
    }
    first += keys;
  }
}

TEST_P(EightBit, NanInAQueryReachesItsRowAlone) {
  expect_nan_in_a_query_reaches_its_row_alone(cases({{70, 200}, {5, 40}}));
}

/// One in K reaches the rows that see the token; one in V a channel of the rows that see any of its block.
TEST_P(EightBit, NanInKReachesRowsAndInVAChannelOfItsBlock) {
  for (const char* arithmetic : {"full_int8", "fp8"}) {
    for (const bool in_v : {false, true}) {
      AttentionCase row = case_of(arithmetic, "bf16");
      row.plain = DType::kBFloat16;
      row.requests = {{300, 300}};
      row.mask.causal = true;
      row.mask.window_left = 60;
      const Problem p = make_problem(row);
      if (!serves(p)) continue;
      constexpr int kToken = 170, kDim = 3;
      (in_v ? p.v : p.k).set(std::int64_t{kToken} * row.kv_heads * row.head_dim + kDim, kInf);
      const Outputs outputs = run(p);
      for (std::int64_t query = 0; query < 300; ++query) {
        const bool sees_token = query >= kToken && query - 60 <= kToken;
        const bool sees_block = query >= kBlock && query - 60 < 2 * kBlock;
        const std::int64_t r = query * row.q_heads;  // of KV head 0
        ASSERT_EQ(std::isnan(outputs.lse.get(r)), !in_v && sees_token) << row.name << ", query " << query;
        for (int d = 0; d < row.head_dim; ++d) {
          const bool expected = in_v ? sees_block && d == kDim : sees_token;
          ASSERT_EQ(std::isnan(outputs.out.get(r * row.head_dim + d)), expected)
              << row.name << ", query " << query << ", dim " << d;
        }
        ASSERT_TRUE(std::isfinite(outputs.lse.get(r + row.q_heads - 1)));
        ASSERT_TRUE(std::isfinite(outputs.out.get((r + row.q_heads - 1) * row.head_dim + kDim)));
      }
    }
  }
}

TEST_P(EightBit, DeadBytesOfPagesNeverMatter) {
  for (AttentionCase row : cases({{70, 100}, {1, 33}, {20, 7}, {3, 257}})) {
    if (row.plain) continue;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs clean = run(p);
    ASSERT_EQ(judge(p, clean), "") << row.name;
    for (const std::uint8_t byte : {0xFF, 0x7C, 0x7F, 0x80}) {
      Problem other = make_problem(row);
      other.cache = refilled(p, {byte});
      expect_same_bits(clean, run(other), row.name);
    }
  }
}

/// Tokens that no query of the request sees do not count, so a window's pages may go while their block is in
/// use: neither what lies there nor what the table says of them matters.
TEST_P(EightBit, TokensBeforeTheWindowDoNotCount) {
  for (AttentionCase row : cases({{3, 400}, {20, 333}})) {
    if (row.plain) continue;
    row.page_size = 16;
    row.mask.window_left = 70;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs clean = run(p);
    ASSERT_EQ(judge(p, clean), "") << row.name;
    const std::int64_t columns = p.cache->block_table.shape()[1];
    for (std::size_t i = 0; i < row.requests.size(); ++i) {
      const Request& r = row.requests[i];
      for (int page = 0; page < (r.kv_len - r.q_len - row.mask.window_left) / row.page_size; ++page) {
        p.cache->block_table
            .as<std::int32_t>()[i * static_cast<std::size_t>(columns) + static_cast<std::size_t>(page)] = -1;
      }
    }
    if (runner().name() != "cpu") continue;
    const Outputs evicted = run(p);
    expect_same_bits(clean, evicted, row.name);
    EXPECT_EQ(evicted.status.as<std::int32_t>()[0], 0) << row.name;
  }
}

TEST_P(EightBit, BatchInvariantBitsDoNotDependOnNeighbours) {
  for (AttentionCase row : cases({{1, 700}, {80, 900}, {2, 900}, {0, 50}, {193, 193}, {1, 0}})) {
    row.policy = SplitPolicy::kBatchInvariant;
    row.cu_q = true;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs expected = run(p);
    for (const std::size_t i : {0U, 1U, 2U, 4U}) {
      const Problem alone = select(p, {i}, true);
      const Outputs actual = run(alone);
      ASSERT_EQ(request_bytes(p, expected.out, i), request_bytes(alone, actual.out, 0)) << row.name;
      ASSERT_EQ(request_bytes(p, expected.lse, i), request_bytes(alone, actual.lse, 0)) << row.name;
    }
  }
}

/// One key of 131,072 has half of the weight. Where sums lose the many small weights beside it, or the large
/// one, the output is off by more than a percent.
TEST_P(EightBit, NeedleIn128KTokens) {
  constexpr int kTokens = 131072, kNeedle = 77777, kDim = 64;
  for (const char* arithmetic : {"full_int8", "fp8"}) {
    AttentionCase row = case_of(arithmetic, "bf16");
    row.plain = DType::kBFloat16;
    row.requests = {{1, kTokens}};
    row.q_heads = row.kv_heads = 1;
    row.head_dim = kDim;
    row.scale = 1;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    for (int d = 0; d < kDim; ++d) p.q.set(d, d == 0 ? 1.0F : 0.0F);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (int d = 0; d < kDim; ++d) {
        p.k.set(t * kDim + d, d == 0 && t == kNeedle ? 11.75F : 0.0F);
        p.v.set(t * kDim + d, t == kNeedle ? -4.0F : 1.0F + static_cast<float>(d) / 64);
      }
    }
    const Outputs outputs = run(p);
    const double logit = row.arithmetic == "fp8" ? 12 : 11.75;  // 11.75 lies between codes of E4M3: 11 and 12
    const double needle = std::exp(logit), all = needle + kTokens - 1;
    EXPECT_NEAR(outputs.lse.get(0), std::log(all), 1e-4) << arithmetic;
    for (int d = 0; d < kDim; ++d) {
      const double value = 1 + d / 64.0,
                   rounded = row.arithmetic == "fp8" ? nearest_e4m3(value * 128) / 128 : value;
      const double expected = (needle * -4.0 + (kTokens - 1) * rounded) / all;
      EXPECT_NEAR(outputs.out.get(d), expected, 4e-3) << arithmetic << ", dim " << d;
    }
    EXPECT_EQ(judge(p, outputs), "") << arithmetic;
  }
}

}  // namespace
}  // namespace halftone::testing
