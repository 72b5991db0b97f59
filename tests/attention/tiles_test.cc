// The blocked path by tiles of bf16 (AMX), which outputs of 16 bits take where there are any: accuracy, and
// what a row's bits may depend on. Skipped on other processors.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/attention/matrix_tiles.h"
#include "tests/attention/select.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

class Tiles : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cpu::matrix_tiles().pairs) GTEST_SKIP() << "no tiles of bf16";
  }
};

Outputs run_without_tiles(const Problem& p) {
  const cpu::WithoutTiles without;
  return run_problem(p);
}

void expect_agrees(const Problem& p, const std::string& what) {
  const Reference reference = make_reference(p);
  EXPECT_EQ(judge(p, reference, run_problem(p)), "") << what;
  EXPECT_EQ(judge(p, reference, run_without_tiles(p)), "") << what << ", without tiles";
}

/// Requests of more rows than the direct path takes, in and across spans and strips.
AttentionCase tiles_case() {
  AttentionCase row;
  row.q_heads = 4;
  row.kv_heads = 1;
  row.requests = {{20, 130}, {70, 70}, {33, 300}, {1, 40}, {257, 257}};
  row.mask.causal = true;
  return row;
}

/// Every element and kind of scale, as K and as V, and every head_dim.
TEST_F(Tiles, Formats) {
  int n = 0, ran = 0, differ = 0;
  for (const std::string format :
       {"plain", "bf16", "fp16", "fp8", "fp8-static-head", "fp8-token-head", "fp8-g32", "int8-tensor",
        "int8-head", "int8-token-f32", "int8-g32", "int8-token-asym-f32", "int4-token-sym", "int4-g32",
        "int4-row", "bf16:int4-g32", "int8-head:fp8", "fp8:bf16"}) {
    for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
      if (n++ % 5 != 0 && reference::kSanitized) continue;
      for (const char* arithmetic : {"16-bit", "half_int8"}) {
        AttentionCase row = tiles_case();
        row.head_dim = head_dim;
        row.arithmetic = arithmetic;
        row.q_dtype = n % 3 == 1 && row.arithmetic == "16-bit" ? DType::kFloat16 : DType::kBFloat16;
        row.rotate_k = format != "plain" && n % 4 == 2;
        row.rotate_v = format != "plain" && n % 4 == 3;
        row.seed = static_cast<std::uint64_t>(9000 + n);
        const std::size_t colon = format.find(':');
        if (format == "plain") {
          row.plain = row.q_dtype;
        } else {
          row.k_format = format.substr(0, colon);
          if (colon != std::string::npos) row.v_format = format.substr(colon + 1);
        }
        if (head_dim % 32 != 0 && format.find("g32") != std::string::npos) continue;
        const Problem p = make_problem(row);
        expect_agrees(p, format + ", " + arithmetic + ", " + std::to_string(head_dim));
        const auto with = run_problem(p), without = run_without_tiles(p);
        ++ran;
        differ +=
            std::equal(with.lse.bytes().begin(), with.lse.bytes().end(), without.lse.bytes().begin()) ? 0 : 1;
      }
    }
  }
  EXPECT_GT(2 * differ, ran) << "tiles were hardly taken";
}

TEST_F(Tiles, Options) {
  const Mask masks[] = {
      {}, {.causal = true}, {.causal = true, .window_left = 50}, {.window_left = 9, .window_right = 5}};
  int n = 0;
  for (const Mask& mask : masks) {
    for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
      for (int option = 0; option < 5; ++option) {
        AttentionCase row = tiles_case();
        row.mask = mask;
        row.k_format = format;
        row.softcap = option == 1 ? 20.0F : 0.0F;
        row.alibi = option == 2;
        row.sinks = option == 3;
        row.scale = option == 4 ? 0.3F : 0.0F;
        row.out_dtype = n % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
        row.policy = n % 3 == 0 ? SplitPolicy::kBatchInvariant : SplitPolicy::kReproducible;
        row.workers = n % 4 * 3;
        row.page_size = n % 5 == 0 ? 16 : 64;
        row.arithmetic = n % 2 == 1 ? "half_int8" : "16-bit";
        row.seed = static_cast<std::uint64_t>(9500 + n++);
        expect_agrees(make_problem(row), "option " + std::to_string(option) + ", " + format);
      }
    }
  }
}

