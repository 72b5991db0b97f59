// `halftone recipe`: what it chooses, the file, the page, and its errors.
#include "cli/recipe/recipe.h"

#include <cmath>

#include "cli/recipe/candidates.h"
#include "cli/report/extras.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using nlohmann::json;

class RecipeTest : public CliTest {
 protected:
  static constexpr const char* kFormats = "bf16,int8-head,int8-head:int4-g32,int4-g32+rot,int4-row";

  json recipe(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"recipe", path("capture.safetensors")});
    arguments.insert(arguments.end(), {"--output", "-"});
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    return json::parse(result.out);
  }

  /// What `halftone eval` measures of every format in every layer: bytes and error.
  std::vector<std::vector<std::pair<double, double>>> measured(int layers) {
    const Result result = run({"eval", path("capture.safetensors"), "--formats", kFormats, "--json", "-"});
    EXPECT_EQ(result.code, 0) << result.err;
    const json report = json::parse(result.out);
    std::vector<std::vector<std::pair<double, double>>> found(static_cast<std::size_t>(layers));
    for (const json& f : report["formats"]) {
      for (std::size_t l = 0; l < found.size(); ++l) {
        found[l].emplace_back(f["layers"][l]["bytes_per_token"], f["layers"][l]["error"]);
      }
    }
    return found;
  }

  /// The layers of a capture of one hard layer (outliers in K) and easy ones.
  void write_uneven_capture(int layers) {
    reference::Random random(3);
    std::vector<Capture> tensors = capture(layers, DType::kFloat32);
    for (int i = 1; i < layers; ++i) {
      tensors[static_cast<std::size_t>(3 * i + 1)].tensor =
          activations(random, reference::Data::kNormal, DType::kFloat32, kTokens, kKvHeads, kDim);
    }
    write_file(path("capture.safetensors"), tensors);
  }

  std::string write_text_file(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
    return path(name);
  }
};

TEST_F(RecipeTest, IsTheBestOfAllCombinations) {
  write_uneven_capture(3);
  const auto each = measured(3);
  struct Mixture {
    double bytes, squares;
  };
  std::vector<Mixture> all = {{0, 0}};
  for (const auto& layer : each) {
    std::vector<Mixture> next;
    for (const Mixture& m : all) {
      for (const auto& [bytes, error] : layer) next.push_back({m.bytes + bytes, m.squares + error * error});
    }
    all = std::move(next);
  }
  ASSERT_EQ(all.size(), 125U);
  for (const double budget : {450.0, 600.0, 777.0, 900.0, 1400.0}) {
    double best = 1e30;
    for (const Mixture& m : all) {
      if (m.bytes <= budget) best = std::min(best, m.squares);
    }
    const json r = recipe({"--formats", kFormats, "--bytes-per-token", std::to_string(budget)});
    EXPECT_LE(r["bytes_per_token"], budget);
    EXPECT_NEAR(r["error"].get<double>(), std::sqrt(best / 3), 1e-6 * std::sqrt(best)) << budget;
  }
  for (const std::string limit : {"1%", "0.05", "9%", "30%"}) {
    const double error = limit.ends_with('%') ? std::stod(limit) / 100 : std::stod(limit);
    double fewest = 1e30;
    for (const Mixture& m : all) {
      if (std::sqrt(m.squares / 3) <= error) fewest = std::min(fewest, m.bytes);
    }
    const json r = recipe({"--formats", kFormats, "--error", limit});
    EXPECT_EQ(r["bytes_per_token"], fewest) << limit;
    EXPECT_LE(r["error"], error);
  }
}

