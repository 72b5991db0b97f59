// The halftone command: quantize and dequantize, the smaller commands, bad files, pipes and signals.
#include <fcntl.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include "cli/files/packed.h"
#include "cli/options/format_choice.h"
#include "reference/cache.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using nlohmann::json;
using reference::Tensor;

/// Runs the installed binary with its streams redirected; returns its wait status. `interrupt_after` in ms,
/// or -1.
int run_child(const std::vector<std::string>& arguments, const std::string& out, const std::string& err,
              int interrupt_after = -1) {
  std::vector<std::string> words = {HALFTONE_CLI_PATH};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  if (interrupt_after >= 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(interrupt_after));
    ::kill(child, SIGINT);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

Tensor tensor_of(const SafetensorsReader& file, const std::string& name) {
  const TensorInfo* info = file.find(name);
  if (info == nullptr) throw std::runtime_error("no tensor " + name);
  Tensor tensor(*info->dtype, info->shape);
  file.read(*info, 0, std::as_writable_bytes(tensor.bytes()));
  return tensor;
}

TEST_F(CliTest, QuantizeThenDequantizeEqualsTheLibrary) {
  const std::vector<Capture> tensors = capture(2);
  write_file(path("in.safetensors"), tensors);
  const DType dtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  int turn = 0;
  for (const char* format :
       {"int8-head", "int4-g32", "int4-row+rot", "fp8-static-head", "int8-tensor:int4-g64", "bf16",
        "int8-token-head-asym:fp8-token-head+rot", "int8-static-head-asym"}) {
    const DType dtype = dtypes[turn++ % 3];
    const int page_size = turn % 2 == 0 ? 16 : 64;
    ASSERT_EQ(run({"quantize", path("in.safetensors"), path("packed.safetensors"), "--format", format,
                   "--page-size", std::to_string(page_size)})
                  .code,
              0)
        << format;
    ASSERT_EQ(run({"dequantize", path("packed.safetensors"), path("out.safetensors"), "--dtype",
                   std::string(dtype_name(dtype))})
                  .code,
              0)
        << format;
    const SafetensorsReader out(path("out.safetensors"));
    EXPECT_EQ(out.tensors().size(), 4U);
    const FormatChoice choice = parse_choice(format, "format");
    for (int layer = 0; layer < 2; ++layer) {
      const auto at = static_cast<std::size_t>(3 * layer);
      reference::Random random(5);
      reference::Cache cache(choice.spec(kKvHeads, kDim, kDim, 32), std::vector<int>{kTokens}, random);
      cache.calibrate(tensors[at + 1].tensor, tensors[at + 2].tensor);
      cache.append(std::vector<int>{kTokens}, tensors[at + 1].tensor, tensors[at + 2].tensor);
      const Tensor k(dtype, tensors[at + 1].tensor.shape()), v(dtype, tensors[at + 2].tensor.shape());
      dequantize(cache.view(), k.view(), v.view());
      const std::string prefix = "layers." + std::to_string(layer) + ".";
      EXPECT_TRUE(reference::same_bytes(tensor_of(out, prefix + "k"), k)) << format;
      EXPECT_TRUE(reference::same_bytes(tensor_of(out, prefix + "v"), v)) << format;
    }
  }
}

TEST_F(CliTest, PackedFileDescribesItself) {
  write_file(path("in.safetensors"), capture(1));
  const Result result = run({"quantize", path("in.safetensors"), path("p.safetensors"), "--format",
                             "int4-g32", "--v-format", "fp8-static-head", "--rotate-k"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("int4-g32+rot:fp8-static-head"), std::string::npos) << result.out;
  const SafetensorsReader file(path("p.safetensors"));
  EXPECT_EQ(file.metadata().at("format"), "halftone-cache-1");
  EXPECT_EQ(file.metadata().at("halftone_version"), HALFTONE_VERSION);
  KvCacheSpec spec;
  spec.k_format = parse_format("int4-g32");
  spec.v_format = parse_format("fp8-static-head");
  spec.kv_heads = kKvHeads;
  spec.head_dim = spec.v_head_dim = kDim;
  spec.rotate_k = true;
  EXPECT_EQ(spec_from_json(file.metadata().at("layers.0.spec"), "test"), spec);
  const TensorInfo* pages = file.find("layers.0.pages");
  ASSERT_NE(pages, nullptr);
  EXPECT_EQ(pages->shape, (std::vector<std::int64_t>{(kTokens + 63) / 64, page_layout(spec).page_bytes}));
  EXPECT_EQ(tensor_of(file, "layers.0.lengths").as<std::int32_t>()[0], kTokens);
  EXPECT_EQ(tensor_of(file, "layers.0.v_scale").numel(), kKvHeads);
  EXPECT_EQ(file.find("layers.0.k_scale"), nullptr);
  EXPECT_EQ(file.find("layers.0.q"), nullptr);
  // The same input gives the same bytes.
  ASSERT_EQ(run({"quantize", path("in.safetensors"), path("p2.safetensors"), "--format", "int4-g32",
                 "--v-format", "fp8-static-head", "--rotate-k"})
                .code,
            0);
  EXPECT_EQ(read_text(path("p.safetensors")), read_text(path("p2.safetensors")));
}

TEST_F(CliTest, KAndVOfDifferentDTypesAreWidened) {
  std::vector<Capture> tensors = capture(1), mixed;
  for (const Capture& c : tensors) {
    const DType dtype = c.name.ends_with("k") ? DType::kBFloat16 : DType::kFloat32;
    mixed.push_back({c.name, Tensor::of(dtype, c.tensor.shape(), c.tensor.to_floats())});
  }
  write_file(path("same.safetensors"), tensors);
  write_file(path("mixed.safetensors"), mixed);
  const auto packed = [&](const std::string& name) {
    const Result result = run({"quantize", path(name), path("p." + name), "--format", "int4-g32+rot:bf16"});
    EXPECT_EQ(result.code, 0) << result.err;
    return read_text(path("p." + name));
  };
  EXPECT_EQ(packed("mixed.safetensors"), packed("same.safetensors"));
  const auto errors = [&](const std::string& name) {
    const Result result = run({"eval", path(name), "--formats", "int4-g32,fp8-static-head", "--json", "-"});
    EXPECT_EQ(result.code, 0) << result.err;
    std::vector<double> all;
    const json parsed = json::parse(result.out);
    for (const json& f : parsed["formats"]) all.push_back(f["error_worst"]);
    return all;
  };
  const std::vector<double> same = errors("same.safetensors"), got = errors("mixed.safetensors");
  ASSERT_EQ(got.size(), same.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], same[i], 1e-6);
}

TEST_F(CliTest, DequantizeRefusesWhatDoesNotFit) {
  write_file(path("in.safetensors"), capture(1));
  ASSERT_EQ(
      run({"quantize", path("in.safetensors"), path("p.safetensors"), "--format", "fp8-static-head"}).code,
      0);
  const auto dequantize_changed = [&](const std::string& drop, const std::vector<Capture>& add,
                                      const std::map<std::string, std::string>& change) {
    const SafetensorsReader good(path("p.safetensors"));
    std::vector<Capture> tensors;
    for (const TensorInfo& info : good.tensors()) {
      if (info.name != drop) tensors.push_back({info.name, tensor_of(good, info.name)});
    }
    for (const Capture& c : add) tensors.push_back({c.name, c.tensor.clone()});
    std::map<std::string, std::string> metadata = good.metadata();
    for (const auto& [key, value] : change) metadata[key] = value;
    write_file(path("bad.safetensors"), tensors, metadata);
    const Result result = run({"dequantize", path("bad.safetensors"), path("out.safetensors")});
    EXPECT_FALSE(std::filesystem::exists(path("out.safetensors")));
    return result;
  };
  const auto spec = [&](const std::string& from, const std::string& to) {
    std::string text = SafetensorsReader(path("p.safetensors")).metadata().at("layers.0.spec");
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return std::map<std::string, std::string>{{"layers.0.spec", text.replace(at, from.size(), to)}};
  };
  expect_failure(dequantize_changed("", {}, {{"format", "other"}}), 1, "is no packed cache");
  expect_failure(dequantize_changed("layers.0.pages", {}, {}), 1, "'layers.0.pages' is missing");
  expect_failure(dequantize_changed("layers.0.k_scale", {}, {}), 1, "'layers.0.k_scale' is missing");
  const auto one = [](const char* name, Tensor tensor) {
    std::vector<Capture> captures;
    captures.push_back({name, std::move(tensor)});
    return captures;
  };
  const std::int32_t long_length[] = {100'000};
  const std::int32_t negative[] = {-1};
  expect_failure(
      dequantize_changed("layers.0.lengths", one("layers.0.lengths", Tensor::of({1}, long_length)), {}), 1,
      "says 100000 tokens");
  expect_failure(
      dequantize_changed("layers.0.lengths", one("layers.0.lengths", Tensor::of({1}, negative)), {}), 1,
      "says -1 tokens");
  const float bad_scale[] = {1.0F, std::numeric_limits<float>::quiet_NaN()}, zero_scale[] = {0.0F, 1.0F};
  for (const float* scales : {bad_scale, zero_scale}) {
    expect_failure(
        dequantize_changed("layers.0.v_scale",
                           one("layers.0.v_scale", Tensor::of(DType::kFloat32, {2}, {scales, 2})), {}),
        1, "must be finite and above 0");
  }
  expect_failure(dequantize_changed("", {}, spec("\"head_dim\":64", "\"head_dim\":128")), 1,
                 "but its spec needs");
  expect_failure(dequantize_changed("", {}, spec("\"head_dim\":64", "\"head_dim\":63")), 1, "is not usable");
  expect_failure(dequantize_changed("", {}, spec("\"head_dim\":64", "\"head_dim\":-64")), 1, "bad head_dim");
  expect_failure(dequantize_changed("", {}, spec("\"kv_heads\":2", "\"kv_heads\":4000000000")), 1,
                 "bad kv_heads");
  expect_failure(dequantize_changed("", {}, spec("\"kv_heads\":2", "\"kv_heads\":\"2\"")), 1, "bad kv_heads");
  expect_failure(dequantize_changed("", {}, spec("fp8-static-head", "fp9-head")), 1, "is not usable");
  expect_failure(dequantize_changed("", {}, spec("\"rotate_k\":false", "\"rotate_k\":0")), 1, "wrong type");
  expect_failure(dequantize_changed("", {}, spec("rotate_v", "rotate_x")), 1, "lacks a field");
  for (const std::string& text : {std::string("{"), std::string("[]"), std::string(""),
                                  std::string(3000, '['), std::string(10'000, ' ')}) {
    expect_failure(dequantize_changed("", {}, {{"layers.0.spec", text}}), 1, "is not a JSON object");
  }
}

TEST_F(CliTest, HelpfulErrorsForCaptures) {
  std::vector<Capture> tensors = capture(2);
  const auto eval_without = [&](const std::string& drop) {
    std::vector<Capture> rest;
    for (const Capture& c : tensors) {
      if (c.name != drop) rest.push_back({c.name, c.tensor.clone()});
    }
    write_file(path("c.safetensors"), rest);
    return run({"eval", path("c.safetensors")});
  };
  expect_failure(eval_without("layers.1.q"), 1, "lacks 'layers.1.q'");
  expect_failure(eval_without("layers.0.k"), 1, "lacks 'layers.0.k'");
  const auto eval_of = [&](std::vector<Capture> content) {
    write_file(path("c.safetensors"), content);
    return run({"eval", path("c.safetensors")});
  };
  const auto t = [](std::vector<std::int64_t> shape, DType dtype = DType::kBFloat16) {
    Tensor tensor(dtype, std::move(shape));
    tensor.fill_bytes(0);
    return tensor;
  };
  const auto qkv = [](Tensor q, Tensor k, Tensor v) {
    std::vector<Capture> c;
    c.push_back({"q", std::move(q)});
    c.push_back({"k", std::move(k)});
    c.push_back({"v", std::move(v)});
    return c;
  };
  std::vector<Capture> weights;
  weights.push_back({"model.layers.0.self_attn.q_proj.weight", t({4, 4})});
  expect_failure(eval_of(std::move(weights)), 1, "these are weights");
  expect_failure(eval_of({}), 1, "it holds no tensor");
  expect_failure(eval_of(qkv(t({9, 3, 64}), t({9, 2, 64}), t({9, 2, 64}))), 1, "a multiple of its heads");
  expect_failure(eval_of(qkv(t({9, 2, 64}), t({9, 2, 128}), t({9, 2, 64}))), 1, "q needs the dim of k");
  expect_failure(eval_of(qkv(t({9, 2, 64}), t({9, 2, 64}), t({8, 2, 64}))), 1, "tokens and heads must agree");
  expect_failure(eval_of(qkv(t({10, 2, 64}), t({9, 2, 64}), t({9, 2, 64}))), 1, "at most its tokens");
  expect_failure(eval_of(qkv(t({9, 64}), t({9, 64}), t({9, 64}))), 1, "must be [tokens, heads, dim]");
  expect_failure(eval_of(qkv(t({2, 9, 2, 64}), t({9, 2, 64}), t({9, 2, 64}))), 1,
                 "must be [tokens, heads, dim]");
  expect_failure(eval_of(qkv(t({9, 2, 64}, DType::kInt32), t({9, 2, 64}), t({9, 2, 64}))), 1, "is I32");
  expect_failure(eval_of(qkv(t({0, 2, 64}), t({0, 2, 64}), t({0, 2, 64}))), 1, "has 0 tokens");
  expect_failure(eval_of(qkv(t({9, 2, 59}), t({9, 2, 59}), t({9, 2, 59}))), 1, "head_dim is 59");
  for (const char* name : {"q", "k", "v"}) {
    std::vector<Capture> broken = qkv(t({9, 2, 64}), t({9, 2, 64}), t({9, 2, 64}));
    for (const Capture& c : broken) {
      if (c.name == name) c.tensor.set(3 * 128, std::numeric_limits<float>::quiet_NaN());
    }
    expect_failure(eval_of(std::move(broken)), 1, std::string("tensor '") + name + "' holds nan at token 3");
    if (*name == 'q') continue;
    expect_failure(run({"quantize", path("c.safetensors"), path("out.safetensors")}), 1,
                   "holds nan at token 3");
    EXPECT_FALSE(std::filesystem::exists(path("out.safetensors")));
  }
}

TEST_F(CliTest, FailedOutputsLeaveNothing) {
  const std::string file = write_capture(1);
  expect_failure(run({"eval", file, "--formats", "bf16", "--html", path("absent/r.html")}), 1,
                 "cannot be created");
  expect_failure(run({"eval", file, "--formats", "bf16", "--json", folder_.string()}), 1, "is a directory");
  expect_failure(run({"quantize", file, "/dev/full"}), 1, "No space left");
  expect_failure(run({"quantize", file, path("absent/p.safetensors")}), 1, "cannot be created");
  EXPECT_EQ(files(), 1U);
}

TEST_F(CliTest, ProgressOnlyOnATerminal) {
  const std::string file = write_capture(2);
  EXPECT_EQ(run({"eval", file, "--formats", "bf16,int8-head"}).err, "");
  const Result shown = run({"eval", file, "--formats", "bf16,int8-head"}, true);
  EXPECT_NE(shown.err.find("[........................] 0/6 layers.0: exact attention"), std::string::npos)
      << shown.err;
  EXPECT_TRUE(shown.err.ends_with("\r\x1b[K"));  // erased
  EXPECT_EQ(shown.out.find('\r'), std::string::npos);
}

TEST_F(CliTest, ChildProcessIsQuietInPipesAndReportsAFullDisk) {
  const std::string file = write_capture(1);
  ASSERT_TRUE(std::filesystem::exists(HALFTONE_CLI_PATH)) << "build the target halftone_command first";
  int status =
      run_child({"eval", file, "--formats", "bf16,int8-head", "--json", "-"}, path("out"), path("err"));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(read_text(path("err")), "");
  EXPECT_EQ(json::parse(read_text(path("out")))["formats"].size(), 2U);
  status = run_child({"formats"}, "/dev/full", path("err"));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
  EXPECT_NE(read_text(path("err")).find("halftone: error: standard output"), std::string::npos);
}

TEST_F(CliTest, InterruptedRunsLeaveNoPartialFile) {
  ASSERT_TRUE(std::filesystem::exists(HALFTONE_CLI_PATH)) << "build the target halftone_command first";
  write_file(path("in.safetensors"), capture(6, DType::kFloat32, 3000));
  int interrupted = 0;
  for (const int delay : {0, 5, 10, 20, 40, 80, 160}) {
    const int status = run_child({"quantize", path("in.safetensors"), path("packed.safetensors")},
                                 "/dev/null", "/dev/null", delay);
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    if (WIFSIGNALED(status)) ++interrupted;
    if (names.size() > 1) {  // it was quick enough: then the file must be whole
      ASSERT_EQ(names, (std::vector<std::string>{"in.safetensors", "packed.safetensors"}));
      EXPECT_EQ(find_packed_layers(SafetensorsReader(path("packed.safetensors"))).size(), 6U);
      std::filesystem::remove(path("packed.safetensors"));
    }
  }
  EXPECT_GE(interrupted, 1);
}

TEST_F(CliTest, FormatsAgreeWithTheLibrary) {
  const Result result = run({"formats", "--json", "--head-dim", "128", "--kv-heads", "3"});
  ASSERT_EQ(result.code, 0);
  const json formats = json::parse(result.out)["formats"];
  ASSERT_EQ(formats.size(), named_formats().size());
  for (const json& f : formats) {
    const FormatChoice choice = parse_choice(f["name"].get<std::string>(), "name");
    EXPECT_DOUBLE_EQ(f["bytes_per_token"], bytes_per_token(choice.spec(3, 128, 128, 64)));
  }
  const Result text = run({"formats"});
  for (const NamedFormat& named : named_formats()) {
    EXPECT_NE(text.out.find("\n" + std::string(named.name) + " "), std::string::npos) << named.name;
  }
}

TEST_F(CliTest, DoctorSaysWhichBackendAndWhy) {
  const json doctor = json::parse(run({"doctor", "--json"}).out);
  EXPECT_GE(doctor["cpu"]["threads"], 1);
  EXPECT_GE(doctor["cpu"]["allowed"], 1);
  EXPECT_GT(doctor["cpu"]["memory_bytes"], 1 << 20);
  EXPECT_NE(doctor["cpu"]["simd"], "");
  EXPECT_EQ(doctor["backend"]["name"], doctor["backend"]["missing_for_cuda"].empty() ? "cuda" : "cpu");
  EXPECT_NE(doctor["backend"]["reason"], "");
  const Result text = run({"doctor"});
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.out.find("backend"), std::string::npos);
  if (doctor["gpu"]["devices"].empty()) {
    EXPECT_NE(text.out.find("CUDA needs"), std::string::npos);
  }
}

TEST_F(CliTest, BenchWritesOneRowPerCase) {
  const Result result = run({"bench",
                             "--backend",
                             "cpu",
                             "--formats",
                             "bf16,int8-head:int4-g32",
                             "--batch",
                             "1,2",
                             "--context",
                             "128",
                             "--q-heads",
                             "4",
                             "--kv-heads",
                             "2",
                             "--head-dim",
                             "64",
                             "--page-size",
                             "16",
                             "--policy",
                             "batch_invariant",
                             "--arithmetic",
                             "half_int8",
                             "--repeat",
                             "2",
                             "--json",
                             path("b.json")});
  ASSERT_EQ(result.code, 0) << result.err;
  const json bench = json::parse(read_text(path("b.json")));
  for (const char* key : {"halftone", "commit", "compiler", "date", "device"})
    EXPECT_TRUE(bench.contains(key)) << key;
  ASSERT_EQ(bench["rows"].size(), 4U);
  for (const json& row : bench["rows"]) {
    EXPECT_EQ(row["suite"], "decode");
    EXPECT_EQ(row["context"], 128);
    EXPECT_EQ(row["q_len"], 1);
    EXPECT_EQ(row["page_size"], 16);
    EXPECT_EQ(row["policy"], "batch_invariant");
    EXPECT_EQ(row["arithmetic"], "half_int8");
    EXPECT_EQ(row["q_heads"], 4);
    EXPECT_EQ(row["kv_heads"], 2);
    EXPECT_EQ(row["head_dim"], 64);
    EXPECT_EQ(row["repeats"], 2);
    EXPECT_GT(row["us"], 0);
    EXPECT_GT(row["ceiling_gbs"], 0);
    EXPECT_NEAR(row["gbs"].get<double>(), row["bytes"].get<double>() / row["us"].get<double>() / 1e3, 1e-9);
    const int batch = row["batch"];
    const int per_token = row["format_k"] == "bf16" ? 2 * (128 + 128) : 2 * (64 + 2 + 32 + 8);
    EXPECT_EQ(row["bytes"], batch * (128 * per_token + 4 * 2 * 64 * 2));
  }
  for (const char* suite : {"prefill", "append"}) {
    const Result other =
        run({"bench", "--backend", "cpu", "--suite", suite, "--formats", "int8-head", "--batch", "1",
             "--context", "64", "--q-heads", "4", "--kv-heads", "2", "--repeat", "2", "--json", "-"});
    ASSERT_EQ(other.code, 0) << other.err;
    const json rows = json::parse(other.out)["rows"];
    ASSERT_EQ(rows.size(), 1U);
    EXPECT_EQ(rows[0]["suite"], suite);
    EXPECT_EQ(rows[0]["q_len"], suite[0] == 'p' ? 64 : 1);
    EXPECT_EQ(rows[0]["ceiling_gbs"].is_null(), suite[0] == 'p');
  }
}

}  // namespace
}  // namespace halftone::cli
