// Which cases `halftone bench` makes of its options and tables; bench_report_test.cc has what it reports.
#include <algorithm>
#include <array>
#include <functional>
#include <set>
#include <tuple>

#include "cli/bench/cases.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

/// The same call for every table.
std::vector<BenchCase> cases_of(std::string_view table, std::string_view formats = "") {
  return table_cases(table, formats, SplitPolicy::kReproducible);
}

template <class Value>
std::set<Value> distinct(const std::vector<BenchCase>& cases,
                         const std::function<Value(const BenchCase&)>& of) {
  std::set<Value> values;
  for (const BenchCase& c : cases) values.insert(of(c));
  return values;
}

std::string usage_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(BenchRequests, TextAndBack) {
  const std::vector<RequestGroup> groups = parse_requests("131072x1,4096x31", "--contexts-mix");
  EXPECT_EQ(groups, (std::vector<RequestGroup>{{131072, 1}, {4096, 31}}));
  EXPECT_EQ(requests_text(groups), "131072x1,4096x31");
  BenchCase c;
  set_requests(c, groups, 3);
  EXPECT_EQ(c.shape.batch, 32);
  EXPECT_EQ(c.shape.q_len, 3);
  EXPECT_EQ(q_lengths(c), std::vector<std::int64_t>(32, 3));
  EXPECT_EQ(c.shape.context, 131072);
  const std::vector<std::int64_t> lengths = kv_lengths(c);
  ASSERT_EQ(lengths.size(), 32U);
  EXPECT_EQ(lengths.front(), 131072);
  EXPECT_EQ(std::count(lengths.begin(), lengths.end(), 4096), 31);
  set_requests(c, {{512, 3}}, 0);  // one group is no mixture
  EXPECT_TRUE(c.mixed.empty());
  EXPECT_EQ(c.shape.q_len, 512);
  EXPECT_EQ(kv_lengths(c), (std::vector<std::int64_t>{512, 512, 512}));
}

TEST(BenchRequests, GroupsWithQueriesOfTheirOwn) {
  const std::vector<RequestGroup> groups = parse_requests("64/2048x2,4096x1", "--contexts-mix");
  EXPECT_EQ(groups, (std::vector<RequestGroup>{{2048, 2, 64}, {4096, 1, 0}}));
  BenchCase c;
  set_requests(c, groups, 1);
  EXPECT_EQ(c.shape.q_len, 64);
  EXPECT_EQ(q_lengths(c), (std::vector<std::int64_t>{64, 64, 1}));
  EXPECT_EQ(kv_lengths(c), (std::vector<std::int64_t>{2048, 2048, 4096}));
  EXPECT_EQ(requests_text(c.mixed), "64/2048x2,1/4096x1");
  EXPECT_EQ(parse_requests(requests_text(c.mixed), "--contexts-mix"), c.mixed);
  set_requests(c, {{2048, 2, 64}}, 1);  // alone, too
  EXPECT_EQ(q_lengths(c), (std::vector<std::int64_t>{64, 64}));
}

TEST(BenchRequests, RefusesWhatIsNoGroup) {
  for (const char* text :
       {"",     "4096",    "x",        "4096x",      "x4",        "0x1",           "1x0",
        "-1x1", "4096x1,", "4096x1x1", "16777217x1", "1x1048577", "99999999999x1", "4096 x1",
        "/1x1", "0/1x1",   "1/x1",     "x/1",        "1x1/2",     "1/2/3x1",       "16777217/1x1"}) {
    const std::string sentence = usage_error([&] { parse_requests(text, "--contexts-mix"); });
    EXPECT_NE(sentence.find("--contexts-mix has '"), std::string::npos) << text << ": " << sentence;
    EXPECT_NE(sentence.find("CONTEXTxCOUNT"), std::string::npos) << text;
  }
  EXPECT_NE(
      usage_error([] { parse_requests("1x1000000,1x1000000", "--contexts-mix"); }).find("2000000 requests"),
      std::string::npos);
}

