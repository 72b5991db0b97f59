// Arithmetic::kHalfInt8 on every backend that has it: its integers bit by bit, and what a NaN reaches.
#include <cmath>
#include <cstring>
#include <limits>

#include "format/hadamard.h"
#include "halftone/error.h"
#include "tests/attention/coded_arithmetic.h"
#include "tests/attention/select.h"
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

class HalfInt8 : public CodedArithmetic {};
HALFTONE_ON_EVERY_RUNNER(HalfInt8);

AttentionCase half_case(const std::string& format) {
  AttentionCase row;
  row.name = format;
  row.requests = {{1, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 1}};
  row.k_format = format;
  row.v_format = "fp16";  // which every backend takes
  row.arithmetic = "half_int8";
  return row;
}

/// Where it is judged by its last bit: prompts of rows enough for any kernel.
std::vector<AttentionCase> prompt_cases(const std::vector<Request>& requests) {
  std::vector<AttentionCase> rows;
  for (const char* format : {"bf16", "fp16", "fp8", "int8-tensor", "int8-token", "int8-head", "int4-g32"}) {
    AttentionCase row = half_case(format);
    row.requests = requests;
    row.mask.causal = true;
    rows.push_back(row);
    if (row.k_format == "bf16") {
      row.plain = DType::kBFloat16;
      row.name += ", plain";
      rows.push_back(row);
    }
  }
  return rows;
}

/// A row's codes and scale, by the words of docs/arithmetic.md.
struct Codes {
  std::vector<int> codes;
  float scale = 0;
};
Codes codes_of(std::span<const float> x) {
  float absmax = 0;
  for (const float value : x) absmax = std::max(absmax, std::abs(value));
  Codes result{std::vector<int>(x.size()), 0};
  const float inverse = 127.0F / absmax;
  if (!std::isfinite(inverse)) return result;
  result.scale = absmax / 127.0F;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float scaled = x[i] * inverse;
    result.codes[i] = static_cast<int>(std::nearbyint(scaled));
  }
  return result;
}

/// Of a logit that is scaled in another order, or to base 2 and back, an offset of 7 taken from it.
double logit_slack(double logit) { return std::abs(logit) * 0x1p-20 + 0x1p-19; }

/// With one key the LSE is the logit: S * (scale of Q * scale of K) * scale, in fp32, to the last bit on the
/// CPU.
TEST_P(HalfInt8, TheLogitOfOneKeyIsExact) {
  for (const char* format : {"bf16", "fp16", "fp8", "fp8-token-head", "int8-token", "int8-head", "int8-g32",
                             "int8-token-head-asym", "int4-g32", "int4-row"}) {
    for (const bool rotated : {false, true}) {
      for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
        AttentionCase row = half_case(format);
        if (head_dim % 32 != 0 && row.k_format.find("g32") != std::string::npos) continue;
        row.head_dim = head_dim;
        row.rotate_k = rotated;
        row.scale = 0.25F;
        row.data = Data::kOutlierChannels;
        const Problem p = make_problem(row);
        if (!serves(p)) continue;
        const Outputs outputs = run(p);
        const std::vector<double> stored = stored_values(*p.cache).k;
        const std::vector<float> keys(stored.begin(), stored.end());
        std::vector<float> queries = p.q.to_floats();
        const auto dim = static_cast<std::size_t>(head_dim);
        const int group = row.q_heads / row.kv_heads;
        for (int token = 0; token < static_cast<int>(row.requests.size()); ++token) {
          for (int head = 0; head < row.q_heads; ++head) {
            const std::size_t at = static_cast<std::size_t>(token * row.q_heads + head) * dim;
            if (rotated) hadamard::rotate(&queries[at], head_dim);
            const Codes q = codes_of(std::span(queries).subspan(at, dim));
            const std::size_t key = static_cast<std::size_t>(token * row.kv_heads + head / group) * dim;
            const float actual = outputs.lse.get(token * row.q_heads + head);
            if (row.k_format == "int8-token" || row.k_format == "int8-head") {  // as they are
              double dot = 0;
              for (std::size_t d = 0; d < dim; ++d) dot += q.codes[d] * stored[key + d];
              const double expected = dot * static_cast<double>(q.scale * row.scale);
              ASSERT_NEAR(actual, expected, logit_slack(expected)) << format << ", head_dim " << head_dim;
              continue;
            }
            const Codes k = codes_of(std::span(keys).subspan(key, dim));
            int dot = 0;
            for (std::size_t d = 0; d < dim; ++d) dot += q.codes[d] * k.codes[d];
            const float expected = static_cast<float>(dot) * (q.scale * k.scale) * row.scale;
            if (runner().name() == "cpu") {
              ASSERT_EQ(actual, expected) << format << (rotated ? "+rot" : "") << ", head_dim " << head_dim;
            } else {
              ASSERT_NEAR(actual, expected, logit_slack(expected)) << format << ", head_dim " << head_dim;
            }
          }
        }
      }
    }
  }
}

