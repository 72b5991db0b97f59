// `halftone eval`: the figures against an independent computation, and the JSON.
#include <cmath>
#include <numeric>

#include "cli/options/format_choice.h"
#include "reference/cache.h"
#include "reference/oracle.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using nlohmann::json;
using reference::Tensor;

const json& find_format(const json& report, const std::string& name) {
  for (const json& f : report.at("formats")) {
    if (f.at("name") == name) return f;
  }
  throw std::runtime_error("no format " + name);
}

class EvalTest : public CliTest {
 protected:
  json evaluate(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "eval");
    arguments.insert(arguments.end(), {"--json", "-"});
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    return json::parse(result.out);
  }
};

TEST_F(EvalTest, JsonHasEveryFormatAndField) {
  const json report = evaluate({write_capture(2)});
  for (const char* key : {"halftone", "commit", "compiler", "date", "device", "file", "metadata", "options",
                          "layers", "formats", "conclusion", "skipped"}) {
    EXPECT_TRUE(report.contains(key)) << key;
  }
  EXPECT_EQ(report["layers"].size(), 2U);
  EXPECT_EQ(report["layers"][1]["name"], "layers.1");
  EXPECT_EQ(report["layers"][0]["tokens"], kTokens);
  EXPECT_EQ(report["layers"][0]["q_heads"], kQHeads);
  EXPECT_EQ(report["layers"][0]["kv_heads"], kKvHeads);
  EXPECT_EQ(report["layers"][0]["k_channel_absmax"].size(), static_cast<std::size_t>(kKvHeads * kDim));
  for (const NamedFormat& named : named_formats()) {
    if (named.format.granularity == Granularity::kGroup && named.format.group_size > kDim) continue;
    EXPECT_NO_THROW(find_format(report, std::string(named.name))) << named.name;
  }
  for (const char* rotated : {"int8-head+rot", "int4-g32+rot", "int4-row+rot"}) {
    EXPECT_TRUE(find_format(report, rotated)["rotate_k"]);
  }
  for (const json& f : report["formats"]) {
    ASSERT_EQ(f["layers"].size(), 2U);
    for (const json& layer : f["layers"]) {
      EXPECT_EQ(layer["head_error"].size(), static_cast<std::size_t>(kQHeads));
      for (const char* key : {"bytes_per_token", "compression", "error", "worst_cosine", "lse_error",
                              "prefill_us", "decode_us"}) {
        EXPECT_TRUE(layer[key].is_number() && std::isfinite(layer[key].get<double>())) << key;
      }
      EXPECT_GT(layer["prefill_us"], 0);
      EXPECT_GT(layer["decode_us"], 0);
    }
  }
}

/// half_int8 adds the error of Q's and K's integers, where K has none of its own.
TEST_F(EvalTest, ArithmeticIsThatOfTheRun) {
  const std::string capture = write_capture(1);
  const json exact = evaluate({capture, "--formats", "bf16,int8-head,int4-g32"});
  const json lower = evaluate({capture, "--formats", "bf16,int8-head,int4-g32", "--arithmetic", "half_int8"});
  EXPECT_EQ(exact["options"]["arithmetic"], "16-bit");
  EXPECT_EQ(lower["options"]["arithmetic"], "half_int8");
  const auto error = [](const json& report, const char* name) {
    return find_format(report, name)["error_worst"].get<double>();
  };
  EXPECT_GT(error(lower, "bf16"), 20 * error(exact, "bf16"));
  EXPECT_LT(error(lower, "bf16"), 0.1);
  EXPECT_LT(error(lower, "int8-head"), 2 * error(exact, "int8-head"));
  EXPECT_LT(error(lower, "int4-g32"), 1.2 * error(exact, "int4-g32"));
  for (const char* arithmetic : {"half_int8", "full_int8", "fp8"}) {
    const Result text = run({"eval", capture, "--formats", "bf16", "--arithmetic", arithmetic});
    EXPECT_NE(text.out.find(std::string("arithmetic ") + arithmetic), std::string::npos) << text.out;
  }
}

