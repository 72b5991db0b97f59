// `halftone explain`: the plan, its schedule and its floor, of paged and of latent caches.
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

class ExplainTest : public CliTest {
 public:
  static void expect_pieces(const Result& result, const std::vector<std::string>& pieces) {
    ASSERT_EQ(result.code, 0) << result.err;
    for (const std::string& piece : pieces) {
      EXPECT_NE(result.out.find(piece), std::string::npos) << piece << " is not in\n" << result.out;
    }
  }
};

TEST_F(ExplainTest, PlanScheduleAndFloor) {
  const Result result = run(
      {"explain", "--lengths", "100,2000,0", "--format", "int8-head", "--workers", "4", "--bandwidth", "10"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("batch 3"), std::string::npos);
  EXPECT_NE(result.out.find("4 workers"), std::string::npos) << result.out;
  // 2100 keys of 8 heads, 2 x 130 bytes each = 4.2 MiB; Q and O of 3 queries: 3 x 32 x 256 x 2 bytes.
  EXPECT_NE(result.out.find("4.2 MiB of cache and 48.0 KiB of Q and O"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("At 10.0 GB/s that takes at least 441.7 us."), std::string::npos) << result.out;
  EXPECT_EQ(run({"explain", "--batch", "0"}).code, 0);
  for (const char* arithmetic : {"full_int8", "fp8"}) {
    const Result lower = run({"explain", "--batch", "1", "--arithmetic", arithmetic});
    EXPECT_EQ(lower.code, 0) << lower.err;
    EXPECT_NE(lower.out.find(arithmetic), std::string::npos) << lower.out;
  }
}

/// A plan for chunks alone has no kernel for single queries.
TEST_F(ExplainTest, TheShortestRequestIsStated) {
  const auto with = [](const char* q_lengths) {
    return run({"explain", "--lengths", "100,2000,0", "--q-lengths", q_lengths, "--workers", "4"});
  };
  expect_pieces(with("100,1,0"), {"pass       1 of 2", "cpu-decode"});
  const Result chunks = with("100,64,0");
  expect_pieces(chunks, {"none of at most 16 is expected (min_q_len 64)"});
  EXPECT_EQ(chunks.out.find("cpu-decode"), std::string::npos) << chunks.out;
}

/// Two requests of 100 keys, 16 query heads: Q has 576 dims a head, O 512, both in bf16.
TEST_F(ExplainTest, LatentCachesOfEveryFormat) {
  const std::vector<std::string> latent = {"explain", "--latent",  "--batch", "2",         "--context",
                                           "100",     "--q-heads", "16",      "--workers", "3"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), latent.begin(), latent.end());
    return run(more);
  };
  expect_pieces(with({}), {"K and V fp8-g128-f32, K bf16", "over 3 of 3 workers",
                           "128.1 KiB of cache and 68.0 KiB of Q and O", "0.00696 GFLOP"});
  expect_pieces(with({"--format", "bf16"}), {"K and V bf16", "225.0 KiB of cache"});
  expect_pieces(with({"--format", "int4-g64"}), {"K and V int4-g64", "81.2 KiB of cache"});
  // V is all of K, 512 dims; pages are padded.
  expect_pieces(with({"--format", "fp8-g64-e8m0"}),
                {"K and V fp8-g64-e8m0", "114.3 KiB of cache and 64.0 KiB of Q and O"});
}

/// The places of the lists are what is shared out, whatever the context.
TEST_F(ExplainTest, ListsOfLatentCaches) {
  const std::vector<std::string> sparse = {"explain", "--latent",  "--batch", "2",       "--context",
                                           "9000",    "--q-heads", "16",      "--top-k", "128"};
  std::vector<std::string> both = sparse;
  expect_pieces(run(sparse), {"K and V fp8-g128-f32, K bf16", "list of up to 128 slots",
                              "2 queries, 256 keys", "164.0 KiB of cache and 69.0 KiB of Q and O"});
  both.insert(both.end(), {"--extra-top-k", "64"});
  expect_pieces(run(both), {"2 queries, 384 keys", "246.0 KiB of cache and 69.5 KiB of Q and O"});
}

TEST_F(ExplainTest, RefusesWhatNoLatentHas) {
  const auto refused = [](std::vector<std::string> more, const std::string& piece) {
    more.insert(more.begin(), {"explain", "--latent"});
    expect_failure(run(more), 2, piece);
  };
  for (const char* format : {"int8-g64+rot", "int8-g64+chan", "int8-g64:int4-g64"}) {
    refused({"--format", format},
            "--format has '" + std::string(format) +
                "', but a latent has one format, without +rot and +chan: use int8-g64.");
  }
  for (const char* option : {"--kv-heads", "--head-dim", "--v-head-dim"}) refused({option, "1"}, "excludes");
  refused({"--top-k", "5", "--window", "3"}, "excludes");
  refused({"--extra-top-k", "64"}, "--extra-top-k is 64, but a second list needs a first one: add --top-k.");
  for (const char* option : {"--top-k", "--extra-top-k"}) {
    for (const char* value : {"0", "65537", "-3"}) {
      refused({option, value}, std::string(option) + " is " + value + ", but must be 1 to 65536;");
    }
  }
  expect_failure(run({"explain", "--top-k", "64"}), 2,
                 "--top-k is 64, but lists are taken over latent caches: add --latent, or leave it out.");
}

}  // namespace
}  // namespace halftone::cli
