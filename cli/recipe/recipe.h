// A recipe: how each layer of a model stores its keys and values. The file is described in docs/recipe.md.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "cli/eval/evaluate.h"

namespace halftone::cli {

/// What the key "halftone_recipe" of the file says; a reader refuses any other.
inline constexpr int kRecipeVersion = 1;

struct RecipeLayer {
  LayerChoice stored;
  int kv_heads = 0, head_dim = 0, v_dim = 0;
  double error = 0;  ///< relative output error, as measured when the recipe was made

  KvCacheSpec spec(int page_size = 64) const;
};

struct Recipe {
  std::map<int, RecipeLayer> layers;  ///< by their numbers in the model

  /// Bytes of a token in all layers, K and V, scales included.
  double bytes_per_token() const;
  /// Root mean square of the layers' errors.
  double error() const;
};

/// The file's contents; `about` says what else is worth knowing and goes first.
nlohmann::ordered_json to_json(const Recipe& recipe, nlohmann::ordered_json about);

/// Reads what to_json() wrote. Throws InvalidArgument naming `path` and what is wrong with it. A field of a
/// layer that this version does not know is refused: what it asks for would be missing.
Recipe parse_recipe(std::string_view text, const std::string& path);
Recipe load_recipe(const std::string& path);

/// The numbers of a capture's layers. Throws InvalidArgument where one has none, or two have the same.
std::vector<int> layer_numbers(const std::vector<CapturedLayer>& layers);

/// What a recipe says of these layers. Throws InvalidArgument where it lacks one, or says it has other heads
/// or dims.
std::vector<LayerChoice> choices_of(const Recipe& recipe, const std::vector<CapturedLayer>& layers,
                                    const std::string& path);

}  // namespace halftone::cli
