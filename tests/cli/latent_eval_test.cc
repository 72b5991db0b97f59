// `halftone eval --latent`: the figures against an independent computation, what is generated, what is
// refused.
#include <algorithm>
#include <cmath>

#include "cli/terminal/text.h"
#include "halftone/cache.h"
#include "reference/cache.h"
#include "reference/oracle.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using nlohmann::json;
using reference::Data;
using reference::Tensor;

constexpr int kHeads = 3;

const json& find(const json& formats, const std::string& name) {
  for (const json& f : formats) {
    if (f.at("name") == name) return f;
  }
  throw std::runtime_error("no format " + name);
}

/// What a format must cost, from the codes in the pages and the oracle.
struct Expected {
  double k_snr = 0, v_snr = 0, error = 0, ordinary_error = 0, cosine = 1, lse = 0;
};

double decibels(const std::vector<float>& x, const std::vector<double>& y) {
  double signal = 0, noise = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    signal += double{x[i]} * x[i];
    noise += (x[i] - y[i]) * (x[i] - y[i]);
  }
  return 10 * std::log10(signal / noise);
}

/// The first `count` dims of each token.
template <class T>
std::vector<T> first_dims(const std::vector<T>& k, int dim, int count) {
  std::vector<T> v;
  for (auto token = k.begin(); token != k.end(); token += dim) v.insert(v.end(), token, token + count);
  return v;
}

Expected expect_figures(const Tensor& q, const Tensor& k, const KvCacheSpec& spec, const json& outliers) {
  const int tokens = static_cast<int>(k.shape()[0]);
  reference::Random random(3);
  reference::Cache cache(spec, std::vector<int>{tokens}, random);
  const std::vector<float> qf = q.to_floats(), kf = k.to_floats();
  const std::vector<float> vf = first_dims(kf, spec.head_dim, spec.v_dim());
  cache.append(std::vector<int>{tokens}, k, Tensor::of(k.dtype(), {tokens, 1, spec.v_dim()}, vf));
  const reference::ExactValues stored = exact_values(cache);
  reference::OracleParams params;
  params.q_len = q.shape()[0];
  params.kv_len = tokens;
  params.q_heads = kHeads;
  params.head_dim = spec.head_dim;
  params.v_head_dim = spec.v_dim();
  params.causal = true;
  const std::vector<double> qd(qf.begin(), qf.end());
  const reference::OracleResult truth = attention_oracle(params, qf.data(), kf.data(), vf.data());
  const reference::OracleResult got = attention_oracle(params, qd.data(), stored.k.data(), stored.v.data());
  Expected e;
  e.k_snr = decibels(kf, stored.k);
  e.v_snr = decibels(vf, stored.v);
  double signal = 0, noise = 0, ordinary_signal = 0, ordinary_noise = 0;
  const auto dim = static_cast<std::size_t>(spec.v_dim());
  for (std::size_t row = 0; row < truth.lse.size(); ++row) {
    double tt = 0, gg = 0, tg = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const double t = truth.out[row * dim + d], g = got.out[row * dim + d];
      tt += t * t, gg += g * g, tg += t * g;
      noise += (t - g) * (t - g);
      if (std::find(outliers.begin(), outliers.end(), d) != outliers.end()) continue;
      ordinary_signal += t * t;
      ordinary_noise += (t - g) * (t - g);
    }
    signal += tt;
    e.cosine = std::min(e.cosine, tg / std::sqrt(tt * gg));
    e.lse = std::max(e.lse, std::fabs(truth.lse[row] - got.lse[row]));
  }
  e.error = std::sqrt(noise / signal);
  e.ordinary_error = std::sqrt(ordinary_noise / ordinary_signal);
  return e;
}

class LatentEvalTest : public CliTest {
 protected:
  json evaluate(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"eval", "--latent"});
    arguments.insert(arguments.end(), {"--json", "-"});
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    return json::parse(result.out);
  }

  /// q of the last 20 of 70 tokens and k with outlier channels, of `dims.size()` layers.
  static std::vector<Capture> latents(const std::vector<int>& dims, DType dtype = DType::kFloat32) {
    reference::Random random(11);
    std::vector<Capture> tensors;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      tensors.push_back({prefix + "q", activations(random, Data::kNormal, dtype, 20, kHeads, dims[i])});
      tensors.push_back({prefix + "k", activations(random, Data::kOutlierChannels, dtype, 70, 1, dims[i])});
    }
    return tensors;
  }

  std::string write(const std::vector<Capture>& tensors,
                    const std::map<std::string, std::string>& metadata = {}) {
    write_file(path("latents.safetensors"), tensors, metadata);
    return path("latents.safetensors");
  }
};

