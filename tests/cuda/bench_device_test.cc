// `halftone bench --backend cuda` on a GPU: the figures it writes are there and possible.
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using json = nlohmann::json;

json bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"bench", "--backend", "cuda", "--json", "-"});
  const Result result = run(std::move(arguments));
  EXPECT_EQ(result.code, 0) << result.err;
  return json::parse(result.out, nullptr, false);
}

TEST(DeviceBench, Rows) {
  const json all = bench({"--formats", "int8-head,int4-row:bf16", "--batch", "16", "--q-heads", "8",
                          "--kv-heads", "1", "--chain", "3", "--with-schedule"});
  EXPECT_EQ(all["device"]["type"], "cuda");
  EXPECT_NE(all["device"]["driver"], "");
  EXPECT_GT(all["device"]["sm_clock_mhz"], 0);
  EXPECT_GT(all["device"]["memory_clock_mhz"], 0);
  ASSERT_EQ(all["rows"].size(), 2U);
  const json& row = all["rows"][0];
  EXPECT_EQ(row["chain"], 3);
  EXPECT_EQ(row["repeats"], 25);
  EXPECT_EQ(row["bytes"], 16 * (8192 * 2 * 130 + 8 * 2 * 128 * 2));
  EXPECT_GT(row["us"], 1);
  EXPECT_GT(row["ceiling_gbs"], row["gbs"]);
  EXPECT_LT(row["ceiling_gbs"], 6000);
  EXPECT_GT(all["rows"][1]["us"], row["us"]) << "by the universal kernel";
}

TEST(DeviceBench, MixedLengthsAndAppend) {
  const json mixed = bench({"--formats", "int4-g32", "--contexts-mix", "8192x1,128x31"});
  EXPECT_EQ(mixed["rows"][0]["lengths"], "8192x1,128x31");
  EXPECT_EQ(mixed["rows"][0]["bytes"], std::int64_t{8192 + 31 * 128} * 8 * 160 + 32 * 32 * 2 * 128 * 2);
  const json append = bench({"--suite", "append", "--formats", "int4-row", "--q-len", "512"});
  EXPECT_GT(append["rows"][0]["us"], 1);
  EXPECT_GT(append["rows"][0]["ceiling_gbs"], append["rows"][0]["gbs"]);
}

TEST(DeviceBench, LayersBehindAGemm) {
  const json all =
      bench({"--suite", "layer", "--formats", "int8-head", "--batch", "8", "--chain", "4", "--gemm"});
  ASSERT_EQ(all["rows"].size(), 6U);
  for (const json& row : all["rows"]) {
    EXPECT_EQ(row["before"], "gemm-4096");
    EXPECT_GT(row["gemm_us"], 4) << "no memory is so fast";
    EXPECT_LT(row["gemm_us"], 30);
    EXPECT_GT(row["us"], 10);
  }
  EXPECT_EQ(all["rows"][0]["early"], false);
  EXPECT_EQ(all["rows"][1]["early"], true);
}

TEST(DeviceBench, ListsBesideAGatherOfTheirRecords) {
  for (const char* chain : {"1", "4"}) {
    const json all = bench({"--latent", "--batch", "4", "--context", "4096", "--q-heads", "16", "--top-k",
                            "512", "--extra-top-k", "128", "--chain", chain});
    ASSERT_EQ(all["rows"].size(), 5U);
    for (const json& row : all["rows"]) {
      SCOPED_TRACE(row["format_k"]);
      EXPECT_EQ(row["format"], row["format_k"]);
      EXPECT_EQ(row["kind"], "sparse_decode");
      EXPECT_GT(row["mhz"], 300);
      EXPECT_LT(row["mhz"], 3000);
      EXPECT_EQ(row["chain"], std::stoi(chain));
      EXPECT_GT(row["gather_us"], 0.5);
      EXPECT_LT(row["gather_us"], row["us"]);
      EXPECT_EQ(row["ceiling"].get<std::string>().rfind("gather: ", 0), 0U);
    }
    const json& fp8 = all["rows"][0];
    EXPECT_DOUBLE_EQ(fp8["ceiling_gbs"].get<double>() * fp8["gather_us"].get<double>(),
                     4 * (512 + 128) * 656 / 1e3);
  }
  const json dense = bench({"--latent", "--formats", "bf16", "--batch", "4", "--context", "4096"});
  EXPECT_FALSE(dense["rows"][0].contains("gather_us"));
  EXPECT_GT(dense["rows"][0]["mhz"], 300);
  const json append = bench({"--latent", "--formats", "bf16", "--suite", "append", "--q-len", "64"});
  EXPECT_GT(append["rows"][0]["mhz"], 300);
}

}  // namespace
}  // namespace halftone::cli
