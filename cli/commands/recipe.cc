// `halftone recipe`: formats for each layer, within a budget of bytes or of error.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "cli/commands/command.h"
#include "cli/eval/options.h"
#include "cli/files/outputs.h"
#include "cli/host/host.h"
#include "cli/recipe/candidates.h"
#include "cli/recipe/check.h"
#include "cli/recipe/frontier.h"
#include "cli/report/extras.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

struct RecipeLine : EvalLine {
  double bytes = 0;   ///< per token, in all layers; 0: not given
  std::string error;  ///< "2%" or "0.02"
  std::string output, html;
  ExtraOptions extras;
};

double parse_error(const std::string& text) {
  const bool percent_sign = text.ends_with('%');
  double value = 0;
  const bool read = read_number(text.substr(0, text.size() - (percent_sign ? 1 : 0)), value);
  if (!read || !(value > 0) || !std::isfinite(value)) {
    throw UsageError(fmt::format("--error is '{}', but must be a number above 0: write it as 2% or 0.02.",
                                 printable(text)));
  }
  const double error = percent_sign ? value / 100 : value;
  if (error >= 1) {
    throw UsageError(
        fmt::format("--error is {}, which is {:g}%, but must be below 100%: write it as 2% or 0.02.",
                    printable(text), error * 100));
  }
  return error;
}

/// What a total of the frontier costs per layer: the root mean square of their errors.
double error_of(const Frontier::Total& total, std::size_t layers) {
  return std::sqrt(total.cost / static_cast<double>(layers));
}

Frontier frontier_of(const EvalReport& report) {
  std::vector<std::vector<LayerOption>> options(report.layers.size());
  for (std::size_t l = 0; l < report.layers.size(); ++l) {
    const CapturedLayer& shape = report.layers[l].shape;
    for (const FormatResult& f : report.formats) {
      const double error = f.layers[l].output.relative;
      const KvCacheSpec spec =
          f.choice.spec(shape.kv_heads, shape.head_dim, shape.v_dim, report.options.page_size);
      options[l].push_back({page_layout(spec).page_bytes, error * error});
    }
  }
  return Frontier(options);
}

/// Position of what was asked for on the frontier. Throws UsageError that names the nearest there is.
int choose(const Frontier& frontier, const RecipeLine& line, double error, std::size_t layers) {
  const std::vector<Frontier::Total>& totals = frontier.totals();
  if (totals.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "a layer's output holds NaN or infinity with every format: look at `halftone eval`.");
  }
  const int page = line.options.page_size;
  if (line.bytes > 0) {
    const int found = frontier.cheapest_within(line.bytes * page);
    if (found >= 0) return found;
    const double least = std::ceil(static_cast<double>(totals.front().bytes) / page);
    throw UsageError(fmt::format(
        "--bytes-per-token is {:g}, but the smallest recipe for {} layer{} takes {:.0f}, with an error of "
        "{}: use "
        "{:.0f} or more, or name smaller formats in --formats.",
        line.bytes, layers, layers == 1 ? "" : "s", least, percent(error_of(totals.front(), layers)), least));
  }
  const int found = frontier.smallest_within(error * error * static_cast<double>(layers));
  if (found >= 0) return found;
  throw UsageError(
      fmt::format("--error is {}, but the most exact recipe has {}, with {:.0f} bytes per token: use more "
                  "than {}, or name "
                  "more exact formats in --formats.",
                  percent(error), percent(error_of(totals.back(), layers)),
                  static_cast<double>(totals.back().bytes) / page, percent(error_of(totals.back(), layers))));
}

Recipe make_recipe(const EvalReport& report, const std::vector<int>& options) {
  Recipe recipe;
  std::vector<CapturedLayer> shapes;
  shapes.reserve(report.layers.size());
  for (const LayerReport& layer : report.layers) shapes.push_back(layer.shape);
  const std::vector<int> numbers = layer_numbers(shapes);
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    const FormatResult& f = report.formats[static_cast<std::size_t>(options[l])];
    const LayerResult& r = f.layers[l];
    recipe.layers[numbers[l]] = {
        {f.choice, r.scales}, shapes[l].kv_heads, shapes[l].head_dim, shapes[l].v_dim, r.output.relative};
  }
  return recipe;
}

/// A line about the best that one format for all layers does within as many bytes.
std::string single_format(const EvalReport& report, double bytes) {
  const FormatResult* best = nullptr;
  double best_error = std::numeric_limits<double>::infinity();
  for (const FormatResult& f : report.formats) {
    double sum = 0, squares = 0;
    for (const LayerResult& r : f.layers) {
      sum += r.bytes_per_token;
      squares += r.output.relative * r.output.relative;
    }
    const double error = std::sqrt(squares / static_cast<double>(f.layers.size()));
    if (sum <= bytes && error < best_error) {
      best = &f;
      best_error = error;
    }
  }
  if (best == nullptr) return "\nNo single format is as small.";
  return fmt::format("\nOne format for all layers, {}, has {} within these bytes.", best->choice.name,
                     percent(best_error));
}

