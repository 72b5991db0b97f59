#include "cli/recipe/recipe.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>

#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 18> kLayerFields = {
    "offset_k", "scale_k",  "k_offset", "k_channel_scale", "layer",    "k_format",
    "rotate_k", "v_format", "rotate_v", "kv_heads",        "head_dim", "v_head_dim",
    "k_scale",  "k_min",    "v_scale",  "v_min",           "error",    "bytes_per_token"};

[[noreturn]] void refuse(const std::string& path, const std::string& sentence) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("recipe '{}': {}", printable(path, 4096), sentence));
}

/// A member of a layer, or the sentence that it is not there or another thing.
template <class Value>
Value member(const Json& layer, const char* name, std::size_t index, const std::string& path) {
  try {
    return layer.at(name).get<Value>();
  } catch (const nlohmann::json::exception&) {
    refuse(path, fmt::format("layers[{}].{} is {}, but must be {}: make the recipe again.", index, name,
                             layer.contains(name) ? printable(layer.at(name).dump(), 40) : "missing",
                             std::is_same_v<Value, bool>          ? "true or false"
                             : std::is_same_v<Value, std::string> ? "a text"
                                                                  : "a number"));
  }
}

int whole_number(const Json& layer, const char* name, std::size_t index, const std::string& path) {
  const auto value = member<double>(layer, name, index, path);
  if (!(value >= 0 && value <= 65536) || value != std::floor(value)) {
    refuse(path,
           fmt::format("layers[{}].{} is {}, but must be a whole number, 0 to 65536: make the recipe again.",
                       index, name, value));
  }
  return static_cast<int>(value);
}

std::vector<float> scales(const Json& layer, const char* name, std::size_t wanted, std::size_t index,
                          const std::string& path) {
  std::vector<float> values;
  const Json list = layer.contains(name) ? layer.at(name) : Json::array();
  bool numbers = list.is_array() && list.size() == wanted;
  for (const Json& x : list) {
    numbers = numbers && x.is_number();
    if (numbers) values.push_back(x.get<float>());
  }
  if (!numbers) {
    refuse(path, fmt::format(
                     "layers[{}].{} must be a list of {} number{}, as its format has: make the recipe again.",
                     index, name, wanted, wanted == 1 ? "" : "s"));
  }
  return values;
}

RecipeLayer parse_layer(const Json& json, std::size_t index, const std::string& path) {
  if (!json.is_object()) refuse(path, fmt::format("layers[{}] is no object: make the recipe again.", index));
  for (const auto& [key, value] : json.items()) {
    if (std::find(kLayerFields.begin(), kLayerFields.end(), key) == kLayerFields.end()) {
      refuse(path, fmt::format(
                       "layers[{}] has '{}', which halftone {} does not know: use the version that made it.",
                       index, printable(key), HALFTONE_VERSION));
    }
  }
  RecipeLayer layer;
  FormatChoice& choice = layer.stored.choice;
  try {
    choice.k = parse_format(member<std::string>(json, "k_format", index, path));
    choice.v = parse_format(member<std::string>(json, "v_format", index, path));
  } catch (const Error& error) {
    if (std::string_view(error.what()).starts_with("recipe ")) throw;
    refuse(path, fmt::format("layers[{}]: {}", index, error.what()));
  }
  choice.rotate_k = member<bool>(json, "rotate_k", index, path);
  choice.rotate_v = member<bool>(json, "rotate_v", index, path);
  const auto treats = [&](const char* name) {
    return json.contains(name) && member<bool>(json, name, index, path);
  };
  const bool offset = treats("offset_k"), scale = treats("scale_k");
  choice.channels = offset || scale;
  choice.name = choice_name(choice.k, choice.rotate_k, choice.v, choice.rotate_v, choice.channels);
  layer.kv_heads = whole_number(json, "kv_heads", index, path);
  layer.head_dim = whole_number(json, "head_dim", index, path);
  layer.v_dim = whole_number(json, "v_head_dim", index, path);
  try {
    page_layout(layer.spec());
  } catch (const Error& error) {
    refuse(path, fmt::format("layers[{}]: {}", index, error.what()));
  }
  const auto count = [&](const KvFormat& f, bool has) -> std::size_t {
    if (!has || !f.static_scale()) return 0;
    return f.granularity == Granularity::kTensor ? 1 : static_cast<std::size_t>(layer.kv_heads);
  };
  const auto channels = static_cast<std::size_t>(layer.kv_heads) * static_cast<std::size_t>(layer.head_dim);
  layer.stored.scales = {scales(json, "k_scale", count(choice.k, true), index, path),
                         scales(json, "k_min", count(choice.k, choice.k.asymmetric), index, path),
                         scales(json, "v_scale", count(choice.v, true), index, path),
                         scales(json, "v_min", count(choice.v, choice.v.asymmetric), index, path),
                         scales(json, "k_offset", offset ? channels : 0, index, path),
                         scales(json, "k_channel_scale", scale ? channels : 0, index, path)};
  if (json.contains("error")) layer.error = member<double>(json, "error", index, path);
  return layer;
}

}  // namespace