/// V's codes add to the error; those of E4M3 have three bits of mantissa.
TEST_F(EvalTest, FullInt8AndFp8AddTheErrorOfV) {
  const std::string capture = write_capture(1);
  const auto error = [&](const char* arithmetic) {
    const json report = evaluate({capture, "--formats", "bf16", "--arithmetic", arithmetic});
    EXPECT_EQ(report["options"]["arithmetic"], arithmetic);
    return find_format(report, "bf16")["error_worst"].get<double>();
  };
  const double half = error("half_int8"), full = error("full_int8"), fp8 = error("fp8");
  EXPECT_GT(full, half);
  EXPECT_LT(full, 3 * half);
  EXPECT_GT(fp8, full);
  EXPECT_LT(fp8, 0.15);
}

TEST_F(EvalTest, SizesAreExact) {
  const json report = evaluate(
      {write_capture(1), "--formats", "bf16,int8-head,int8-tensor,int4-g32,int4-row,fp8-token-head-f32"});
  // K and V, 2 KV heads of 64 dims.
  const std::map<std::string, double> bytes = {
      {"bf16", 2 * 2 * 64 * 2},       {"int8-head", 2 * 2 * (64 + 2)},
      {"int8-tensor", 2 * 2 * 64},    {"int4-g32", 2 * 2 * (32 + 2 * 4)},
      {"int4-row", 2 * 2 * (32 + 4)}, {"fp8-token-head-f32", 2 * 2 * (64 + 4)}};
  for (const auto& [name, expected] : bytes) {
    EXPECT_DOUBLE_EQ(find_format(report, name)["bytes_per_token"], expected) << name;
    EXPECT_DOUBLE_EQ(find_format(report, name)["compression"], 512 / expected) << name;
  }
}

TEST_F(EvalTest, ErrorsAreMonotone) {
  const json report = evaluate({write_capture(2), "--formats", "bf16,int8-g32,int8-token,int4-g32,int4-row"});
  const auto error = [&](const char* name) { return find_format(report, name)["error_worst"].get<double>(); };
  EXPECT_LT(error("bf16"), 1e-5);  // bf16 input is stored exactly; what remains is fp32 arithmetic
  EXPECT_TRUE(find_format(report, "bf16")["k_snr_db"].is_null());
  EXPECT_LT(error("bf16"), error("int8-g32"));
  EXPECT_LT(error("int8-g32"), error("int8-token"));
  EXPECT_LT(error("int8-g32"), error("int4-g32"));
  EXPECT_LT(error("int4-g32"), error("int4-row"));
  EXPECT_GT(find_format(report, "int8-g32")["k_snr_db"].get<double>(),
            find_format(report, "int4-g32")["k_snr_db"].get<double>() + 15);
  // Rounding to bf16 has a relative error of at most 2^-9 per element.
  for (const json& layer : report["layers"]) {
    EXPECT_GT(layer["bf16_rounding_error"], 1e-4);
    EXPECT_LT(layer["bf16_rounding_error"], std::ldexp(1, -9) + 1e-6);
  }
}

/// What eval must report for one layer and format, from the oracle alone.
struct Expected {
  double k_snr = 0, v_snr = 0, error = 0, cosine = 1, lse = 0;
};

double snr(std::span<const float> x, std::span<const float> y) {
  double signal = 0, noise = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    signal += double{x[i]} * x[i];
    noise += (double{x[i]} - y[i]) * (double{x[i]} - y[i]);
  }
  return 10 * std::log10(signal / noise);
}

Expected expect_figures(const Tensor& q, const Tensor& k, const Tensor& v, const KvCacheSpec& spec) {
  const int tokens = static_cast<int>(k.shape()[0]);
  reference::Random random(3);
  reference::Cache cache(spec, std::vector<int>{tokens}, random);
  cache.calibrate(k, v);
  cache.append(std::vector<int>{tokens}, k, v);
  const Tensor k_back(DType::kFloat32, k.shape()), v_back(DType::kFloat32, v.shape());
  dequantize(cache.view(), k_back.view(), v_back.view());
  reference::OracleParams params;
  params.q_len = q.shape()[0];
  params.kv_len = tokens;
  params.q_heads = static_cast<int>(q.shape()[1]);
  params.kv_heads = spec.kv_heads;
  params.head_dim = spec.head_dim;
  params.causal = true;
  const std::vector<float> qf = q.to_floats(), kf = k.to_floats(), vf = v.to_floats();
  const reference::OracleResult truth = attention_oracle(params, qf.data(), kf.data(), vf.data());
  const reference::OracleResult stored =
      attention_oracle(params, qf.data(), k_back.as<float>().data(), v_back.as<float>().data());
  Expected e;
  e.k_snr = snr(kf, k_back.as<float>());
  e.v_snr = snr(vf, v_back.as<float>());
  double signal = 0, noise = 0;
  const auto dim = static_cast<std::size_t>(spec.v_dim());
  for (std::size_t row = 0; row < truth.lse.size(); ++row) {
    double tt = 0, ss = 0, ts = 0;
    for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
      tt += truth.out[i] * truth.out[i];
      ss += stored.out[i] * stored.out[i];
      ts += truth.out[i] * stored.out[i];
      noise += (truth.out[i] - stored.out[i]) * (truth.out[i] - stored.out[i]);
    }
    signal += tt;
    e.cosine = std::min(e.cosine, ts / std::sqrt(tt * ss));
    e.lse = std::max(e.lse, std::fabs(truth.lse[row] - stored.lse[row]));
  }
  e.error = std::sqrt(noise / signal);
  return e;
}

