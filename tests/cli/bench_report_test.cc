// What `halftone bench` reports, and its command on the CPU; no GPU needed.
#include <array>
#include <functional>

#include "cli/bench/cases.h"
#include "cli/bench/report.h"
#include "cli/host/host.h"
#include "halftone/error.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using json = nlohmann::json;

std::vector<BenchCase> cases_of(std::string_view table) {
  return table_cases(table, "", SplitPolicy::kReproducible);
}

TEST(BenchReport, LayersBehindAGemm) {
  std::vector<BenchRow> rows(3);
  for (BenchRow& row : rows) row.setup = cases_of("layer").back();
  rows[0].us = 12.5;
  rows[0].gemm_us = 7.6;
  rows[0].cold = true;
  rows[1].unsupported = "no room";
  rows[2].setup = cases_of("layer").front();
  const json all = bench_json({}, rows)["rows"];
  EXPECT_EQ(all[0]["suite"], "layer");
  EXPECT_EQ(all[0]["append"], "fused");
  EXPECT_EQ(all[0]["before"], "gemm-4096");
  EXPECT_EQ(all[0]["early"], true);
  EXPECT_EQ(all[0]["us"], 12.5);
  EXPECT_EQ(all[0]["gemm_us"], 7.6);
  EXPECT_EQ(all[1]["before"], "gemm-4096");
  EXPECT_TRUE(all[1]["gemm_us"].is_null());
  for (const char* field : {"before", "early", "gemm_us"}) EXPECT_FALSE(all[2].contains(field)) << field;
  std::ostringstream out, err;
  Terminal terminal{out, err, false, false};
  print_bench(terminal, "CUDA on a GPU", rows);
  EXPECT_NE(out.str().find("append fused, behind gemm-4096 of 7.6 us, early, per layer of 16"),
            std::string::npos)
      << out.str();
}

TEST(BenchReport, WhatIsNotBeyondAGemmIsNotMeasured) {
  EXPECT_DOUBLE_EQ(beyond_gemm(20.5, 7.5), 13);
  for (const double both : {7.5, 7.25}) {
    try {
      beyond_gemm(both, 7.5);
      FAIL() << both;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);  // a row that says so
      EXPECT_NE(std::string(error.what()).find("not measured"), std::string::npos) << error.what();
    }
  }
}