TEST(BenchTables, HoldTheShapesTheyAreNamedFor) {
  const auto batch = [](const BenchCase& c) { return c.shape.batch; };
  const std::vector<BenchCase> headline = cases_of("headline");
  EXPECT_EQ(headline.size(), 18U);  // 3 batches x 6 formats
  EXPECT_EQ(distinct<int>(headline, batch), (std::set<int>{32, 128, 512}));
  for (const BenchCase& c : headline) {
    EXPECT_EQ(c.shape.q_heads, 8);
    EXPECT_EQ(c.shape.kv_heads, 1);
    EXPECT_EQ(c.shape.context, 8192);
    EXPECT_EQ(c.chain, 1);
  }
  const std::vector<BenchCase> speculative = cases_of("speculative");
  EXPECT_EQ(distinct<int>(speculative, batch).size(), 8U);
  for (const BenchCase& c : speculative) {
    EXPECT_EQ(c.shape.q_len, 3);
    EXPECT_EQ(c.shape.batch * c.shape.context, 1 << 18);  // the same bytes at every length
    EXPECT_TRUE(to_problem(c.shape).mask.causal);
  }
  const std::vector<BenchCase> shapes = cases_of("shapes");
  EXPECT_EQ(shapes.size(), 3U * 9 * 5);
  EXPECT_EQ(distinct<int>(shapes, batch), (std::set<int>{1, 8, 64}));
  for (const BenchCase& c : cases_of("chain")) EXPECT_GT(c.chain, 1);
  for (const BenchCase& c : cases_of("mixed")) {
    EXPECT_GT(c.mixed.size(), 1U);
    EXPECT_TRUE(c.with_schedule);
  }
  const std::vector<BenchCase> policies = cases_of("policies");
  EXPECT_EQ(policies.size(), 4U * 4 * 3);  // shapes, formats, policies
  EXPECT_EQ((distinct<SplitPolicy>(policies, [](const BenchCase& c) { return c.shape.policy; })).size(), 3U);
  const std::vector<BenchCase> geometry = cases_of("geometry");
  EXPECT_EQ((distinct<std::pair<int, int>>(
                geometry, [](const BenchCase& c) { return std::pair(c.shape.head_dim, c.shape.page_size); })),
            (std::set<std::pair<int, int>>{{64, 16}, {64, 64}, {128, 16}, {128, 64}, {256, 16}, {256, 64}}));
}

TEST(BenchTables, PrefillIsTensorsAndPagesOfEqualWork) {
  const std::vector<BenchCase> cases = cases_of("prefill");
  std::set<std::tuple<bool, int, bool, int>> grid;
  std::set<std::tuple<bool, int, int, bool, int>> between;
  std::set<std::string> codes;
  std::size_t half_int8 = 0, coded_tensors = 0, fp8 = 0, staged_fp8 = 0, of_192 = 0, narrow_fp8 = 0, wide = 0;
  for (const BenchCase& c : cases) {
    const ProblemShape& s = c.shape;
    EXPECT_EQ(c.suite, Suite::kPrefill);
    EXPECT_EQ(to_problem(s).is_paged(), !s.plain);
    EXPECT_EQ(to_problem(s).mask.causal, s.causal);
    if (s.head_dim == 512) {
      ++wide;
      EXPECT_EQ(std::pair(s.batch * s.context, s.q_heads), std::pair(16384, 8));
      EXPECT_EQ(s.kv_heads, s.plain ? 8 : 1);
      continue;
    }
    if (s.arithmetic == Arithmetic::kFp8 && s.head_dim == 64) {
      ++narrow_fp8;
      EXPECT_EQ(std::pair(s.batch * s.context, s.q_heads), std::pair(16384, 32));
      EXPECT_EQ(s.kv_heads, s.plain ? 32 : 8);
      continue;
    }
    if (s.arithmetic == Arithmetic::kFp8 && s.q_heads != s.kv_heads) {
      ++staged_fp8;
      EXPECT_EQ(std::pair(s.batch * s.context, s.head_dim), std::pair(16384, 128));
      EXPECT_NE(s.format.name, "fp8");
      continue;
    }
    if (s.head_dim == 192 && (s.format.name == "int8-head" || s.arithmetic != Arithmetic::k16Bit)) {
      ++of_192;
      const int v_dim = to_problem(s).v_dim();
      EXPECT_TRUE(v_dim == 128 || v_dim == 192) << v_dim;
      EXPECT_EQ(std::pair(s.batch * s.context, s.q_heads), std::pair(16384, 2048 / v_dim));
      continue;
    }
    if (s.arithmetic == Arithmetic::kFp8 || (s.plain && s.arithmetic == Arithmetic::kHalfInt8)) {
      ++(s.plain ? coded_tensors : fp8);
      EXPECT_EQ(std::pair(s.batch * s.context, s.q_heads * s.head_dim), std::pair(16384, 2048));
      EXPECT_EQ(s.kv_heads, s.q_heads);
      continue;
    }
    if (s.arithmetic == Arithmetic::kHalfInt8) {
      ++half_int8;
      EXPECT_EQ(std::pair(s.batch * s.context, s.q_heads * s.head_dim), std::pair(32768, 2048));
      EXPECT_TRUE(s.format.name == "int8-head" || s.format.name == "int8-tensor") << s.format.name;
      EXPECT_EQ(s.kv_heads, 1);
      continue;
    }
    if (s.q_len != s.context) {  // a chunk of a long prompt
      EXPECT_EQ(std::pair(s.q_len, s.context), std::pair(2048, 32768));
      continue;
    }
    EXPECT_EQ(s.batch * s.context, 16384);
    if (s.format.name != "bf16") codes.insert(s.format.name);
    if (s.q_heads != s.kv_heads) continue;
    const int v_dim = to_problem(s).v_dim();
    EXPECT_EQ(s.q_heads, 2048 / v_dim);
    if (s.head_dim % 64 != 0 || s.head_dim == 192) {
      between.insert({s.plain, s.head_dim, v_dim, s.causal, s.context});
      continue;
    }
    grid.insert({s.plain, s.head_dim, s.causal, s.context});
  }
  EXPECT_EQ(grid.size(), 2U * 3 * 2 * 3);  // place, head_dim, mask, length
  EXPECT_EQ(between.size(), 2U * 4 * 2 * 2);
  EXPECT_EQ(codes, (std::set<std::string>{"fp8", "int4-g32", "int8-head"}));
  EXPECT_EQ(half_int8, 2U * 2 * 2 * 4);  // format, head_dim, mask, length
  EXPECT_EQ(fp8, 2U * 2 * 3);            // head_dim, mask, length
  EXPECT_EQ(coded_tensors, 2 * fp8);     // arithmetic
  EXPECT_EQ(staged_fp8, 3U * 2 * 2);     // format, mask, length
  EXPECT_EQ(of_192, 6U * 2 * 2 * 2);     // what and in which arithmetic, dims of V, mask, length
  EXPECT_EQ(narrow_fp8, 2U * 2 * 2);     // place, mask, length
  EXPECT_EQ(wide, 3U * 2 * 2 * 2);       // arithmetic, place, mask, length
  EXPECT_EQ(cases.size(), grid.size() + between.size() + 2 * 2 + 3 * 2 * 3 + 3 + half_int8 + coded_tensors +
                              fp8 + staged_fp8 + of_192 + narrow_fp8 + wide);  // grouped heads, codes, chunks
  for (const BenchCase& c : cases_of("prefill", "fp8")) {
    EXPECT_FALSE(c.shape.plain) << "tensors have no such format";
  }
}