nlohmann::ordered_json about(const RecipeLine& line, double error) {
  nlohmann::ordered_json json = provenance();
  json["capture"] = line.file;
  if (line.bytes > 0) {
    json["asked_bytes_per_token"] = line.bytes;
  } else {
    json["asked_error"] = error;
  }
  return json;
}

void run_recipe(RecipeLine& line, Terminal& terminal) {
  if ((line.bytes > 0) == !line.error.empty()) {
    throw UsageError("one of --bytes-per-token and --error is needed, and only one: give a limit.");
  }
  const double error = line.error.empty() ? 0 : parse_error(line.error);
  finish_capture_options(line);
  if (line.output == "-" && line.html == "-")
    throw UsageError("--output and --html are both -: name a file for one.");
  check_outputs({"the input", line.file}, {{"--output", line.output}, {"--html", line.html}});
  EvalOptions& options = line.options;
  options.timed = !line.html.empty();
  if (error > 0) options.max_error = error;
  const std::vector<CapturedLayer> layers = layers_of(line.file, options);
  layer_numbers(layers);
  ReportExtras extras = read_extras(line.extras, layers);
  if (options.formats.empty()) options.formats = recipe_choices(layers, layers.front().half_precision);
  const EvalReport report = evaluate(line.file, options, terminal);
  const Frontier frontier = frontier_of(report);
  const int total = choose(frontier, line, error, layers.size());
  const Recipe recipe = make_recipe(report, frontier.options(total));
  const std::string text =
      to_json(recipe, about(line, error)).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";

  // What is judged is the file as others will read it.
  RecipeReport check{parse_recipe(text, "the recipe"), layer_numbers(layers), {}, {}};
  measure_recipe(check, line.file, options, layers, terminal);
  if (std::fabs(check.error() - recipe.error()) > 1e-6 * recipe.error()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("the recipe has an error of {}, but read from its file {}: report this.",
                            percent(recipe.error()), percent(check.error())));
  }
  check.sentence += single_format(report, check.bytes_per_token());
  extras.recipe = std::move(check);
  if (!line.output.empty()) write_output(terminal, line.output, text);
  if (!line.html.empty()) write_output(terminal, line.html, to_html(report, extras));
  if (line.output == "-" || line.html == "-") return;
  print_recipe(terminal, *extras.recipe);
  for (const std::string& path : {line.output, line.html}) {
    if (!path.empty()) print(terminal.out, "Wrote {}.\n", printable(path, 4096));
  }
}

constexpr const char* kRecipeFooter =
    "\nWhat it does:\n"
    "  Measures every candidate on every layer as `halftone eval` does, and takes for each layer the one "
    "that makes\n"
    "  the bytes of a token, in all layers together, or the root mean square of the layers' output errors "
    "least\n"
    "  (docs/recipe.md). Candidates are formats with kernels of their own, rotated and not.\n\n"
    "Examples:\n"
    "  halftone recipe capture.safetensors --error 2% --output recipe.json\n"
    "  halftone recipe capture.safetensors --bytes-per-token 20000 --output recipe.json --html report.html\n"
    "  halftone eval other-text.safetensors --recipe recipe.json       the same recipe on another capture\n";

}  // namespace

void add_recipe(Command app, Terminal& terminal) {
  const Command command =
      app.add_subcommand("recipe", "Choose formats for each layer within bytes or an error");
  auto line = std::make_shared<RecipeLine>();
  command->footer(std::string("Input:\n") + std::string(naming_help()) + kRecipeFooter);
  add_capture_options(command, *line,
                      "Comma-separated candidates, K:V and +rot allowed (default: those with fast kernels)");
  command->add_option("--bytes-per-token", line->bytes, "Most bytes of a token, in all layers of the capture")
      ->check(positive());
  command
      ->add_option("--error", line->error, "Largest output error, root mean square of the layers: 2% or 0.02")
      ->type_name("X");
  command->add_option("--output", line->output, "Write the recipe as JSON (- for stdout)")->type_name("FILE");
  command->add_option("--html", line->html, "Write a self-contained page with plots (- for stdout)")
      ->type_name("FILE");
  add_extra_options(command, line->extras);
  command->callback([line, &terminal] { run_recipe(*line, terminal); });
}

}  // namespace halftone::cli