TEST_F(EvalTest, FiguresMatchAnIndependentComputation) {
  const std::vector<Capture> tensors = capture(2);
  write_file(path("c.safetensors"), tensors);
  const std::string formats = "int8-head,int4-g32+rot,fp8-static-head,int8-tensor:int4-row,int4-g32:bf16+rot";
  const json report = evaluate({path("c.safetensors"), "--formats", formats, "--page-size", "32"});
  for (const FormatChoice& choice : parse_choices(formats, "--formats")) {
    for (std::size_t layer = 0; layer < 2; ++layer) {
      const Expected e = expect_figures(tensors[3 * layer].tensor, tensors[3 * layer + 1].tensor,
                                        tensors[3 * layer + 2].tensor, choice.spec(kKvHeads, kDim, kDim, 64));
      const json& got = find_format(report, choice.name)["layers"][layer];
      SCOPED_TRACE(choice.name);
      EXPECT_NEAR(got["error"], e.error, 1e-3 * e.error + 1e-6);
      EXPECT_NEAR(got["worst_cosine"], e.cosine, 1e-5);
      EXPECT_NEAR(got["lse_error"], e.lse, 1e-4 + 1e-3 * e.lse);
      EXPECT_NEAR(got["k_snr_db"], e.k_snr, 1e-6 * e.k_snr);
      if (got["v_snr_db"].is_number()) {
        EXPECT_NEAR(got["v_snr_db"], e.v_snr, 1e-6 * e.v_snr);
      } else {
        EXPECT_TRUE(std::isinf(e.v_snr));
      }
    }
  }
}

TEST_F(EvalTest, ConclusionIsTheSmallestWithinTheLimit) {
  const std::string file = write_capture(2);
  for (const char* limit : {"0.001", "0.02", "0.2", "10"}) {
    const json report = evaluate({file, "--max-error", limit});
    const json* best = nullptr;
    for (const json& f : report["formats"]) {
      if (f["error_worst"] > std::stod(limit)) continue;
      const auto key = [](const json& x) {
        return std::pair(x["bytes_per_token"].get<double>(), std::max(1e-5, x["error_worst"].get<double>()));
      };
      if (best == nullptr || key(f) < key(*best)) best = &f;
    }
    ASSERT_NE(best, nullptr);
    EXPECT_EQ(report["conclusion"]["format"], (*best)["name"]);
    EXPECT_NE(report["conclusion"]["sentence"].get<std::string>().find((*best)["name"].get<std::string>()),
              std::string::npos);
    EXPECT_TRUE((*best)["pareto"]);
  }
  const json none = evaluate({file, "--formats", "int4-row", "--max-error", "1e-9"});
  EXPECT_TRUE(none["conclusion"]["format"].is_null());
  EXPECT_NE(none["conclusion"]["sentence"].get<std::string>().find("No format"), std::string::npos);
}

