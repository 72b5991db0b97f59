// What a recipe costs on a capture: that it was made from, or another one.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/recipe/recipe.h"

namespace halftone::cli {

/// A recipe as measured on the capture.
struct RecipeReport {
  Recipe recipe;
  std::vector<int> numbers;         ///< of the capture's layers
  std::vector<LayerResult> layers;  ///< of the capture
  std::string sentence;             ///< what it is good for, a sentence a line
  double bytes_per_token() const;   ///< of the capture's layers together
  double error() const;             ///< root mean square
  double error_worst() const;
};

/// Reads a recipe for these layers, which are not measured yet. Throws InvalidArgument.
RecipeReport read_recipe(const std::string& path, const std::vector<CapturedLayer>& layers);

/// Fills in the layers and the sentence: each layer of the capture through a cache as the recipe says.
void measure_recipe(RecipeReport& report, const std::string& capture, const EvalOptions& options,
                    const std::vector<CapturedLayer>& layers, Terminal& terminal);

/// A table of the layers.
void print_recipe(Terminal& terminal, const RecipeReport& report);

/// `layers` of name, bytes_per_token and error; the sums.
nlohmann::ordered_json to_json(const RecipeReport& report);

}  // namespace halftone::cli
