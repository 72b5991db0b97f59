// The plots of the eval report, each one SVG.
#pragma once

#include <string>
#include <vector>

#include "cli/report/extras.h"

namespace halftone::cli {

/// Output error of the worst layer against bytes per token: every format, the Pareto line, the limit.
/// `recipe` may be null.
std::string plot_error_against_bytes(const EvalReport& report, const RecipeReport* recipe);

/// Bytes of K and V of every layer of a recipe, with its output error.
std::string plot_recipe(const RecipeReport& recipe);

/// Colours of the heat maps: one logarithmic scale for all formats of a report.
struct HeatScale {
  double low = 0, high = 0;
};
HeatScale heat_scale(const EvalReport& report, const std::vector<std::size_t>& formats);
std::string plot_heat_legend(const HeatScale& scale);

/// Output error of each layer (rows) and query head (columns) with one format.
std::string plot_heat_map(const EvalReport& report, std::size_t format, const HeatScale& scale);

/// Largest |K| of every channel of a layer, as captured and after the Hadamard rotation.
std::string plot_channels(const LayerReport& layer);

/// CSS class of a format's family: "f16", "fp8", "int8" or "int4", by the K format.
std::string_view family(const KvFormat& format);

}  // namespace halftone::cli