/// A long request that workers share, and logits that grow from span to span.
TEST_F(Tiles, LongRequests) {
  for (const char* arithmetic : {"16-bit", "half_int8"}) {
    AttentionCase row = tiles_case();
    row.requests = {{40, 5000}, {17, 1025}};
    row.arithmetic = arithmetic;
    row.workers = 7;
    const Problem p = make_problem(row);
    expect_agrees(p, arithmetic);
    row.plain = DType::kBFloat16;
    const Problem grown = make_problem(row);
    const std::int64_t width = std::int64_t{row.kv_heads} * row.head_dim;
    for (std::int64_t i = 0; i < grown.k.numel(); ++i)
      grown.k.set(i, grown.k.get(i) * (0.1F + static_cast<float>(i / width) / 1000.0F));
    expect_agrees(grown, std::string(arithmetic) + ", growing");
  }
}

/// Numbers that products of bf16 would make zeros of: such items are those of fp32.
TEST_F(Tiles, SubnormalNumbersCount) {
  for (const int which : {0, 1, 2}) {
    AttentionCase row = tiles_case();
    row.plain = DType::kBFloat16;
    const Problem p = make_problem(row);
    const auto times = [](const Tensor& x, float factor) {
      for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, x.get(i) * factor);
    };
    times(which == 0 ? p.q : which == 1 ? p.k : p.v, 0x1p-127F);
    if (which < 2) times(which == 0 ? p.k : p.q, 0x1p124F);
    expect_agrees(p, std::to_string(which));
    const Outputs a = run_problem(p), b = run_without_tiles(p);
    EXPECT_TRUE(std::equal(a.out.bytes().begin(), a.out.bytes().end(), b.out.bytes().begin())) << which;
  }
}

/// Whatever the last token holds, which only the last query sees, changes nothing for the others: codes and
/// scales that are NaNs or infinities, tiny or large.
TEST_F(Tiles, OthersDoNotSeeTheLastToken) {
  int n = 0;
  for (const char* format : {"bf16", "fp16", "fp8", "fp8-token-head", "int8-head", "int8-token-f32",
                             "int8-g32", "int4-g32", "int4-row", "int8-tensor"}) {
    for (const char* arithmetic : {"16-bit", "half_int8"}) {
      AttentionCase row = tiles_case();
      row.requests = {{41, 305}, {30, 33}};  // the last token is alone in its page
      row.page_size = 16;
      row.k_format = format;
      row.arithmetic = arithmetic;
      row.seed = static_cast<std::uint64_t>(9700 + n++);
      const Problem p = make_problem(row);
      const Outputs clean = run_problem(p);
      const std::int64_t pages = p.cache->pages.shape()[0], columns = p.cache->block_table.shape()[1];
      const std::span<std::uint8_t> bytes = p.cache->pages.bytes();
      const std::size_t page_bytes = bytes.size() / static_cast<std::size_t>(pages);
      for (const std::uint8_t byte : {0xFF, 0x7F, 0x7C, 0x70}) {
        for (const std::int64_t request : {0, 1}) {
          const std::int64_t column = row.requests[static_cast<std::size_t>(request)].kv_len / 16;
          const auto page = static_cast<std::size_t>(
              p.cache->block_table.as<std::int32_t>()[static_cast<std::size_t>(request * columns + column)]);
          std::ranges::fill(bytes.subspan(page * page_bytes, page_bytes), byte);
        }
        const Outputs spoilt = run_problem(p);
        const std::int64_t query_values = std::int64_t{row.q_heads} * row.head_dim;
        for (std::int64_t i = 0; i < clean.out.numel(); ++i) {
          const std::int64_t query = i / query_values;
          if (query == 40 || query == 70) continue;
          ASSERT_EQ(clean.out.get(i), spoilt.out.get(i))
              << format << ", " << arithmetic << ", " << int{byte} << ", query " << query;
        }
      }
    }
  }
}