TEST_F(RecipeTest, TheFileSaysAllOfEveryLayer) {
  write_uneven_capture(2);
  const std::string file = path("recipe.json");
  const Result result = run({"recipe", path("capture.safetensors"), "--error", "2%", "--output", file});
  ASSERT_EQ(result.code, 0) << result.err;
  const std::size_t said = result.out.find("\nThe recipe takes");
  ASSERT_NE(said, std::string::npos);
  std::istringstream lines(result.out.substr(said));
  for (std::string line; std::getline(lines, line) && line.find("Wrote") != 0;)
    EXPECT_LE(line.size(), 110U) << line;
  EXPECT_NE(result.out.find("Wrote " + file), std::string::npos);
  const json r = json::parse(read_text(file));
  EXPECT_EQ(r["halftone_recipe"], kRecipeVersion);
  EXPECT_EQ(r["about"]["asked_error"], 0.02);
  const Recipe read = load_recipe(file);
  ASSERT_EQ(read.layers.size(), 2U);
  EXPECT_EQ(read.bytes_per_token(), r["bytes_per_token"]);
  EXPECT_EQ(read.error(), r["error"]);
  for (const auto& [number, layer] : read.layers) {
    const json& row = r["layers"][static_cast<std::size_t>(number)];
    EXPECT_EQ(row["layer"], number);
    EXPECT_EQ(row["k_format"], format_name(layer.stored.choice.k));
    EXPECT_EQ(row["rotate_v"], layer.stored.choice.rotate_v);
    EXPECT_EQ(layer.spec().head_dim, kDim);
    EXPECT_EQ(bytes_per_token(layer.spec()), row["bytes_per_token"]);
  }
  EXPECT_EQ(json::parse(to_json(read, {}).dump())["layers"], r["layers"]);
}

TEST_F(RecipeTest, StaticScalesAreInTheFile) {
  write_uneven_capture(2);
  const std::string file = path("recipe.json");
  const Result made = run({"recipe", path("capture.safetensors"), "--formats",
                           "int8-static-head-asym:int8-tensor", "--error", "90%", "--output", file});
  ASSERT_EQ(made.code, 0) << made.err;
  const Recipe read = load_recipe(file);
  const StaticScales& scales = read.layers.at(0).stored.scales;
  EXPECT_EQ(scales.k_scale.size(), static_cast<std::size_t>(kKvHeads));
  EXPECT_EQ(scales.k_min.size(), static_cast<std::size_t>(kKvHeads));
  EXPECT_EQ(scales.v_scale.size(), 1U);
  EXPECT_TRUE(scales.v_min.empty());

  // Ten times the scale are ten times the steps: eval uses those of the file.
  json r = json::parse(read_text(file));
  for (json& layer : r["layers"]) layer["v_scale"][0] = 10 * layer["v_scale"][0].get<double>();
  const std::string worse = write_text_file("worse.json", r.dump());
  const auto error = [&](const std::string& recipe_file) {
    const Result result = run(
        {"eval", path("capture.safetensors"), "--formats", "bf16", "--recipe", recipe_file, "--json", "-"});
    EXPECT_EQ(result.code, 0) << result.err;
    return json::parse(result.out)["recipe"]["error"].get<double>();
  };
  EXPECT_NEAR(error(file), r["error"].get<double>(), 1e-9);
  EXPECT_GT(error(worse), 3 * error(file));
}

TEST_F(RecipeTest, EvalMeasuresARecipeOnAnotherCapture) {
  write_uneven_capture(2);
  const std::string file = path("recipe.json");
  ASSERT_EQ(run({"recipe", path("capture.safetensors"), "--bytes-per-token", "350", "--output", file}).code,
            0);
  const Recipe read = load_recipe(file);
  write_file(path("other.safetensors"), capture(1, DType::kFloat32));
  const Result result =
      run({"eval", path("other.safetensors"), "--formats", "bf16," + read.layers.at(0).stored.choice.name,
           "--recipe", file, "--json", "-"});
  ASSERT_EQ(result.code, 0) << result.err;
  const json report = json::parse(result.out);
  for (const json& f : report["formats"]) {
    if (f["name"] == read.layers.at(0).stored.choice.name) {
      EXPECT_EQ(report["recipe"]["layers"][0]["error"], f["layers"][0]["error"]);
    }
  }
  const Result text = run({"eval", path("other.safetensors"), "--formats", "bf16", "--recipe", file});
  EXPECT_NE(text.out.find("The capture lacks 1 of its layers"), std::string::npos) << text.out;
}