KvCacheSpec RecipeLayer::spec(int page_size) const {
  return stored.choice.spec(kv_heads, head_dim, v_dim, page_size);
}

double Recipe::bytes_per_token() const {
  double sum = 0;
  for (const auto& [number, layer] : layers) sum += halftone::bytes_per_token(layer.spec());
  return sum;
}

double Recipe::error() const {
  double squares = 0;
  for (const auto& [number, layer] : layers) squares += layer.error * layer.error;
  return std::sqrt(squares / static_cast<double>(layers.size()));
}

nlohmann::ordered_json to_json(const Recipe& recipe, nlohmann::ordered_json about) {
  Json json = {{"halftone_recipe", kRecipeVersion}};
  json["about"] = std::move(about);
  json["bytes_per_token"] = recipe.bytes_per_token();
  json["error"] = recipe.error();
  json["layers"] = Json::array();
  for (const auto& [number, layer] : recipe.layers) {
    const FormatChoice& choice = layer.stored.choice;
    Json row = {{"layer", number},
                {"k_format", format_name(choice.k)},
                {"rotate_k", choice.rotate_k},
                {"v_format", format_name(choice.v)},
                {"rotate_v", choice.rotate_v},
                {"kv_heads", layer.kv_heads},
                {"head_dim", layer.head_dim},
                {"v_head_dim", layer.v_dim},
                {"bytes_per_token", halftone::bytes_per_token(layer.spec())},
                {"error", layer.error}};
    const StaticScales& s = layer.stored.scales;
    if (!s.k_offset.empty()) row["offset_k"] = true;  // layers without it are as they were
    if (!s.k_channel_scale.empty()) row["scale_k"] = true;
    const std::pair<const char*, const std::vector<float>&> lists[] = {
        {"k_scale", s.k_scale}, {"k_min", s.k_min},       {"v_scale", s.v_scale},
        {"v_min", s.v_min},     {"k_offset", s.k_offset}, {"k_channel_scale", s.k_channel_scale}};
    for (const auto& [name, values] : lists) {
      if (!values.empty()) row[name] = values;
    }
    json["layers"].push_back(std::move(row));
  }
  return json;
}

Recipe parse_recipe(std::string_view text, const std::string& path) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("halftone_recipe")) {
    refuse(path,
           "it is no JSON object with a halftone_recipe: name a file that `halftone recipe --output` wrote.");
  }
  if (json["halftone_recipe"] != kRecipeVersion) {
    refuse(path,
           fmt::format("halftone_recipe is {}, but halftone {} reads version {}: make the recipe again.",
                       printable(json["halftone_recipe"].dump(), 40), HALFTONE_VERSION, kRecipeVersion));
  }
  if (!json.contains("layers") || !json["layers"].is_array() || json["layers"].empty()) {
    refuse(path, "layers is no list with an entry: make the recipe again.");
  }
  Recipe recipe;
  std::size_t index = 0;
  for (const Json& entry : json["layers"]) {
    RecipeLayer layer = parse_layer(entry, index, path);
    const int number = whole_number(entry, "layer", index, path);
    if (!recipe.layers.emplace(number, std::move(layer)).second) {
      refuse(path, fmt::format("layers[{}] is layer {} once more: make the recipe again.", index, number));
    }
    ++index;
  }
  return recipe;
}

Recipe load_recipe(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file) refuse(path, "it cannot be read: name a file that is there.");
  return parse_recipe(text, path);
}

std::vector<int> layer_numbers(const std::vector<CapturedLayer>& layers) {
  std::vector<int> numbers;
  for (const CapturedLayer& layer : layers) {
    const int number = layer.number();
    if (number < 0 || std::find(numbers.begin(), numbers.end(), number) != numbers.end()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("the capture's layer '{}' has {}, but a recipe is for numbered layers: name its "
                      "tensors layers.<i>.q, .k and .v.",
                      printable(layer.label), number < 0 ? "no number" : "the number of another one"));
    }
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<LayerChoice> choices_of(const Recipe& recipe, const std::vector<CapturedLayer>& layers,
                                    const std::string& path) {
  const std::vector<int> numbers = layer_numbers(layers);
  std::vector<LayerChoice> choices;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto found = recipe.layers.find(numbers[i]);
    if (found == recipe.layers.end()) {
      refuse(path,
             fmt::format("it has no layer {}, but the capture has: make it from a capture of all layers.",
                         numbers[i]));
    }
    const RecipeLayer& r = found->second;
    const CapturedLayer& c = layers[i];
    if (r.kv_heads != c.kv_heads || r.head_dim != c.head_dim || r.v_dim != c.v_dim) {
      refuse(path, fmt::format(
                       "layer {} has {} KV heads of {} and {} dims, but in the capture {} of {} and {}: use "
                       "the recipe of this model.",
                       numbers[i], r.kv_heads, r.head_dim, r.v_dim, c.kv_heads, c.head_dim, c.v_dim));
    }
    choices.push_back(r.stored);
  }
  return choices;
}

}  // namespace halftone::cli