/// What is infinite in V makes the output of those who see it infinite, dim by dim.
TEST_F(Tiles, InfiniteValues) {
  AttentionCase row = tiles_case();
  row.requests = {{60, 200}};
  row.plain = DType::kBFloat16;
  const Problem p = make_problem(row);
  p.v.set(150 * row.head_dim + 5, kInf);
  p.v.set(150 * row.head_dim + 6, -kInf);
  p.v.set(199 * row.head_dim + 6, kInf);
  const Outputs outputs = run_problem(p);
  const auto at = [&](int query, int dim) {
    return outputs.out.get((query * row.q_heads) * row.head_dim + dim);
  };
  EXPECT_TRUE(std::isfinite(at(9, 5)));  // query 9 stands at token 149
  EXPECT_EQ(at(10, 5), kInf);
  EXPECT_EQ(at(10, 6), -kInf);
  EXPECT_TRUE(std::isnan(at(59, 6)));
  EXPECT_TRUE(std::isfinite(at(59, 7)));
}

/// Scales of V that are infinite, or 0 beside codes that are NaN: what the last token, alone in its page,
/// makes of the last query is infinite or NaN where it is in fp32.
TEST_F(Tiles, OddScalesOfV) {
  struct Odd {
    const char* format;
    std::uint8_t codes;
    float scale;
  };
  for (const Odd& odd : {Odd{"int8-token-f32", 3, kInf}, Odd{"int8-token-f32", 0xFD, kInf},
                         Odd{"int8-token-f32", 3, kNan}, Odd{"fp8-token-f32", 0x7F, 0.0F}}) {
    AttentionCase row = tiles_case();
    row.requests = {{41, 305}};
    row.page_size = 16;
    row.k_format = "bf16";
    row.v_format = odd.format;
    const Problem p = make_problem(row);
    const PageLayout layout = page_layout(p.cache->spec);
    const std::int64_t page = p.cache->block_table.as<std::int32_t>()[19];
    const std::span<std::uint8_t> bytes =
        p.cache->pages.bytes().subspan(static_cast<std::size_t>(page * layout.page_bytes));
    std::ranges::fill(bytes.subspan(static_cast<std::size_t>(layout.v_data_offset),
                                    static_cast<std::size_t>(16 * row.head_dim)),
                      odd.codes);
    std::memcpy(&bytes[static_cast<std::size_t>(layout.v_param_offset)], &odd.scale, sizeof odd.scale);
    const Outputs with = run_problem(p), without = run_without_tiles(p);
    const std::int64_t last = 40 * std::int64_t{row.q_heads} * row.head_dim;
    for (std::int64_t i = 0; i < with.out.numel(); ++i) {
      const float x = with.out.get(i), y = without.out.get(i);
      ASSERT_EQ(std::isfinite(x), i < last) << odd.format << ", " << odd.scale << ", value " << i;
      ASSERT_TRUE(i < last || (std::isnan(x) ? std::isnan(y) : x == y))
          << odd.format << ", " << x << ", " << y;
    }
  }
}

/// The bits of request 0 of `p`, alone and under larger bounds, are those beside others.
void expect_own_bits(const Problem& p, const std::string& what) {
  const Outputs all = run_problem(p);
  const Problem one = select(p, {0}, true);
  const Outputs alone = run_problem(one);
  const Outputs bounded = run_problem(one, [](AttentionProblem& problem) {
    problem.max_q_len += 400;
    problem.max_kv_len += 400;
  });
  EXPECT_EQ(request_bytes(p, all.out, 0), request_bytes(one, alone.out, 0)) << what;
  EXPECT_EQ(request_bytes(p, all.lse, 0), request_bytes(one, alone.lse, 0)) << what;
  EXPECT_EQ(request_bytes(one, bounded.out, 0), request_bytes(one, alone.out, 0)) << what << ", bounds";
  EXPECT_EQ(request_bytes(one, bounded.lse, 0), request_bytes(one, alone.lse, 0)) << what << ", bounds";
}