TEST(BenchFloor, CountsThePairsThatTheMaskLeaves) {
  ProblemShape shape;
  shape.format = parse_choice("bf16", "--formats");
  shape.q_heads = 4;
  shape.kv_heads = 2;
  shape.q_len = 3;
  shape.context = 10;
  const auto flops = [&] { return floor_of(to_problem(shape), {3}, {10}).flops; };
  const auto of_pairs = [&](int pairs) { return 4.0 * pairs * shape.head_dim * shape.q_heads; };
  EXPECT_EQ(flops(), of_pairs(8 + 9 + 10));
  shape.window = 4;
  EXPECT_EQ(flops(), of_pairs(5 + 5 + 5));
  shape.causal = false;
  EXPECT_EQ(flops(), of_pairs(7 + 6 + 5));
  shape.window = -1;
  EXPECT_EQ(flops(), of_pairs(3 * 10));
  const std::int64_t pages = floor_of(to_problem(shape), {3}, {10}).bytes();
  shape.plain = true;
  EXPECT_EQ(floor_of(to_problem(shape), {3}, {10}).bytes(), pages) << "a page of bf16 has no scales";
}

TEST(BenchTables, EveryCaseIsAProblemOfTheLibrary) {
  for (const BenchCase& c : cases_of("all")) {
    SCOPED_TRACE(c.table + " " + c.shape.format.name);
    EXPECT_FALSE(c.table.empty());
    const std::vector<std::int64_t> keys = kv_lengths(c), queries = q_lengths(c);
    ASSERT_EQ(keys.size(), queries.size());
    for (std::size_t r = 0; r < keys.size(); ++r) EXPECT_GE(keys[r], queries[r]);
    EXPECT_NO_THROW(page_layout(cache_spec(c.shape)));
    if (c.suite == Suite::kAppend) continue;
    AttentionProblem problem = to_problem(c.shape);
    state_shortest(problem, queries);
    EXPECT_EQ(problem.min_q_len, std::ranges::min(queries));
    EXPECT_NO_THROW(halftone::plan(problem));
  }
}

TEST(BenchTables, RequestsWithoutQueriesAreNotTheShortest) {
  AttentionProblem problem;
  problem.max_q_len = 9;
  const auto shortest = [&](const std::vector<std::int64_t>& q_lengths) {
    state_shortest(problem, q_lengths);
    return problem.min_q_len;
  };
  EXPECT_EQ(shortest({9, 0, 4, 7}), 4);
  EXPECT_EQ(shortest({9, 1}), 1);
  EXPECT_EQ(shortest({0, 0}), 9);
  problem.max_q_len = 0;
  EXPECT_EQ(shortest({}), 1);
}