TEST_F(EvalTest, LayoutsAndBatchAxisAgree) {
  const std::vector<Capture> tensors = capture(1);
  write_file(path("thd.safetensors"), tensors);
  std::vector<Capture> swapped, batched;
  for (const Capture& c : tensors) {
    const std::vector<std::int64_t>& s = c.tensor.shape();
    Tensor t(c.tensor.dtype(), {s[1], s[0], s[2]});
    for (std::int64_t i = 0; i < c.tensor.numel(); ++i) {
      const std::int64_t token = i / (s[1] * s[2]), head = i / s[2] % s[1];
      t.set((head * s[0] + token) * s[2] + i % s[2], c.tensor.get(i));
    }
    swapped.push_back({c.name, std::move(t)});
    Tensor b(c.tensor.dtype(), {1, s[0], s[1], s[2]});
    std::ranges::copy(c.tensor.bytes(), b.bytes().begin());
    batched.push_back({c.name, std::move(b)});
  }
  write_file(path("htd.safetensors"), swapped);
  write_file(path("batched.safetensors"), batched);
  const auto formats = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--formats", "int8-head,int4-g32"});
    json f = evaluate(arguments)["formats"];
    for (json& x : f) {
      x.erase("prefill_us"), x.erase("decode_us");
      for (json& l : x["layers"]) l.erase("prefill_us"), l.erase("decode_us");
    }
    return f;
  };
  const json expected = formats({path("thd.safetensors")});
  EXPECT_EQ(formats({path("htd.safetensors"), "--layout", "htd"}), expected);
  EXPECT_EQ(formats({path("batched.safetensors")}), expected);
  EXPECT_EQ(formats({path("thd.safetensors"), "--page-size", "16"}), expected);
  expect_failure(run({"eval", path("htd.safetensors")}), 1, "try --layout htd");
}

TEST_F(EvalTest, FewerQueriesTokensAndLayers) {
  std::vector<Capture> tensors = capture(3, DType::kFloat32);
  write_file(path("all.safetensors"), tensors);
  const json part = evaluate({path("all.safetensors"), "--formats", "int8-head", "--layers", "0,2",
                              "--tokens", "70", "--max-queries", "9"});
  ASSERT_EQ(part["layers"].size(), 2U);
  EXPECT_EQ(part["layers"][1]["name"], "layers.2");
  EXPECT_EQ(part["layers"][0]["tokens"], 70);
  EXPECT_EQ(part["layers"][0]["queries"], 9);
  // The same from a file that holds only those tokens and queries.
  const auto cut = [](const Tensor& t, std::int64_t first, std::int64_t count) {
    Tensor part_of(t.dtype(), {count, t.shape()[1], t.shape()[2]});
    const auto row = static_cast<std::size_t>(t.shape()[1] * t.shape()[2] * 4);
    std::ranges::copy(
        t.bytes().subspan(static_cast<std::size_t>(first) * row, static_cast<std::size_t>(count) * row),
        part_of.bytes().begin());
    return part_of;
  };
  std::vector<Capture> few;
  few.push_back({"q", cut(tensors[0].tensor, 61, 9)});
  few.push_back({"k", cut(tensors[1].tensor, 0, 70)});
  few.push_back({"v", cut(tensors[2].tensor, 0, 70)});
  write_file(path("few.safetensors"), few);
  const json same = evaluate({path("few.safetensors"), "--formats", "int8-head"});
  EXPECT_EQ(same["layers"][0]["name"], "q, k, v");
  EXPECT_EQ(same["formats"][0]["layers"][0]["error"], part["formats"][0]["layers"][0]["error"]);
  expect_failure(run({"eval", path("few.safetensors"), "--tokens", "10"}), 2, "use more");
  expect_failure(run({"eval", path("all.safetensors"), "--layers", "3"}), 2, "use 0 to 2");
}

TEST_F(EvalTest, OptionsReachAttention) {
  const std::string file = write_capture(1);
  const auto error = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {file, "--formats", "int4-row"});
    return evaluate(more)["formats"][0]["error_worst"].get<double>();
  };
  const double plain = error({});
  EXPECT_NE(error({"--scale", "0.01"}), plain);
  EXPECT_NE(error({"--softcap", "1"}), plain);
  EXPECT_NE(error({"--window", "5"}), plain);
  EXPECT_EQ(error({"--scale", "0.125"}), plain);  // 1/sqrt(64)
  EXPECT_EQ(error({"--window", "1000"}), plain);
}