/// Units have 32 rows, 64 or 256, as the longest request wants: masks cut their strips elsewhere.
TEST_F(Tiles, UnitsOfOtherRowsHaveTheSameBits) {
  int n = 0;
  for (const char* format : {"bf16", "fp16", "int8-head", "int4-g32", "fp8"}) {
    for (const char* arithmetic : {"16-bit", "half_int8"}) {
      for (const int kv_len : {64, 71, 138, 276, 399}) {
        AttentionCase row = tiles_case();
        row.q_heads = 1;
        row.k_format = format;
        row.arithmetic = arithmetic;
        row.policy = SplitPolicy::kBatchInvariant;
        row.requests = {{40, kv_len}, {300, 300}};
        row.seed = static_cast<std::uint64_t>(9800 + n++);
        expect_own_bits(make_problem(row),
                        std::string(format) + ", " + arithmetic + ", " + std::to_string(kv_len));
      }
    }
  }
}

/// A row of Q that is not finite, or large, changes nothing for the others.
TEST_F(Tiles, RowsOfQDoNotMatterToOthers) {
  for (const char* format : {"bf16", "int8-head", "fp8", "int4-g32"}) {
    for (const char* arithmetic : {"16-bit", "half_int8"}) {
      for (const float odd : {0x1p112F, kInf, kNan}) {
        AttentionCase row = tiles_case();
        row.requests = {{40, 300}};
        row.k_format = format;
        row.arithmetic = arithmetic;
        const Problem p = make_problem(row);
        const Outputs clean = run_problem(p);
        p.q.set(0, odd);
        const Outputs spoilt = run_problem(p);
        for (std::int64_t i = row.head_dim; i < clean.out.numel(); ++i)
          ASSERT_EQ(clean.out.get(i), spoilt.out.get(i)) << format << ", " << arithmetic << ", " << odd;
        for (std::int64_t i = 1; i < clean.lse.numel(); ++i)
          ASSERT_EQ(clean.lse.get(i), spoilt.lse.get(i)) << format << ", " << arithmetic << ", " << odd;
      }
    }
  }
}

/// Scales of rows of Q and K whose products are ordinary, and they are not.
TEST_F(Tiles, HalfInt8OfFarScales) {
  for (const float softcap : {0.0F, 30.0F}) {
    AttentionCase row = tiles_case();
    row.plain = DType::kBFloat16;
    row.arithmetic = "half_int8";
    row.softcap = softcap;
    row.requests = {{40, 300}};
    const Problem p = make_problem(row);
    for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, p.q.get(i) * 0x1p-117F);
    for (std::int64_t i = 0; i < p.k.numel(); ++i) p.k.set(i, p.k.get(i) * 0x1p117F);
    expect_agrees(p, std::to_string(softcap));
  }
}

/// The same request alone and among others, under splits at absolute places: the same bits.
TEST_F(Tiles, NeighboursDoNotMatter) {
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    for (const char* arithmetic : {"16-bit", "half_int8"}) {
      AttentionCase row = tiles_case();
      row.k_format = format;
      row.arithmetic = arithmetic;
      row.policy = SplitPolicy::kBatchInvariant;
      row.requests = {{33, 1500}, {70, 300}, {20, 2100}};
      const Problem p = make_problem(row);
      const Outputs all = run_problem(p);
      for (std::size_t i = 0; i < row.requests.size(); ++i) {
        const Problem one = select(p, {i}, true);
        const Outputs alone = run_problem(one);
        EXPECT_EQ(request_bytes(p, all.out, i), request_bytes(one, alone.out, 0))
            << format << ", " << arithmetic;
        EXPECT_EQ(request_bytes(p, all.lse, i), request_bytes(one, alone.lse, 0))
            << format << ", " << arithmetic;
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