/// 48 to 256 packed rows of a KV head, over every context, in few and in many requests.
TEST(BenchTables, ChunksAreBetweenDraftsAndPrompts) {
  std::set<std::tuple<int, int, int, int>> grid;
  for (const BenchCase& c : cases_of("chunks", "bf16")) {
    const ProblemShape& s = c.shape;
    EXPECT_LT(s.q_len, s.context);
    EXPECT_TRUE(s.causal && !s.plain);
    grid.insert({s.q_heads / s.kv_heads, s.q_len * s.q_heads / s.kv_heads, s.context, s.batch});
  }
  EXPECT_EQ(grid.size(), 2U * 6 * 3 * 2);
  for (const int group : {4, 16}) {
    for (const int rows : {48, 64, 96, 128, 192, 256}) {
      for (const int context : {8192, 32768, 131072}) {
        EXPECT_TRUE(grid.contains({group, rows, context, 1}) && grid.contains({group, rows, context, 8}));
      }
    }
  }
  EXPECT_EQ(cases_of("chunks").size(), grid.size() * 4);  // formats
}

/// A mixed step and the requests of each kind alone: of the same work together.
TEST(BenchTables, StepsStandBesideTheirParts) {
  const std::vector<BenchCase> cases = cases_of("steps", "bf16");
  ASSERT_EQ(cases.size(), 3U);
  std::array<double, 3> flops{};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(cases[i].mixed.empty(), i > 0);
    flops[i] = floor_of(to_problem(cases[i].shape), q_lengths(cases[i]), kv_lengths(cases[i])).flops;
  }
  EXPECT_EQ(flops[0], flops[1] + flops[2]);
  EXPECT_EQ(cases[1].shape.q_len, 2048);
  EXPECT_EQ(cases[2].shape.q_len, 1);
  EXPECT_EQ(requests_text(cases[0].mixed), "2048/2048x8,1/8192x64");
}

/// Attention alone, append() before it and attention that appends, of everything else alike; and each of them
/// behind a GEMM, late and early.
TEST(BenchTables, LayersInEachWayToAppend) {
  const std::vector<BenchCase> cases = cases_of("layer");
  constexpr std::size_t kShapes = 4 * 3;  // formats, batches
  ASSERT_EQ(cases.size(), kShapes * 3 * (1 + 2));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const bool gemm = i >= kShapes * 3;
    const std::size_t way = gemm ? (i - kShapes * 3) % 6 : i % 3;
    EXPECT_EQ(cases[i].suite, Suite::kLayer);
    EXPECT_EQ(cases[i].gemm, gemm);
    EXPECT_EQ(cases[i].append, static_cast<LayerAppend>(gemm ? way / 2 : way));
    EXPECT_EQ(cases[i].early, gemm && way % 2 == 1);
    EXPECT_EQ(cases[i].chain, 16);
    EXPECT_EQ(cases[i].shape.format.name, cases[i - way].shape.format.name);
    EXPECT_EQ(cases[i].shape.batch, cases[i - way].shape.batch);
    EXPECT_EQ(gemm_width(cases[i].shape), 4096);
  }
}

/// Likewise of drafts, without a GEMM.
TEST(BenchTables, DraftsInEachWayToAppend) {
  const std::vector<BenchCase> cases = cases_of("drafts");
  constexpr std::size_t kShapes = 4 * 3;  // formats, requests
  ASSERT_EQ(cases.size(), 3 * kShapes * 3);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(cases[i].suite, Suite::kLayer);
    EXPECT_EQ(cases[i].append, static_cast<LayerAppend>(i % 3));
    EXPECT_EQ(cases[i].shape.q_len, 4 << i / (kShapes * 3));
    EXPECT_EQ(cases[i].chain, 16);
    EXPECT_FALSE(cases[i].gemm);
  }
}

TEST(BenchTables, NamesAndFormats) {
  EXPECT_EQ(cases_of("headline,chain").size(), cases_of("headline").size() + cases_of("chain").size());
  std::size_t total = 0;
  for (const char* name : {"headline", "chain", "speculative", "shapes", "mixed", "policies", "geometry",
                           "append", "layer", "drafts", "prefill", "chunks", "steps", "mla"}) {
    EXPECT_NE(table_names().find(name), std::string::npos);
    total += cases_of(name).size();
  }
  EXPECT_EQ(cases_of("all").size(), total);
  EXPECT_EQ(cases_of("headline", "fp8").size(), 3U);
  const std::string sentence = usage_error([] { cases_of("headline,fast"); });
  EXPECT_NE(sentence.find("--table has 'fast', but the tables are headline, "), std::string::npos)
      << sentence;
}

}  // namespace
}  // namespace halftone::cli