TEST_F(RecipeTest, CandidatesHaveKernelsAndComputedScales) {
  CapturedLayer layer;
  layer.kv_heads = 2;
  layer.head_dim = layer.v_dim = 128;
  std::vector<std::string> names;
  for (const FormatChoice& c : recipe_choices({layer}, false)) {
    names.push_back(c.name);
    EXPECT_FALSE(c.k.static_scale() || c.v.static_scale()) << c.name;
  }
  const auto has = [&](const char* name) { return std::count(names.begin(), names.end(), name); };
  for (const char* name : {"bf16", "int8-head", "int8-head+rot", "int8-head+rot:int4-g32", "bf16:int8-head",
                           "int4-g32+rot", "fp8-token-head"}) {
    EXPECT_EQ(has(name), 1) << name;
  }
  for (const char* name : {"fp16", "int4-g32:int8-head", "int4-g128", "int8-tensor", "bf16+rot"}) {
    EXPECT_EQ(has(name), 0) << name;
  }
  CapturedLayer other = layer;
  other.v_dim = 64;
  EXPECT_FALSE(recipe_choices({other}, false).empty());
  const std::vector<FormatChoice> half = recipe_choices({layer}, true);
  EXPECT_EQ(half.front().name, "fp16");
}

TEST_F(RecipeTest, LimitsThatCannotBeMetNameTheNearest) {
  write_uneven_capture(2);
  const std::string file = path("capture.safetensors"), out = path("recipe.json");
  const auto fails = [&](std::vector<std::string> more, int code, const std::string& piece) {
    more.insert(more.begin(), {"recipe", file});
    more.insert(more.end(), {"--output", out});
    expect_failure(run(more), code, piece);
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  fails({"--formats", "bf16,int4-row", "--bytes-per-token", "200"}, 2,
        "--bytes-per-token is 200, but the smallest recipe for 2 layers takes 288");
  fails({"--formats", "int8-head,int4-row", "--error", "1e-6"}, 2, "but the most exact recipe has ");
  fails({"--error", "2%", "--formats", "int9"}, 2, "--formats is 'int9'");
  fails({"--error", "2%", "--formats", "int8-g128"}, 1, "128");
  fails({}, 2, "one of --bytes-per-token and --error is needed");
  fails({"--error", "2%", "--bytes-per-token", "300"}, 2, "only one");
  fails({"--error", "two"}, 2, "--error is 'two', but must be a number above 0: write it as 2% or 0.02.");
  for (const char* error : {"2", "200%"}) {
    fails({"--error", error}, 2, "which is 200%, but must be below 100%: write it as 2% or 0.02.");
  }
  fails({"--error", "-1%"}, 2, "--error is '-1%'");
  fails({"--error", "2%", "--memory", "80 apples"}, 2, "--memory is '80 apples'");
  fails({"--error", "2%", "--model-layers", "1"}, 2, "--model-layers is 1, but the capture has 2");
}

TEST_F(RecipeTest, CapturesThatAreNoCaptures) {
  std::vector<Capture> tensors = capture(1);
  tensors.erase(tensors.begin());
  write_file(path("no-q.safetensors"), tensors);
  expect_failure(run({"recipe", path("no-q.safetensors"), "--error", "2%"}), 1, "it lacks 'layers.0.q'");
  std::vector<Capture> named = capture(1);
  for (Capture& c : named) c.name = "first." + c.name.substr(c.name.size() - 1);
  write_file(path("named.safetensors"), named);
  expect_failure(run({"recipe", path("named.safetensors"), "--error", "2%"}), 1,
                 "layer 'first' has no number");
}

TEST_F(RecipeTest, FilesThatAreNoRecipes) {
  write_uneven_capture(1);
  const Result made = run(
      {"recipe", path("capture.safetensors"), "--formats", "int8-tensor", "--error", "90%", "--output", "-"});
  ASSERT_EQ(made.code, 0) << made.err;
  const json good = json::parse(made.out);
  const auto refused = [&](const json& file, const std::string& piece) {
    const std::string name = write_text_file("bad.json", file.dump());
    expect_failure(run({"eval", path("capture.safetensors"), "--recipe", name}), 1, piece);
  };
  const auto changed = [&](const char* field, const json& value) {
    json file = good;
    file["layers"][0][field] = value;
    return file;
  };
  refused(json::array(), "it is no JSON object with a halftone_recipe");
  json newer = good;
  newer["halftone_recipe"] = 2;
  refused(newer, "halftone_recipe is 2, but halftone");
  json twice = good;
  twice["layers"].push_back(good["layers"][0]);
  refused(twice, "is layer 0 once more");
  json empty = good;
  empty["layers"] = json::array();
  refused(empty, "layers is no list with an entry");
  refused(changed("k_format", "int9"), "layers[0]: ");
  refused(changed("k_format", 8), "layers[0].k_format is 8, but must be a text");
  refused(changed("rotate_k", 1), "layers[0].rotate_k is 1, but must be true or false");
  refused(changed("kv_heads", 1.5), "layers[0].kv_heads is 1.5, but must be a whole number");
  refused(changed("kv_heads", 1),
          "layer 0 has 1 KV heads of 64 and 64 dims, but in the capture 2 of 64 and 64");
  refused(changed("head_dim", 65), "layers[0]: head_dim is 65");
  refused(changed("layer", 7), "it has no layer 0, but the capture has");
  refused(changed("k_bias", 1), "layers[0] has 'k_bias', which halftone");
  refused(changed("k_scale", json::array()), "layers[0].k_scale must be a list of 1 number");
  refused(changed("v_min", {1.0}), "layers[0].v_min must be a list of 0 numbers");
  expect_failure(run({"eval", path("capture.safetensors"), "--recipe", path("none.json")}), 1,
                 "cannot be read");
}

TEST_F(RecipeTest, ThePageShowsTheRecipeAndWhatWasMeasured) {
  write_uneven_capture(2);
  const json row = {{"suite", "decode"},       {"format_k", "int8-head"},
                    {"format_v", "int8-head"}, {"rotate_k", true},
                    {"rotate_v", true},        {"batch", 8},
                    {"context", 4096},         {"q_len", 1},
                    {"q_heads", kQHeads},      {"kv_heads", kKvHeads},
                    {"head_dim", kDim},        {"us", 12.5}};
  json bench = {{"device", {{"type", "cuda"}, {"name", "A <GPU>"}}}, {"rows", {row}}};
  write_text_file("bench.json", bench.dump());
  write_text_file("quality.json",
                  json({{"model", "m"},
                        {"text", "t.txt"},
                        {"tokens", 512},
                        {"perplexity", 7.25},
                        {"rows", {{{"name", "recipe"}, {"kl", 0.0125}, {"perplexity", 7.375}}}}})
                      .dump());
  const std::vector<std::string> arguments = {"recipe",    path("capture.safetensors"),
                                              "--error",   "2%",
                                              "--formats", "int8-head+rot",
                                              "--html",    path("r.html"),
                                              "--memory",  "80GB",
                                              "--bench",   path("bench.json"),
                                              "--quality", path("quality.json")};
  const Result result = run(arguments);
  ASSERT_EQ(result.code, 0) << result.err;
  const std::string html = read_text(path("r.html"));
  const double bytes = 2 * bytes_per_token(parse_choice("int8-head+rot", "").spec(kKvHeads, kDim, kDim, 64));
  for (const std::string& piece :
       {std::string("<h2>The recipe</h2>"), std::string("Bytes per token of every layer of the recipe"),
        std::string("recipe: "), human_count(80e9 / bytes) + " tokens", std::string("fit into 80GB"),
        human_bytes(1e6 * bytes), std::string("for 1M tokens"), std::string("25.0 us"),
        std::string("8 requests of 4096 keys on A &lt;GPU&gt;"), std::string("0.0125"), std::string("7.375"),
        std::string("7.250")}) {
    EXPECT_NE(html.find(piece), std::string::npos) << piece;
  }
  bench["rows"][0]["head_dim"] = 128;
  write_text_file("bench.json", bench.dump());
  expect_failure(run(arguments), 1,
                 "it has no decode of one query with 4 query heads, 2 KV heads and head_dim 64");
  write_text_file("bench.json", "[]");
  expect_failure(run(arguments), 1, "it is no JSON object with rows");
}

TEST_F(RecipeTest, SizesOfMemory) {
  EXPECT_EQ(parse_memory("80GB", "--memory"), 80e9);
  EXPECT_EQ(parse_memory("1.5GiB", "--memory"), 1.5 * 1024 * 1024 * 1024);
  EXPECT_EQ(parse_memory("500M", "--memory"), 500e6);
  for (const char* bad : {"0GB", "GB", "1..5GB", "80 GB", "1e3GB"}) {
    EXPECT_THROW(parse_memory(bad, "--memory"), UsageError) << bad;
  }
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(76923076), "76.9 M");
  EXPECT_EQ(human_count(1234), "1.23 k");
}

}  // namespace
}  // namespace halftone::cli
