// What a recipe costs on a capture: that it was made from, or another one.
#pragma once

#include "cli/report/extras.h"

namespace halftone::cli {

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
