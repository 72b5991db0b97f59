// `+chan`: offset and scale of K's channels as the command names, measures, chooses and stores them.
#include <algorithm>
#include <cmath>

#include "cli/files/packed.h"
#include "cli/options/format_choice.h"
#include "cli/recipe/recipe.h"
#include "cli/terminal/terminal.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using nlohmann::json;

class ChannelsCliTest : public CliTest {
 protected:
  /// One layer whose K has outlier channels of a fixed sign.
  std::string write_capture() const { return CliTest::write_capture(1, DType::kFloat32); }
  /// K of layer 0, f32.
  static std::vector<float> keys_in(const std::string& name) {
    const SafetensorsReader file(name);
    const TensorInfo* k = file.find("layers.0.k");
    std::vector<float> values(static_cast<std::size_t>(kTokens * kKvHeads * kDim));
    file.read(*k, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }
  json evaluate(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "eval");
    arguments.insert(arguments.end(), {"--json", "-"});
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    return json::parse(result.out);
  }
};

TEST_F(ChannelsCliTest, NamesRoundTrip) {
  for (const char* name :
       {"int4-row+chan", "int8-head+chan+rot", "int8-head+chan:int4-g32", "int4-g32+chan+rot:bf16"}) {
    const FormatChoice choice = parse_choice(name, "--formats");
    EXPECT_TRUE(choice.channels);
    EXPECT_EQ(choice.name, name);
    const KvCacheSpec spec = choice.spec(2, 128, 128, 64);
    EXPECT_TRUE(spec.offset_k && spec.scale_k);
  }
  EXPECT_EQ(parse_choice("int4-row+rot+chan", "x").name, "int4-row+chan+rot");
  EXPECT_THROW((void)parse_choice("int8-head:int8-head+chan", "--formats"), UsageError);
  EXPECT_THROW((void)parse_choice("int8-head+chan+chan", "--formats"), UsageError);
  expect_failure(run({"eval", write_capture(), "--formats", "bf16+chan"}), 1, "k_format is bf16");
}

TEST_F(ChannelsCliTest, TheyLowerTheErrorOfOutlierChannels) {
  const json report = evaluate({write_capture(), "--formats", "int4-row:bf16,int4-row+chan:bf16"});
  const json& formats = report["formats"];
  ASSERT_EQ(formats.size(), 2U);
  EXPECT_EQ(formats[0]["name"], "int4-row+chan:bf16");  // as many bytes, and more exact
  EXPECT_EQ(formats[0]["bytes_per_token"], formats[1]["bytes_per_token"]);
  EXPECT_TRUE(formats[0]["channels"]);
  EXPECT_LT(formats[0]["error_worst"], 0.3 * formats[1]["error_worst"].get<double>());
}

TEST_F(ChannelsCliTest, ASoftcapLeavesTheScale) {
  const json report = evaluate({write_capture(), "--formats", "int4-row+chan:bf16", "--softcap", "30"});
  EXPECT_GT(report["formats"][0]["error_worst"], 0);
}

TEST_F(ChannelsCliTest, ARecipeHasTheValues) {
  const std::string file = path("recipe.json"), source = write_capture();
  ASSERT_EQ(run({"recipe", source, "--bytes-per-token", "400", "--output", file}).code, 0);
  json recipe = json::parse(read_text(file));
  EXPECT_TRUE(recipe["layers"][0]["offset_k"]) << recipe.dump();  // chosen among all candidates
  ASSERT_EQ(run({"recipe", source, "--formats", "int4-row+chan", "--error", "90%", "--output", file}).code,
            0);
  recipe = json::parse(read_text(file));
  ASSERT_EQ(recipe["layers"][0]["k_offset"].size(), static_cast<std::size_t>(kKvHeads * kDim));
  const RecipeLayer layer = load_recipe(file).layers.at(0);
  EXPECT_TRUE(layer.stored.choice.channels);
  EXPECT_EQ(layer.stored.choice.name, "int4-row+chan");
  const auto error = [&] {
    return evaluate({source, "--formats", "bf16", "--recipe", file})["recipe"]["error"].get<double>();
  };
  const double before = error();
  EXPECT_NEAR(before, recipe["layers"][0]["error"], 1e-9);
  for (json& x : recipe["layers"][0]["k_offset"]) x = 0;  // eval takes those of the file
  std::ofstream(file) << recipe.dump();
  EXPECT_GT(error(), 1.5 * before);
  recipe["layers"][0]["k_offset"].erase(0);
  std::ofstream(file) << recipe.dump();
  expect_failure(run({"eval", source, "--recipe", file}), 1, "layers[0].k_offset must be a list of");
}

TEST_F(ChannelsCliTest, PackedCachesKeepThem) {
  const std::string packed = path("packed.safetensors");
  expect_failure(
      run({"quantize", write_capture(), packed, "--format", "int8-head", "--v-format", "int8-head+chan"}), 2,
      "only K has +chan");
  const Result result = run({"quantize", write_capture(), packed, "--format", "int4-row+chan:bf16"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("int4-row+chan:bf16"), std::string::npos);
  const SafetensorsReader file(packed);
  const KvCacheSpec spec = spec_from_json(file.metadata().at("layers.0.spec"), "test");
  EXPECT_TRUE(spec.offset_k && spec.scale_k);
  EXPECT_EQ(file.find("layers.0.k_offset")->shape, (std::vector<std::int64_t>{kKvHeads, kDim}));
  EXPECT_EQ(file.find("layers.0.k_channel_scale")->shape, (std::vector<std::int64_t>{kKvHeads, kDim}));
  const auto error_of = [&](const char* format) {
    EXPECT_EQ(run({"quantize", path("capture.safetensors"), packed, "--format", format}).code, 0);
    EXPECT_EQ(run({"dequantize", packed, path("out.safetensors"), "--dtype", "f32"}).code, 0);
    const std::vector<float> a = keys_in(path("out.safetensors")), b = keys_in(path("capture.safetensors"));
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      sum += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    return std::sqrt(sum);
  };
  EXPECT_LT(error_of("int4-row+chan"), 0.3 * error_of("int4-row"));
}

}  // namespace
}  // namespace halftone::cli
