// Latent caches in `halftone bench`: the cases of its table and of the options, and what it reports of lists.
#include <algorithm>
#include <set>
#include <tuple>

#include "cli/bench/cases.h"
#include "cli/bench/report.h"
#include "plan/listed.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using json = nlohmann::json;

std::vector<BenchCase> cases_of(std::string_view formats) {
  return table_cases("mla", formats, SplitPolicy::kReproducible);
}

/// Each query reads the keys of its own lists, whatever the context, and every kind is there.
TEST(BenchLatent, CasesOfTheTable) {
  std::set<std::string_view> kinds;
  for (const BenchCase& c : cases_of("fp8-g128-f32")) {
    kinds.insert(kind_text(c));
    EXPECT_EQ(bytes_per_token(cache_spec(c.shape)), 656);
    if (c.shape.top_k == 0) continue;
    const AttentionProblem problem = to_problem(c.shape);
    const auto requests = static_cast<std::size_t>(c.shape.batch);
    const Floor floor = floor_of(problem, std::vector<std::int64_t>(requests, c.shape.q_len), kv_lengths(c));
    const std::int64_t places = c.shape.top_k + c.shape.extra_top_k;
    const std::int64_t keys = std::int64_t{c.shape.batch} * c.shape.q_len * places;
    EXPECT_EQ(floor.cache_bytes, keys * 656);
    EXPECT_EQ(floor.flops, 2.0 * static_cast<double>(keys) * c.shape.q_heads * (576 + 512));
  }
  EXPECT_EQ(kinds, (std::set<std::string_view>{"sparse_decode", "dense_decode", "sparse_prefill", "append"}));
  for (const BenchCase& c : cases_of("fp8-g64-e8m0")) {  // tokens of 584 bytes
    const KvCacheSpec spec = cache_spec(c.shape);
    EXPECT_EQ(spec.latent_dim(), 448);
    EXPECT_EQ(spec.v_dim(), 512);
    EXPECT_EQ(page_layout(spec).row_bytes, 576);
  }
}

/// Small batches back to back, a second list and the longest one.
TEST(BenchLatent, ChainsAndSecondAndLongLists) {
  std::set<std::tuple<int, int, int>> chains, seconds, longest;  // heads, batch, top_k
  for (const BenchCase& c : cases_of("bf16")) {
    const ProblemShape& s = c.shape;
    const std::tuple shape{s.q_heads, s.batch, s.top_k};
    if (c.chain > 1) chains.insert(shape);
    if (s.top_k == planning::kMaxListed) longest.insert(shape);
    if (s.extra_top_k == 0) continue;
    seconds.insert(shape);
    EXPECT_EQ(s.extra_top_k, 128);
    EXPECT_EQ(to_problem(s).listed.extra, cache_spec(s));
  }
  EXPECT_EQ(chains, (std::set<std::tuple<int, int, int>>{{16, 8, 2048}, {8, 8, 2048}}));
  EXPECT_EQ(seconds, (std::set<std::tuple<int, int, int>>{{64, 128, 512}}));
  EXPECT_EQ(longest, (std::set<std::tuple<int, int, int>>{{64, 2, 65536}}));
}