/// The codes of a K with one scale per row count as they are: in 16-bit arithmetic the same K differs from
/// half_int8 by what Q's integers lose, and where Q is whole numbers up to 127, by nothing but rounding.
TEST_P(HalfInt8, CodesOfTheCacheAreUsedAsTheyAre) {
  for (const char* format : {"int8-tensor", "int8-token", "int8-head", "int8-g128"}) {
    AttentionCase row = half_case(format);
    row.requests = {{40, 200}, {70, 70}};
    row.out_dtype = DType::kFloat32;
    row.q_dtype = DType::kFloat16;
    row.v_format = "fp16";
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    Random random(3);
    for (std::int64_t i = 0; i < p.q.numel(); ++i) {
      const auto whole = static_cast<float>(random.integer(-127, 127));
      p.q.set(i, (i % row.head_dim == 5 ? 127.0F : whole) / 64.0F);
    }
    AttentionCase exact = row;
    exact.arithmetic = "16-bit";
    Problem same = make_problem(exact);
    same.q = p.q.clone();
    EXPECT_EQ(judge(same, run(p)), "") << format;
  }
}

TEST_P(HalfInt8, ZeroAndTinyRowsGiveEqualWeights) {
  for (AttentionCase row : prompt_cases({{70, 70}, {3, 40}})) {
    for (const DType q_dtype : {DType::kFloat32, DType::kBFloat16}) {
      row.q_dtype = q_dtype;
      const Problem p = make_problem(row);
      if (!serves(p)) continue;
      for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, i / row.head_dim % 2 == 0 ? 0.0F : 1e-37F);
      const Outputs outputs = run(p);
      EXPECT_EQ(judge(p, outputs), "") << row.name;
      EXPECT_NEAR(outputs.lse.get(0), 0.0F, 1e-6F) << row.name;  // one key, logit 0
      EXPECT_NEAR(outputs.lse.get(69 * row.q_heads + 1), std::log(70.0F), 1e-5F) << row.name;
    }
  }
}

TEST_P(HalfInt8, NanInAQueryReachesItsRowAlone) {
  expect_nan_in_a_query_reaches_its_row_alone(prompt_cases({{70, 100}, {5, 40}}));
}

/// One in a row of K, or in its scale, reaches the rows that see the token.
TEST_P(HalfInt8, NanInAKeyReachesTheRowsThatSeeIt) {
  for (const AttentionCase& row : prompt_cases({{70, 70}})) {
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs clean = run(p);
    constexpr int kToken = 40;  // causal: seen from query 40 on
    if (row.plain) {
      p.k.set(std::int64_t{kToken} * row.kv_heads * row.head_dim + 3, kInf);
    } else {
      const PageLayout layout = page_layout(p.cache->spec);
      const bool sixteen = !p.cache->spec.k_format.quantised();
      if (!sixteen && layout.k_param_bytes == 0) continue;
      const std::int64_t tile = kToken / kTileTokens * layout.tile_bytes;
      const int within = kToken % kTileTokens, groups = row.k_format == "int4-g32" ? row.head_dim / 32 : 1;
      std::uint8_t* at = p.cache->pages.bytes().data() + tile +
                         p.cache->block_table.as<std::int32_t>()[0] * layout.page_bytes +
                         (sixteen ? within * row.head_dim * 2 : layout.k_param_offset + within * groups * 2);
      std::memset(at, 0xFF, 2);
    }
    const Outputs outputs = run(p);
    for (std::int64_t query = 0; query < 70; ++query) {
      const std::int64_t r = query * row.q_heads;  // of KV head 0
      ASSERT_EQ(std::isnan(outputs.lse.get(r)), query >= kToken) << row.name << ", query " << query;
      ASSERT_EQ(outputs.lse.get(r + row.q_heads - 1), clean.lse.get(r + row.q_heads - 1)) << row.name;
      ASSERT_TRUE(query >= kToken || outputs.lse.get(r) == clean.lse.get(r)) << row.name;
    }
  }
}

TEST_P(HalfInt8, DeadBytesOfPagesNeverMatter) {
  for (AttentionCase row : prompt_cases({{70, 100}, {1, 33}, {20, 7}})) {
    if (row.plain) continue;
    row.page_size = 32;
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    p.cache = refilled(p, {0x00});
    const Outputs clean = run(p);
    ASSERT_EQ(judge(p, clean), "") << row.name;
    for (const std::uint8_t byte : {0xFF, 0x7C, 0x7F, 0x80}) {
      p.cache = refilled(p, {byte});
      expect_same_bits(clean, run(p), row.name);
    }
  }
}

TEST_P(HalfInt8, BatchInvariantBitsDoNotDependOnNeighbours) {
  for (AttentionCase row : prompt_cases({{1, 700}, {80, 900}, {2, 900}, {0, 50}, {193, 193}, {1, 0}})) {
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

}  // namespace
}  // namespace halftone::testing