TEST_F(LatentEvalTest, FiguresMatchAnIndependentComputation) {
  const std::vector<Capture> tensors = latents({576, 512, 288});
  const std::vector<KvCacheSpec> specs = {KvCacheSpec::latent({}), KvCacheSpec::latent({}, 448, 64, 64, true),
                                          KvCacheSpec::latent({}, 256, 32)};
  const json report = evaluate({write(tensors), "--page-size", "16"});
  ASSERT_EQ(report["layers"].size(), specs.size());
  int compared = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const json& layer = report["layers"][i];
    EXPECT_EQ(layer["name"], "layers." + std::to_string(i));
    EXPECT_EQ(layer["tokens"], 70);
    EXPECT_EQ(layer["queries"], 20);
    EXPECT_EQ(layer["q_heads"], kHeads);
    EXPECT_EQ(layer["head_dim"], specs[i].head_dim);
    EXPECT_EQ(layer["rope_dim"], specs[i].rope_dim);
    EXPECT_EQ(layer["v_head_dim"], specs[i].v_dim());
    EXPECT_GT(layer["outliers"].size(), 0U);
    for (const json& got : layer["formats"]) {
      const std::string name = got["name"];
      SCOPED_TRACE(name + ", layer " + std::to_string(i));
      KvCacheSpec spec = specs[i];
      spec.k_format = spec.v_format = parse_format(name);
      const Expected e =
          expect_figures(tensors[2 * i].tensor, tensors[2 * i + 1].tensor, spec, layer["outliers"]);
      EXPECT_NEAR(got["error"], e.error, 1e-3 * e.error);
      EXPECT_NEAR(got["ordinary_error"], e.ordinary_error, 1e-3 * e.ordinary_error);
      EXPECT_NEAR(got["worst_cosine"], e.cosine, 1e-5);
      EXPECT_NEAR(got["lse_error"], e.lse, 1e-4 + 1e-3 * e.lse);
      EXPECT_NEAR(got["k_snr_db"], e.k_snr, 1e-5 * e.k_snr);
      EXPECT_NEAR(got["v_snr_db"], e.v_snr, 1e-5 * e.v_snr);
      ++compared;
    }
  }
  EXPECT_EQ(compared, 5 + 4 + 5);
  EXPECT_EQ(report["skipped"], json({"fp8-g128-f32 with 448 + 64 dims"}));
}

TEST_F(LatentEvalTest, GeneratedLatentsWithAndWithoutOutliers) {
  const std::vector<std::string> small = {"--tokens", "256", "--max-queries", "4"};
  const json report = evaluate(small);
  EXPECT_TRUE(report["file"].is_null());
  EXPECT_EQ(report["seed"], 1);
  ASSERT_EQ(report["layers"].size(), 4U);
  const json &normal = report["layers"][0], &outliers = report["layers"][2];
  EXPECT_EQ(normal["name"], "normal");
  EXPECT_EQ(outliers["name"], "outliers");
  EXPECT_EQ(normal["head_dim"], 576);
  EXPECT_EQ(report["layers"][1]["head_dim"], 512);
  EXPECT_EQ(report["layers"][3]["v_head_dim"], 512);
  EXPECT_EQ(normal["tokens"], 256);
  EXPECT_EQ(normal["queries"], 4);
  EXPECT_EQ(normal["outliers"].size(), 0U);
  EXPECT_GT(outliers["outliers"].size(), 6U);
  EXPECT_LT(outliers["outliers"].size(), 40U);
  const std::map<std::string, double> bytes = {
      {"bf16", 1152}, {"fp8-g128-f32", 656}, {"int8-g64", 656}, {"int4-g64", 416}};
  for (const auto& [name, expected] : bytes) {
    EXPECT_EQ(find(normal["formats"], name)["bytes_per_token"], expected) << name;
    EXPECT_DOUBLE_EQ(find(normal["formats"], name)["compression"], 1152 / expected) << name;
  }
  // Tokens of 584 bytes; pages are whole multiples of 576.
  EXPECT_EQ(find(report["layers"][1]["formats"], "fp8-g64-e8m0")["bytes_per_token"], 576 * 65 / 64.0);
  const auto error = [](const json& layer, const char* name, const char* key = "error") {
    return find(layer["formats"], name)[key].get<double>();
  };
  for (const char* name : {"bf16", "fp8-g128-f32", "fp8-g64-e8m0", "int8-g64", "int4-g64"}) {
    EXPECT_DOUBLE_EQ(error(normal, name), error(normal, name, "ordinary_error")) << name;
    EXPECT_GT(error(outliers, name, "ordinary_error"), 5 * error(outliers, name)) << name;
  }
  EXPECT_LT(error(normal, "bf16"), 0.004);
  EXPECT_LT(2 * error(normal, "bf16"), error(normal, "int8-g64"));
  EXPECT_LT(2 * error(normal, "int8-g64"), error(normal, "fp8-g128-f32"));
  EXPECT_LT(2 * error(normal, "fp8-g128-f32"), error(normal, "int4-g64"));
  // The seed is fixed.
  const json again = evaluate(small);
  EXPECT_EQ(again["layers"], report["layers"]);
}