TEST_F(EvalTest, TheFileSaysHowALayerAttends) {
  const auto errors = [&](const std::string& attention, std::vector<std::string> more) {
    write_file(path("c.safetensors"), capture(2), {{"attention", attention}});
    more.insert(more.begin(), {path("c.safetensors"), "--formats", "int4-row"});
    const json layers = evaluate(more)["formats"][0]["layers"];
    return std::pair(layers[0]["error"].get<double>(), layers[1]["error"].get<double>());
  };
  const auto plain = errors("{}", {});
  const auto [first, second] =
      errors(R"({"1": {"scaling": 0.01, "softcap": 5, "sliding_window": 6}, "0": {}})", {});
  EXPECT_EQ(first, plain.first);
  EXPECT_EQ(second, errors("{}", {"--scale", "0.01", "--softcap", "5", "--window", "5"}).second);
  EXPECT_NE(second, plain.second);
  // An option that is given counts; what is no description of attention does not.
  EXPECT_EQ(errors(R"({"0": {"sliding_window": 6}})", {"--window", "1000"}), plain);
  for (const char* other :
       {"eager", "[1]", R"({"0": 7, "1": {"scaling": -1, "sliding_window": "6", "softcap": 0}})"}) {
    EXPECT_EQ(errors(other, {}), plain) << other;
  }
}

TEST_F(EvalTest, OutputsThatAreNotFiniteAreTheWorst) {
  // Logits beyond fp32 in one of two layers: the output of that layer is NaN in every format.
  std::vector<Capture> tensors = capture(2, DType::kFloat32);
  for (std::int64_t i = 0; i < tensors[3].tensor.numel(); ++i) {
    tensors[3].tensor.set(i, tensors[3].tensor.get(i) * 5e37F);
  }
  write_file(path("c.safetensors"), tensors);
  const std::vector<std::string> arguments = {path("c.safetensors"), "--formats", "bf16,int8-head,int4-row",
                                              "--max-error", "1e30"};
  const json report = evaluate(arguments);
  for (const json& f : report["formats"]) {
    EXPECT_LT(f["layers"][0]["error"], 1) << f["name"];
    const json& bad = f["layers"][1];
    for (const json& figure :
         {f["error_worst"], f["error_mean"], f["lse_error"], bad["error"], bad["lse_error"]}) {
      EXPECT_EQ(figure, "inf") << f["name"];
    }
    EXPECT_EQ(std::ranges::count(bad["head_error"], json("inf")), kQHeads) << f["name"];
    EXPECT_EQ(f["worst_cosine"], -1);
    EXPECT_EQ(f["pareto"], false);
  }
  EXPECT_TRUE(report["conclusion"]["format"].is_null());
  EXPECT_EQ(report["conclusion"]["per_layer"], json({"int4-row", nullptr}));
  EXPECT_NE(report["conclusion"]["sentence"].get<std::string>().find("holds NaN or infinity"),
            std::string::npos);

  std::vector<std::string> page = arguments;
  page.insert(page.begin(), "eval");
  page.insert(page.end(), {"--html", path("r.html")});
  const Result text = run(page);
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(text.out.find("smallest"), std::string::npos) << text.out;
  EXPECT_EQ(count_of(text.out, " inf  -1.00000"), 3U) << text.out;
  EXPECT_NE(text.out.find("\ninf: an output holds NaN or infinity.\n"), std::string::npos);
  const std::string html = read_text(path("r.html"));
  EXPECT_EQ(html.find("chosen\">"), std::string::npos);
  EXPECT_NE(html.find("int4-row (inf)"), std::string::npos);
  for (const char* coordinate : {"nan", "\"inf", "\"-inf", ",inf", ",-inf", " inf,", " -inf,"}) {
    EXPECT_EQ(html.find(coordinate), std::string::npos) << coordinate;
  }
}

TEST_F(EvalTest, ShippedSampleWhenPresent) {
  const std::string sample = std::string(HALFTONE_SOURCE_DIR) + "/data/llama-tiny-capture.safetensors";
  if (!std::filesystem::exists(sample)) GTEST_SKIP() << "the sample is not in this checkout";
  const json report =
      evaluate({sample, "--formats", "bf16,int8-g32,int8-head,int4-g32", "--max-queries", "128"});
  EXPECT_GE(report["layers"].size(), 2U);
  for (const json& layer : report["layers"]) {
    EXPECT_EQ(layer["head_dim"], 128);
    EXPECT_GE(layer["tokens"], 1024);
    EXPECT_GT(layer["q_heads"], layer["kv_heads"]);
    EXPECT_GT(layer["k_outlier_ratio"], 2);  // real K has outlier channels
  }
  EXPECT_LT(find_format(report, "bf16")["error_worst"], 1e-4);
  EXPECT_LT(find_format(report, "int8-g32")["error_worst"], find_format(report, "int4-g32")["error_worst"]);
}

}  // namespace
}  // namespace halftone::cli