TEST(BenchLatent, ListsNameSlotsOfTheirRequests) {
  const std::vector<std::vector<std::int32_t>> slots = {{1, 2, 3}, {40}, {500, 600}};
  const std::vector<std::int32_t> lists = random_lists(50, {2, 0, 1}, slots, kFirstLists);
  ASSERT_EQ(lists.size(), 150U);
  EXPECT_EQ(std::set<std::int32_t>(lists.begin(), lists.begin() + 100), (std::set<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(std::set<std::int32_t>(lists.begin() + 100, lists.end()), (std::set<std::int32_t>{500, 600}));
  EXPECT_NE(random_lists(50, {2, 0, 1}, slots, kSecondLists), lists);
}

/// Of a gather the share is that of its time: it reads no Q and writes no O.
TEST(BenchLatent, AGatherIsTheCeilingOfSparseDecode) {
  BenchRow sparse, dense;
  for (const BenchCase& c : cases_of("fp8-g128-f32")) {
    if (kind_text(c) == "dense_decode") dense.setup = c;
    if (c.shape.extra_top_k > 0) sparse.setup = c;
  }
  sparse.us = dense.us = 10;
  sparse.gbs = dense.gbs = 3000;
  sparse.ceiling_gbs = dense.ceiling_gbs = 4000;
  sparse.ceiling = "gather: 4 records per warp";
  sparse.gather_us = 8.5;
  sparse.mhz = 1605;
  EXPECT_DOUBLE_EQ(share_of_ceiling(sparse), 0.85);
  EXPECT_DOUBLE_EQ(share_of_ceiling(dense), 0.75);
  const json rows = bench_json({}, {sparse, dense})["rows"];
  EXPECT_EQ(rows[0]["gather_us"], 8.5);
  EXPECT_EQ(rows[0]["ceiling_gbs"], 4000);
  EXPECT_EQ(rows[0]["extra_top_k"], 128);
  EXPECT_EQ(rows[0]["format"], "fp8-g128-f32");
  EXPECT_EQ(rows[0]["mhz"], 1605);
  EXPECT_FALSE(rows[1].contains("gather_us"));
  EXPECT_FALSE(rows[1].contains("extra_top_k"));
  std::ostringstream out, err;
  Terminal terminal{out, err, false, false};
  print_bench(terminal, "CUDA on a GPU", {sparse, dense});
  for (const char* text : {"gather", "8.5 us", "85%", "1605", "75%", "top_k 512, 128 of a second cache"}) {
    EXPECT_NE(out.str().find(text), std::string::npos) << text << " is not in\n" << out.str();
  }
}

class BenchLatentCommand : public CliTest {
 public:
  static std::vector<std::string> arguments(std::vector<std::string> more) {
    std::vector<std::string> all = {"bench",   "--backend", "cpu",       "--latent", "--context", "100",
                                    "--batch", "2",         "--q-heads", "4",        "--repeat",  "1"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

TEST_F(BenchLatentCommand, EveryFormatWithBothLists) {
  const Result result = run(arguments({"--top-k", "24", "--extra-top-k", "8", "--json", "-"}));
  ASSERT_EQ(result.code, 0) << result.err;
  const json rows = json::parse(result.out)["rows"];
  const std::vector<std::pair<std::string, int>> formats = {{"fp8-g128-f32", 656},
                                                            {"bf16", 1152},
                                                            {"int8-g64", 656},
                                                            {"int4-g64", 416},
                                                            {"fp8-g64-e8m0", 585}};  // its page is padded
  ASSERT_EQ(rows.size(), formats.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json& row = rows[i];
    const auto& [format, token] = formats[i];
    for (const char* name : {"format", "format_k", "format_v"}) EXPECT_EQ(row[name], format);
    EXPECT_TRUE(row["mhz"].is_null()) << "measured on CUDA only";
    EXPECT_EQ(row["suite"], "mla");
    EXPECT_EQ(row["kind"], "sparse_decode");
    EXPECT_EQ(row["top_k"], 24);
    EXPECT_EQ(row["extra_top_k"], 8);
    EXPECT_TRUE(row["gather_us"].is_null()) << "measured on CUDA only";
    const int dims = (format == "fp8-g64-e8m0" ? 512 : 576) + 512;
    EXPECT_EQ(row["bytes"], 2 * ((24 + 8) * (token + 4) + 4 * dims * 2));
    EXPECT_GT(row["us"], 0);
  }
}

TEST_F(BenchLatentCommand, KindsWithoutLists) {
  const auto kind = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--formats", "bf16", "--json", "-"});
    const Result result = run(arguments(std::move(more)));
    EXPECT_EQ(result.code, 0) << result.err;
    return json::parse(result.out)["rows"].at(0)["kind"].get<std::string>();
  };
  EXPECT_EQ(kind({}), "dense_decode");
  EXPECT_EQ(kind({"--suite", "prefill"}), "dense_prefill");
  EXPECT_EQ(kind({"--suite", "prefill", "--top-k", "5"}), "sparse_prefill");
  EXPECT_EQ(kind({"--suite", "append"}), "append");
}

TEST_F(BenchLatentCommand, RefusesListsThatCannotBe) {
  expect_failure(run({"bench", "--top-k", "64"}), 2,
                 "--top-k is 64, but lists are taken over latent caches: ");
  expect_failure(run(arguments({"--extra-top-k", "64"})), 2,
                 "--extra-top-k is 64, but a second list needs a first one: add --top-k");
  for (const char* option : {"--top-k", "--extra-top-k"}) {
    for (const char* value : {"0", "65537", "-3"}) {
      expect_failure(run(arguments({option, value})), 2,
                     std::string(option) + " is " + value + ", but must be 1 to 65536;");
    }
    expect_failure(run(arguments({option, "many"})), 2,
                   std::string(option) + " is 'many', but must be a whole number, 1 to 65536;");
    expect_failure(run({"bench", "--table", "mla", option, "5"}), 2, "excludes");
  }
  for (const char* suite : {"append", "layer"}) {
    expect_failure(run(arguments({"--top-k", "5", "--suite", suite})), 2,
                   "--top-k is for decode and prefill, but --suite is " + std::string(suite));
  }
  expect_failure(run(arguments({"--kv-heads", "1"})), 2, "excludes");
  expect_failure(run(arguments({"--plain", "--suite", "prefill"})), 2, "excludes");
  expect_failure(run(arguments({"--top-k", "5", "--chain", "2"})), 2,
                 "a chain of 2 layers is measured on CUDA only");
  expect_failure(run({"bench", "--backend", "cpu", "--table", "chain"}), 2,
                 "a chain of 16 layers is measured on CUDA only");
}

}  // namespace
}  // namespace halftone::cli