TEST_F(LatentEvalTest, TheTableSaysWhatTheJsonSays) {
  const Result text = run({"eval", "--latent", "--tokens", "64", "--max-queries", "2", "--formats",
                           "int8-g64,fp8-g128-f32", "--json", path("r.json")});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("generated latents, seed 1: 64 tokens, 2 queries, 16 query heads"),
            std::string::npos)
      << text.out;
  EXPECT_EQ(count_of(text.out, "\nnormal "), 3U);
  EXPECT_EQ(count_of(text.out, "\noutliers "), 3U);
  EXPECT_NE(text.out.find("448 + 64  int8-g64"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("Left out, because they do not fit: fp8-g128-f32 with 448 + 64 dims."),
            std::string::npos)
      << text.out;
  const json report = json::parse(read_text(path("r.json")));
  for (const json& layer : report["layers"]) {
    for (const json& f : layer["formats"])
      EXPECT_NE(text.out.find(percent(f["error"].get<double>())), std::string::npos) << f;
  }
}

TEST_F(LatentEvalTest, OptionsAndTheFileSayWhatAttentionIs) {
  const std::string file = write(latents({576, 576}), {{"attention", R"({"1": {"scaling": 0.1}})"}});
  const json report = evaluate({file, "--formats", "int8-g64"});
  EXPECT_EQ(report["layers"][0]["scale"], 0);
  EXPECT_NEAR(report["layers"][1]["scale"], 0.1, 1e-7);
  const json second = evaluate({file, "--formats", "int8-g64", "--layers", "1"});
  ASSERT_EQ(second["layers"].size(), 1U);
  EXPECT_EQ(second["layers"][0], report["layers"][1]);
  const json scaled = evaluate({file, "--formats", "int8-g64", "--scale", "0.01", "--max-queries", "3"});
  EXPECT_EQ(scaled["layers"][1]["queries"], 3);
  EXPECT_NE(scaled["layers"][0]["formats"][0]["error"], report["layers"][0]["formats"][0]["error"]);
}

TEST_F(LatentEvalTest, BadInputIsRefused) {
  expect_failure(run({"eval"}), 2, "file is missing");
  expect_failure(run({"eval", "--latent", "--html", "r.html"}), 2, "--html is 'r.html', but --latent prints");
  expect_failure(run({"eval", "--latent", "--per-layer"}), 2, "--per-layer");
  expect_failure(run({"eval", "--latent", "--arithmetic", "fp8"}), 2, "--arithmetic is 'fp8'");
  expect_failure(run({"eval", "--latent", "--layers", "1"}), 2,
                 "--layers is '1', but --latent without a file");
  for (const char* format : {"int8-g64+rot", "int8-g64+chan", "int8-g64:int4-g64"}) {
    expect_failure(run({"eval", "--latent", "--formats", format}), 2,
                   "but a latent has one format, without +rot and +chan: use int8-g64");
  }
  expect_failure(run({"eval", "--latent", "--formats", "int8-tensor"}), 1, "k_format is int8-tensor");
  expect_failure(run({"eval", "--latent", "--page-size", "48"}), 2, "--page-size is 48");
  expect_failure(run({"eval", "--latent", path("absent.safetensors")}), 1, "absent.safetensors");
  const auto eval_of = [&](const std::vector<Capture>& tensors, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"eval", "--latent", write(tensors)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  expect_failure(eval_of(latents({128})), 1, "'layers.0.k' has shape [70, 1, 128], but a latent has 1 head");
  std::vector<Capture> wide = latents({576});
  reference::Random random(1);
  wide[1].tensor = activations(random, Data::kNormal, DType::kFloat32, 70, 3, 576);
  expect_failure(eval_of(wide), 1, "has shape [70, 3, 576], but a latent has 1 head");
  std::vector<Capture> lonely = latents({576});
  lonely.pop_back();
  expect_failure(eval_of(lonely), 1, "lacks 'layers.0.k': save q and k of every layer");
  expect_failure(eval_of(latents({512}), {"--formats", "fp8-g128-f32"}), 1, "448");
  std::vector<Capture> broken = latents({576});
  broken[1].tensor.set(576 * 5, std::nanf(""));
  expect_failure(eval_of(broken), 1, "tensor 'layers.0.k' holds nan at token 5");
  expect_failure(eval_of(latents({576}), {"--json", path("latents.safetensors")}), 2, "--json");
}

}  // namespace
}  // namespace halftone::cli
