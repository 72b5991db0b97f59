// The halftone command: help, exit codes, and command lines that it refuses before it works.
#include <unistd.h>

#include "cli_support.h"

namespace halftone::cli {
namespace {

TEST_F(CliTest, ExitCodesAndUsage) {
  EXPECT_EQ(run({"--help"}).code, 0);
  EXPECT_EQ(run({"--version"}).out, std::string("halftone ") + HALFTONE_VERSION + "\n");
  for (const char* command : {"eval", "quantize", "dequantize", "bench", "doctor", "explain", "formats"}) {
    const Result help = run({command, "--help"});
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_NE(help.out.find(command), std::string::npos);
    EXPECT_EQ(help.err, "");
    EXPECT_NE(run({"--help"}).out.find(command), std::string::npos);
  }
  for (const char* taught : {"Examples:", "layers.<i>.q", "--layout htd", "worst cosine"}) {
    EXPECT_NE(run({"eval", "--help"}).out.find(taught), std::string::npos) << taught;
  }
  EXPECT_NE(run({"--help"}).out.find("Exit codes: 0"), std::string::npos);
  expect_failure(run({"eval"}), 2, "see `halftone eval --help`");
  expect_failure(run({"eval", "x", "--nonsense"}), 2, "--nonsense");
  expect_failure(run({"eval", "x", "--formats", "int9"}), 2, "--formats is 'int9'");
  expect_failure(run({"eval", "x", "--formats", "int8-head,,bf16"}), 2, "--formats is ''");
  expect_failure(run({"eval", "x", "--formats", "int8-head:"}), 2, "--formats is ''");
  expect_failure(run({"eval", "x", "--page-size", "48"}), 2, "--page-size is 48");
  expect_failure(run({"eval", "x", "--layout", "tdh"}), 2, "thd or htd");
  expect_failure(run({"eval", "x", "--max-error", "-1"}), 2, "--max-error");
  expect_failure(run({"eval", "x", "--json", "-", "--html", "-"}), 2, "name a file for one");
  expect_failure(run({"eval", path("absent.safetensors")}), 1, "No such file");
  expect_failure(run({"eval", folder_.string()}), 1, "a directory");
  expect_failure(run({"quantize", "a", "b", "--format", "int8-head:bf16", "--v-format", "bf16"}), 2,
                 "use one of them");
  expect_failure(run({"dequantize", "a", "b", "--dtype", "f64"}), 2, "bf16, f16 or f32");
  expect_failure(run({"bench", "--suite", "train"}), 2, "decode, prefill, append or layer");
  expect_failure(run({"bench", "--policy", "slow"}), 2, "batch_invariant");
  expect_failure(run({"bench", "--arithmetic", "int8"}), 2, "--arithmetic is 'int8'");
  expect_failure(run({"bench", "--suite", "append", "--arithmetic", "half_int8"}), 2, "is for attention");
  expect_failure(run({"bench", "--q-len", "9", "--context", "8"}), 2, "--q-len is 9");
  expect_failure(run({"explain", "--q-heads", "5", "--kv-heads", "2"}), 1, "q_heads");
  expect_failure(run({"explain", "--lengths", "5,6", "--q-lengths", "1"}), 2, "give one each");
}

TEST_F(CliTest, UnknownAndMissingCommandsNameTheCommands) {
  const std::string commands =
      "eval, recipe, formats, quantize, dequantize, explain, bench, doctor; see `halftone --help`.";
  expect_failure(run({}), 2, "no command is given, but one is needed: " + commands);
  for (const char* word : {"nope", "evaluate", "--nope"}) {
    expect_failure(run({word}), 2, std::string("command is '") + word + "', but must be one of " + commands);
  }
  expect_failure(run({"nope", "doctor"}), 2, "not expected: nope");
}

TEST_F(CliTest, NumbersOutOfRangeAreOneShortSentence) {
  const auto refused = [&](std::vector<std::string> arguments, const std::string& piece) {
    const Result result = run(std::move(arguments));
    expect_failure(result, 2, piece);
    EXPECT_LT(result.err.size(), 160U) << result.err;
    EXPECT_EQ(result.err.find("0.000000"), std::string::npos) << result.err;
  };
  const std::string file = write_capture(1);
  const std::string limits = "', but must be a finite number above 0, 1.2e-38 to 3.4e+38; see `halftone ";
  for (const char* option : {"--max-error", "--scale", "--softcap"}) {
    for (const std::string value : {"nan", "-nan", "inf", "-1", "0", "1e-50", "1e39", "2%", "x"}) {
      refused({"eval", file, option, value}, option + (" is '" + value + limits) + "eval --help`.");
    }
  }
  for (const std::string value : {"nan", "inf", "0", "-5", "1e400"}) {
    refused({"explain", "--bandwidth", value}, "--bandwidth is '" + value + limits + "explain --help`.");
  }
  for (const char* option : {"--tokens", "--max-queries"}) {
    for (const std::string value : {"0", "-1", "1073741825", "99999999999999999999"}) {
      refused({"eval", file, option, value}, option + (" is " + value) + ", but must be 1 to 1073741824;");
    }
    refused({"eval", file, option, "1.5"}, "is '1.5', but must be a whole number, 1 to 1073741824;");
  }
  refused({"explain", "--batch", "1048577"}, "--batch is 1048577, but must be 0 to 1048576;");
  refused({"explain", "--lengths", "5,-6"}, "--lengths is -6, but must be 0 to 1073741824;");
  refused({"explain", "--batch", "many"}, "--batch is 'many', but must be a whole number, 0 to 1048576;");
  refused({"bench", "--backend", "tpu"}, "--backend is 'tpu', but must be one of auto, cpu, cuda;");
}

TEST_F(CliTest, EmptyValuesAreNotIgnored) {
  const std::string file = write_capture(1);
  for (const char* option :
       {"--formats", "--html", "--json", "--layers", "--tokens", "--layout", "--window"}) {
    expect_failure(run({"eval", file, option, ""}), 2, std::string(option) + " is '', but must");
  }
  for (const char* option : {"--table", "--contexts-mix", "--formats", "--json", "--batch", "--q-heads"}) {
    expect_failure(run({"bench", option, ""}), 2, std::string(option) + " is '', but must");
  }
  for (const char* option : {"--format", "--v-format"}) {
    expect_failure(run({"quantize", file, path("out"), option, ""}), 2,
                   std::string(option) + " is '', but must");
  }
  expect_failure(run({"explain", "--lengths", ""}), 2, "--lengths is '', but must");
  expect_failure(run({"formats", "--head-dim", ""}), 2, "--head-dim is '', but must");
  expect_failure(run({"eval", ""}), 2, "file is '', but must");
  EXPECT_EQ(files(), 1U);
}

TEST_F(CliTest, HeadDimsThatNoFormatHasAreAnError) {
  for (const char* json : {"", "--json"}) {
    std::vector<std::string> arguments = {"formats", "--head-dim", "100"};
    if (*json != 0) arguments.emplace_back(json);
    expect_failure(run(arguments), 1,
                   "head_dim is 100, but must be 64, 80, 96, 128, 192, 256 or 512: use 128, pad");
  }
  const Result partial = run({"formats", "--head-dim", "80"});  // groups of 32 do not fit, others do
  EXPECT_EQ(partial.code, 0);
  EXPECT_NE(partial.out.find("must divide head_dim 80"), std::string::npos);
}

TEST_F(CliTest, OutputsNeverOverwriteTheInput) {
  const std::string file = write_capture(1);
  ASSERT_EQ(run({"quantize", file, path("packed")}).code, 0);
  std::filesystem::create_directory(path("sub"));
  const auto spellings = [&](const std::string& target) {
    const std::string link = target + "-link", chain = target + "-chain", hard = target + "-hard";
    std::filesystem::create_symlink(target, link);
    std::filesystem::create_symlink(link, chain);
    std::filesystem::create_hard_link(target, hard);
    const std::string name = std::filesystem::path(target).filename();
    return std::vector<std::string>{target, link, chain, hard, path("sub/../" + name), path("./" + name)};
  };
  const std::string content = read_text(file), packed = read_text(path("packed"));
  for (const std::string& other : spellings(file)) {
    const std::string piece = " is '" + other + "', but would overwrite ";
    expect_failure(run({"eval", file, "--formats", "bf16", "--html", other}), 2,
                   "--html" + piece + "the input '");
    expect_failure(run({"eval", other, "--formats", "bf16", "--json", file}), 2,
                   "would overwrite the input '");
    expect_failure(run({"quantize", file, other}), 2, "out" + piece + "the input '");
    EXPECT_EQ(read_text(file), content) << other;
    EXPECT_EQ(read_text(other), content) << other;
  }
  for (const std::string& other : spellings(path("packed"))) {
    expect_failure(run({"dequantize", path("packed"), other}), 2, "would overwrite the input '");
    EXPECT_EQ(read_text(path("packed")), packed) << other;
  }
}

TEST_F(CliTest, OutputsNeverOverwriteEachOther) {
  const std::string file = write_capture(1);
  std::filesystem::create_symlink("new", path("dangling"));
  std::filesystem::create_directory_symlink(folder_, path("folder"));
  write_file(path("old"), {});
  std::filesystem::create_hard_link(path("old"), path("hard"));
  const std::size_t before = files();
  const auto both = [&](const std::string& html, const std::string& json) {
    return run({"eval", file, "--formats", "bf16", "--html", html, "--json", json});
  };
  for (const auto& [html, json] :
       std::vector<std::pair<std::string, std::string>>{{path("new"), path("new")},
                                                        {path("new"), path("./new")},
                                                        {path("new"), path("folder/new")},
                                                        {path("dangling"), path("new")},
                                                        {path("new"), path("folder/dangling")},
                                                        {path("old"), path("old")},
                                                        {path("hard"), path("old")}}) {
    expect_failure(both(html, json), 2,
                   "--html is '" + html + "', but would overwrite --json '" + json + "'");
  }
  EXPECT_EQ(files(), before);
  EXPECT_EQ(both(path("one"), path("two")).code, 0);
  EXPECT_EQ(both("/dev/null", "/dev/null").code, 0);
  EXPECT_EQ(files(), before + 2);
}

TEST_F(CliTest, PackedFilesDoNotGoToStandardOutput) {
  const std::string file = write_capture(1);
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder_);
  const Result quantize = run({"quantize", file, "-"}), dequantize = run({"dequantize", file, "-"});
  EXPECT_EQ(files(), 1U);
  const Result named = run({"quantize", file, "./-"}), lost = run({"eval", "-", "--html", "./-"});
  std::filesystem::current_path(before);
  expect_failure(quantize, 2, "out is '-', but");
  expect_failure(dequantize, 2, "out is '-', but");
  EXPECT_EQ(named.code, 0) << named.err;
  EXPECT_TRUE(std::filesystem::exists(path("-")));
  expect_failure(lost, 2, "--html is './-', but would overwrite the input '-'");
}

/// Tables and options of `halftone bench` that name nothing, exclude each other or need another suite or
/// backend.
TEST_F(CliTest, OptionsOfBenchThatDoNotGoTogether) {
  expect_failure(run({"bench", "--backend", "tpu"}), 2, "tpu");
  expect_failure(run({"bench", "--table", "none"}), 2, "--table has 'none'");
  expect_failure(run({"bench", "--table", "headline", "--batch", "3"}), 2, "--batch");
  expect_failure(run({"bench", "--contexts-mix", "4096x2,64", "--backend", "cpu"}), 2,
                 "--contexts-mix has '64'");
  expect_failure(run({"bench", "--contexts-mix", "4096x2", "--batch", "3"}), 2, "excludes");
  expect_failure(run({"bench", "--contexts-mix", "4096x2,2x1", "--q-len", "3"}), 2,
                 "a context of --contexts-mix is 2");
  expect_failure(run({"bench", "--contexts-mix", "4096x2,3/2x1"}), 2,
                 "queries of a group of --contexts-mix are 3, but a context of --contexts-mix is 2");
  expect_failure(run({"bench", "--suite", "append", "--contexts-mix", "4096x2,3/64x1"}), 2,
                 "groups with queries of their own are for --suite decode and prefill");
  expect_failure(run({"bench", "--suite", "append", "--chain", "2"}), 2, "--chain is for attention");
  expect_failure(run({"bench", "--suite", "append", "--with-schedule"}), 2,
                 "--with-schedule is for attention");
  expect_failure(run({"bench", "--plain"}), 2, "--plain is for prefill, but --suite is decode");
  expect_failure(run({"bench", "--suite", "append", "--no-causal"}), 2,
                 "--no-causal is for prefill, but --suite is append");
  expect_failure(run({"bench", "--suite", "prefill", "--plain", "--formats", "bf16,fp8"}), 2,
                 "--formats has fp8, but --plain is for tensors in bf16");
  expect_failure(run({"bench", "--table", "prefill", "--plain"}), 2, "excludes");
  expect_failure(run({"bench", "--dtype", "f32"}), 2, "--dtype");
  expect_failure(run({"bench", "--backend", "cpu", "--chain", "2"}), 2,
                 "a chain of 2 layers is measured on CUDA only");
  expect_failure(run({"bench", "--backend", "cpu", "--contexts-mix", "4096x2,64x1"}), 2, "4096x2,64x1");
  expect_failure(run({"bench", "--backend", "cpu", "--with-schedule"}), 2, "measured on CUDA only");
  expect_failure(run({"bench", "--backend", "cpu", "--cold-code"}), 2, "--cold-code is for CUDA");
}

}  // namespace
}  // namespace halftone::cli
