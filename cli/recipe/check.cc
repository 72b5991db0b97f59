#include "cli/recipe/check.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>

#include "cli/figures/json.h"
#include "cli/terminal/table.h"
#include "cli/terminal/text.h"

namespace halftone::cli {

double RecipeReport::bytes_per_token() const {
  double sum = 0;
  for (const LayerResult& layer : layers) sum += layer.bytes_per_token;
  return sum;
}

double RecipeReport::error() const {
  double squares = 0;
  for (const LayerResult& layer : layers) squares += layer.output.relative * layer.output.relative;
  return std::sqrt(squares / static_cast<double>(layers.size()));
}

double RecipeReport::error_worst() const {
  double worst = 0;
  for (const LayerResult& layer : layers) worst = std::max(worst, layer.output.relative);
  return worst;
}

RecipeReport read_recipe(const std::string& path, const std::vector<CapturedLayer>& layers) {
  RecipeReport report;
  report.recipe = load_recipe(path);
  choices_of(report.recipe, layers, path);  // refuses what does not fit
  report.numbers = layer_numbers(layers);
  return report;
}

void measure_recipe(RecipeReport& report, const std::string& capture, const EvalOptions& options,
                    const std::vector<CapturedLayer>& layers, Terminal& terminal) {
  report.layers =
      evaluate_choices(capture, options, choices_of(report.recipe, layers, "the recipe"), terminal);
  const double bytes = report.bytes_per_token();
  double uncompressed = 0;
  for (const LayerResult& layer : report.layers) uncompressed += layer.bytes_per_token * layer.compression;
  const std::size_t others = report.recipe.layers.size() - report.layers.size();
  report.sentence = fmt::format(
      "The recipe takes {:.0f} bytes per token in {} layer{}, {:.2f}x less than bf16.\n"
      "Its output error is {} (root mean square), {} in the worst layer.{}",
      bytes, report.layers.size(), report.layers.size() == 1 ? "" : "s", uncompressed / bytes,
      percent(report.error()), percent(report.error_worst()),
      others == 0
          ? ""
          : fmt::format("\nThe capture lacks {} of its layers, of which nothing is said here.", others));
}

void print_recipe(Terminal& terminal, const RecipeReport& report) {
  Table table;
  table.column("layer", Table::Align::kLeft);
  table.column("K", Table::Align::kLeft);
  table.column("V", Table::Align::kLeft);
  table.column("bytes/\ntoken");
  table.column("output\nerror");
  for (std::size_t i = 0; i < report.numbers.size(); ++i) {
    const FormatChoice& choice = report.recipe.layers.at(report.numbers[i]).stored.choice;
    const LayerResult& r = report.layers[i];
    table.row({fmt::format("{}", report.numbers[i]),
               choice_name(choice.k, choice.rotate_k, choice.k, choice.rotate_k, choice.channels),
               choice_name(choice.v, choice.rotate_v, choice.v, choice.rotate_v),
               fmt::format("{:.0f}", r.bytes_per_token), percent(r.output.relative)});
  }
  table.print(terminal);
  print(terminal.out, "\n{}\n", terminal.bold(report.sentence));
}

nlohmann::ordered_json to_json(const RecipeReport& report) {
  nlohmann::ordered_json json = {{"bytes_per_token", report.bytes_per_token()},
                                 {"error", number_or_text(report.error())},
                                 {"error_worst", number_or_text(report.error_worst())},
                                 {"layers", nlohmann::ordered_json::array()}};
  for (std::size_t i = 0; i < report.numbers.size(); ++i) {
    json["layers"].push_back({{"layer", report.numbers[i]},
                              {"name", report.recipe.layers.at(report.numbers[i]).stored.choice.name},
                              {"bytes_per_token", report.layers[i].bytes_per_token},
                              {"error", number_or_text(report.layers[i].output.relative)}});
  }
  return json;
}

}  // namespace halftone::cli