TEST(BenchReport, AnUnsupportedCaseIsARowWithItsReason) {
  BenchRow ran, refused;
  ran.setup = cases_of("mixed").front();
  ran.us = 10;
  ran.bytes = 20000;
  ran.gbs = 2;
  ran.ceiling_gbs = 4;
  ran.ceiling = "loads";
  ran.cold = true;
  refused.setup = cases_of("speculative").front();
  refused.unsupported = "head_dim is 80";
  const json rows = bench_json({}, {ran, refused})["rows"];
  for (const char* field :
       {"suite", "format_k", "format_v", "batch", "context", "q_heads", "kv_heads", "head_dim", "q_len",
        "page_size", "policy", "us", "bytes", "gbs", "ceiling_gbs", "chain"}) {
    EXPECT_TRUE(rows[0].contains(field) && rows[1].contains(field)) << field;
  }
  EXPECT_EQ(rows[0]["us"], 10);
  EXPECT_EQ(rows[0]["table"], "mixed");
  EXPECT_EQ(rows[0]["lengths"], "131072x1,4096x31");
  EXPECT_EQ(rows[0]["context"], 131072);
  EXPECT_EQ(rows[0]["batch"], 32);
  EXPECT_FALSE(rows[0].contains("unsupported"));
  EXPECT_EQ(rows[1]["unsupported"], "head_dim is 80");
  for (const char* figure : {"us", "bytes", "gbs", "ceiling_gbs"}) EXPECT_TRUE(rows[1][figure].is_null());
  std::ostringstream out, err;
  Terminal terminal{out, err, false, false};
  print_bench(terminal, "CUDA on a GPU", {ran, refused});
  EXPECT_NE(out.str().find("unsupported: head_dim is 80"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("50%"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("131072x1,4096x31, with schedule"), std::string::npos) << out.str();
}

TEST(BenchReport, PrefillHasFlopsAndAClockInsteadOfACeiling) {
  BenchRow tensors, pages;
  tensors.setup = cases_of("prefill").front();
  pages.setup = cases_of("prefill").back();
  tensors.us = pages.us = 1000;
  tensors.gflops = 654321;
  pages.gflops = 123456;
  tensors.mhz = 1755.4;
  tensors.arithmetic = "16-bit";
  tensors.cold = pages.cold = true;
  const json rows = bench_json({}, {tensors, pages})["rows"];
  EXPECT_EQ(rows[0]["format_k"], "plain");
  EXPECT_EQ(rows[0]["format_v"], "plain");
  EXPECT_TRUE(rows[0]["page_size"].is_null());
  EXPECT_EQ(rows[0]["causal"], false);
  EXPECT_EQ(rows[0]["arithmetic"], "16-bit");
  EXPECT_TRUE(rows[0]["scales"].is_null());
  EXPECT_DOUBLE_EQ(rows[0]["tflops"], 654.321);
  EXPECT_DOUBLE_EQ(rows[0]["mhz"], 1755.4);
  EXPECT_TRUE(rows[0]["ceiling_gbs"].is_null());
  EXPECT_EQ(rows[1]["format_k"], "fp8");
  EXPECT_EQ(rows[1]["arithmetic"], "fp8");
  EXPECT_EQ(rows[1]["page_size"], 64);
  EXPECT_EQ(rows[1]["causal"], true);
  EXPECT_TRUE(rows[1]["mhz"].is_null());
  std::ostringstream out, err;
  Terminal terminal{out, err, false, false};
  print_bench(terminal, "CUDA on a GPU", {tensors, pages});
  for (const char* text : {"TFLOP/s", "MHz", "bf16 tensors", "654", "1755", "none"}) {
    EXPECT_NE(out.str().find(text), std::string::npos) << text << " is not in\n" << out.str();
  }
  EXPECT_EQ(out.str().find("ceiling"), std::string::npos) << out.str();
}

class BenchCommand : public CliTest {};

TEST_F(BenchCommand, PrefillOverTensorsAndWithoutAMask) {
  const auto row = [&](const std::vector<std::string>& options) {
    std::vector<std::string> arguments = {"bench", "--backend", "cpu", "--suite",    "prefill", "--formats",
                                          "bf16",  "--context", "64",  "--batch",    "2",       "--q-len",
                                          "16",    "--q-heads", "4",   "--kv-heads", "2",       "--repeat",
                                          "1",     "--json",    "-"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Result result = run(std::move(arguments));
    EXPECT_EQ(result.code, 0) << result.err;
    return json::parse(result.out)["rows"].at(0);
  };
  const auto pairs = [](const json& r) {
    return r["tflops"].get<double>() * 1e6 * r["us"].get<double>() / (4.0 * 128 * 4);
  };
  for (const char* place : {"", "--plain"}) {
    const std::vector<std::string> options(*place == 0 ? 0 : 1, place);
    std::vector<std::string> full = options;
    full.emplace_back("--no-causal");
    const json causal = row(options), all = row(full);
    EXPECT_EQ(causal["format_k"], *place == 0 ? "bf16" : "plain");
    EXPECT_EQ(causal["causal"], true);
    EXPECT_EQ(all["causal"], false);
    EXPECT_NEAR(pairs(causal), 2 * (16 * 48 + 16 * 17 / 2), 1e-6);
    EXPECT_NEAR(pairs(all), 2 * 16 * 64, 1e-6);
    EXPECT_EQ(all["kernel"], "cpu-speculative");
    EXPECT_EQ(all["dtype"], "bf16");
    full.insert(full.end(), {"--dtype", "f16"});
    EXPECT_EQ(row(full)["dtype"], "f16");
  }
}

TEST_F(BenchCommand, LayersWithAndWithoutTheirAppend) {
  const Result result = run({"bench", "--backend", "cpu", "--suite", "layer", "--formats", "bf16,int4-g32",
                             "--context", "100", "--batch", "2", "--repeat", "1", "--json", "-"});
  ASSERT_EQ(result.code, 0) << result.err;
  const json rows = json::parse(result.out)["rows"];
  ASSERT_EQ(rows.size(), 6U);
  const std::array ways = {"none", "separate", "fused"};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["suite"], "layer");
    EXPECT_EQ(rows[i]["append"], ways[i % 3]);
    EXPECT_EQ(rows[i]["chain"], 1);
    EXPECT_GT(rows[i]["us"], 0);
  }
  const std::int64_t token = 2 * 8 * 128 * (2 + 2) * 2;  // two requests: bf16 K and V read, and written
  EXPECT_EQ(rows[1]["bytes"].get<std::int64_t>() - rows[0]["bytes"].get<std::int64_t>(), token);
  EXPECT_EQ(rows[2]["bytes"], rows[1]["bytes"]);
}

TEST_F(BenchCommand, GemmsAreForLayersOfTheirShapeOnCuda) {
  const auto fails = [&](std::vector<std::string> options, const char* what) {
    options.insert(options.begin(), {"bench", "--backend", "cpu", "--gemm"});
    expect_failure(run(std::move(options)), 2, what);
  };
  fails({}, "--gemm is for a layer, but --suite is decode");
  fails({"--suite", "prefill"}, "--gemm is for a layer");
  fails({"--suite", "layer", "--dtype", "f16"}, "--dtype is f16, but --gemm is in bf16");
  fails({"--suite", "layer", "--head-dim", "80"}, "--q-heads times --head-dim is 2560");
  fails({"--suite", "layer"}, "a GEMM before each layer is measured on CUDA only");
  fails({"--table", "layer"}, "--gemm");
}

TEST_F(BenchCommand, CudaWithoutAGpuSaysWhatIsMissing) {
  const BackendChoice choice = choose_backend(cpu_info(), gpu_info());
  if (choice.backend == "cuda") GTEST_SKIP() << "this machine has a Hopper GPU";
  expect_failure(run({"bench", "--backend", "cuda"}), 1,
                 "--backend is cuda, but this needs " + choice.missing.front());
}

TEST_F(BenchCommand, CasesThatDoNotFitAreRowsAndOthersRun) {
  const std::vector<std::string> shape = {"bench", "--backend", "cpu", "--formats",  "int4-row", "--context",
                                          "16384", "--q-heads", "8",   "--kv-heads", "8",        "--repeat",
                                          "1",     "--json",    "-",   "--batch"};
  const auto with_batch = [&](const char* batch) {
    std::vector<std::string> arguments = shape;
    arguments.emplace_back(batch);
    return run(std::move(arguments));
  };
  const Result both = with_batch("1,65536");  // 1.2 TB
  ASSERT_EQ(both.code, 0) << both.err;
  const json rows = json::parse(both.out)["rows"];
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_GT(rows[0]["us"], 0);
  EXPECT_NE(rows[1]["unsupported"].get<std::string>().find("are available"), std::string::npos) << rows[1];
  expect_failure(with_batch("65536"), 1, "are available");
}

}  // namespace
}  // namespace halftone::cli
